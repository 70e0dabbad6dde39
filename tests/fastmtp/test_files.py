"""A checkpoint is the same wherever it lies, is read in ranges only, and a place that does not answer is named."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ResponseStreamingError

from fastmtp import storage
from fastmtp.checkpoint import CONFIG, INDEX, open_checkpoint
from fastmtp.errors import CheckpointError, UnreachableError, UnreadableError
from fastmtp.extract import HEAD_FILE, extract, runs
from fastmtp.files import LocalFiles, S3Files, is_hub, is_local, local_path, open_files
from fastmtp.inspection import inspect
from fastmtp.native import find_head
from fastmtp.progress import Reporter
from tests.conftest import S3Server
from tests.fastmtp.hub import Hub

PLACES = ["rclone", "moto", "hub"]
PROBE = 256 << 10


def _upload(server: S3Server, wide: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    client = storage.s3_client()
    if "models" not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket="models")
    for path in wide.iterdir():
        client.upload_file(str(path), "models", f"team/one/{path.name}")
    client.put_object(Bucket="models", Key="team/one-more/config.json", Body=b"{}")
    client.put_object(Bucket="models", Key="team/one/.hidden", Body=b"")
    client.close()
    return "s3://models/team/one/"


@pytest.fixture(params=PLACES)
def remote(request: pytest.FixtureRequest, wide: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkpoint's name at a store or hub."""
    if request.param == "hub":
        return str(request.getfixturevalue("hub").repository)
    server = request.getfixturevalue("s3_server" if request.param == "rclone" else "moto_server")
    return _upload(server, wide, monkeypatch)


def extracted(source: str | Path, target: Path) -> bytes:
    extract(source, target, Reporter("extract", quiet=True))
    return (target / HEAD_FILE).read_bytes()


def headers_at_most(root: Path) -> int:
    """Config, index, and a first read of every safetensors file."""
    small = sum((root / name).stat().st_size for name in (CONFIG, INDEX))
    return small + sum(min(PROBE, path.stat().st_size) for path in root.glob("*.safetensors"))


def test_the_same_files_and_ranges(remote: str, wide: Path) -> None:
    here, there = LocalFiles(wide), open_files(remote)
    assert there.root is None
    listed = there.list()
    assert {name: info.size for name, info in listed.items()} == {name: i.size for name, i in here.list().items()}
    assert list(listed) == sorted(listed) and all(info.stamp for info in listed.values())
    shard = "model-00001-of-00003.safetensors"
    size = listed[shard].size or 0
    for begin, end in ((0, 8), (7, 300_000), (size - 5, size), (11, 11), (0, size)):
        assert there.read(shard, begin, end) == here.read(shard, begin, end), (begin, end)
    one, other = open_checkpoint(wide), open_checkpoint(remote)
    assert (one.tensors, one.config, one.index, one.shards) == (other.tensors, other.config, other.index, other.shards)
    for files in (here, there):
        with pytest.raises(UnreadableError, match=r"3 of the 10 bytes"):
            files.read(shard, size - 3, size + 7)
        with pytest.raises(UnreadableError, match="absent"):
            files.read("absent.safetensors", 0, 8)


def test_inspect_reads_headers_only(remote: str, wide: Path, reads: Counter[str]) -> None:
    found = inspect(remote)
    assert found.usable and found.head and found.head.tensors == 29
    limit = headers_at_most(wide)
    assert 0 < sum(reads.values()) <= limit < found.bytes / 4


def test_extract_reads_headers_and_the_head(remote: str, wide: Path, reads: Counter[str], tmp_path: Path) -> None:
    assert extracted(remote, tmp_path / "there") == extracted(wide, tmp_path / "here")
    head = find_head(open_checkpoint(wide))
    reads.clear()
    extracted(remote, tmp_path / "again")
    norms = sum(entry.nbytes for key, entry in head.tensors.items() if key.endswith("norm.weight"))
    config = (wide / CONFIG).stat().st_size
    assert head.nbytes < sum(reads.values()) <= headers_at_most(wide) + head.nbytes + norms + config


def test_neighbours_come_in_one_read(wide: Path, reads: Counter[str], tmp_path: Path) -> None:
    """Experts by the thousand must not be a request each."""
    head = find_head(open_checkpoint(wide))
    together = list(runs(head.tensors.values()))
    assert sorted(entry.key for run in together for entry in run) == sorted(head.tensors)
    assert len(together) < len(head.tensors)
    for run in together:
        assert all((a.file, a.end) == (b.file, b.begin) for a, b in zip(run, run[1:], strict=False))


@pytest.mark.parametrize("place", ["directory", *PLACES])
def test_a_short_answer_is_an_error(
    place: str, wide: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that became shorter meanwhile, and a store that sends less and says that this is all."""
    name = "model-00003-of-00003.safetensors"
    begin = (wide / name).read_bytes()[:5000]
    if place == "directory":
        checkpoint = open_checkpoint(shutil.copytree(wide, tmp_path / "m"))
        (tmp_path / "m" / name).write_bytes(begin)
    elif place == "hub":
        hub: Hub = request.getfixturevalue("hub")
        checkpoint = open_checkpoint("org/model")
        hub.short = 100
    else:
        server = request.getfixturevalue("s3_server" if place == "rclone" else "moto_server")
        checkpoint = open_checkpoint(_upload(server, wide, monkeypatch))
        client = storage.s3_client()
        client.put_object(Bucket="models", Key=f"team/one/{name}", Body=begin)
        client.close()
    with pytest.raises(UnreadableError, match=name):
        checkpoint.read(checkpoint.tensors["lm_head.weight"])
    with pytest.raises(CheckpointError):
        open_checkpoint(checkpoint.files.name)


@pytest.mark.parametrize("server", ["s3_server", "moto_server"])
def test_what_s3_refuses(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found: S3Server = request.getfixturevalue(server)
    for name, value in found.env.items():
        monkeypatch.setenv(name, value)
    for uri, match in (("s3://no-such-bucket/x/", "no-such-bucket.*NoSuchBucket"), ("s3://", "cannot be read")):
        with pytest.raises(UnreadableError, match=match):
            open_files(uri).list()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "no url")
    with pytest.raises(UnreadableError, match="no url"):
        open_files("s3://models/x")


def test_an_empty_prefix_and_a_wrong_key(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="holds nothing"):
        open_files("s3://models/no-such-prefix/").list()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(UnreadableError, match="SignatureDoesNotMatch|AccessDenied|403") as caught:
        open_files("s3://models/x").list()
    assert "credentials" in caught.value.mend and "wrong" not in str(caught.value)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("times", [2, 3])
def test_a_body_that_breaks_off(
    times: int, short: bool, wide: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice is tried again; three times is an error."""
    files = S3Files(_upload(s3_server, wide, monkeypatch))
    get, left = files._client.get_object, [times]

    class Body:
        def read(self, _count: int) -> bytes:
            if short:
                return b"x"
            raise ResponseStreamingError(error="broken off")

        def close(self) -> None:
            return

    def flaky(**arguments: object) -> dict[str, object]:
        answer: dict[str, object] = get(**arguments)
        if left[0]:
            left[0] -= 1
            answer["Body"].close()
            answer["Body"] = Body()
        return answer

    monkeypatch.setattr(files._client, "get_object", flaky)
    if times == 2:
        assert files.read(CONFIG, 0, 8) == (wide / CONFIG).read_bytes()[:8]
    else:
        kind, match = (UnreadableError, "gave 1 of the 8 bytes") if short else (UnreachableError, "does not answer")
        with pytest.raises(kind, match=rf"config\.json {match}"):
            files.read(CONFIG, 0, 8)
    assert left == [0]


def test_a_store_without_ranges_sends_no_whole_shard(
    wide: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = S3Files(_upload(s3_server, wide, monkeypatch))
    get = files._client.get_object
    monkeypatch.setattr(files._client, "get_object", lambda Range, **arguments: get(**arguments))
    with pytest.raises(UnreadableError, match=r"config\.json: the store sends all of it"):
        files.read(CONFIG, 0, 8)


def test_an_endpoint_that_is_not_there(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x" * 16)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{free_port}")
    begun = time.monotonic()
    with pytest.raises(UnreachableError, match="does not answer") as caught:
        open_files("s3://models/x").list()
    assert time.monotonic() - begun < 20
    assert "AWS_ENDPOINT_URL_S3" in caught.value.mend and caught.value.code == "unreachable"


def test_names_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert is_hub("org/model") and is_hub("org/model@v1") and is_hub("hf://org/model@refs/pr/1")
    assert is_local("a/b") and is_local("./org/model") and is_local("model") and is_local("file:///x")
    assert not is_local("s3://a/b") and not is_hub("s3://a/b") and not is_hub("a/b")
    assert local_path("~no-such-user/x") == Path("~no-such-user/x")
    long = "org/" + "x" * 5000
    with pytest.raises(CheckpointError):
        open_files(long)
    for name, match in (
        ("ftp://x/y", "neither a path"), ("/a\0b", "null"), (str(tmp_path / ("x" * 5000)), "cannot be looked at"),
        (str(tmp_path / "absent"), "does not exist"), (__file__, "no directory"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=match) as caught:
            open_files(name)
        assert caught.value.mend


def test_files_that_cannot_be_read(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that lead nowhere, pipes, directories named like shards, and what the system refuses."""
    root = Path(shutil.copytree(wide, tmp_path / "m"))
    os.mkfifo(root / "pipe.safetensors")
    (root / "loop.json").symlink_to("loop.json")
    (root / "folder.safetensors").mkdir()
    faults = {fault.file: fault.code for fault in inspect(root).faults if fault.level == "error"}
    assert faults == {"pipe.safetensors": "file_unreadable", "loop.json": "file_unreadable"}

    def refused(*_arguments: object, **_options: object) -> Iterator[None]:
        raise PermissionError(13, "Permission denied", str(wide))

    monkeypatch.setattr(Path, "open", refused)
    codes = {(fault.code, fault.file) for fault in inspect(wide).faults}
    assert {("file_unreadable", CONFIG), ("file_unreadable", "model-00001-of-00003.safetensors")} <= codes
    assert all("Permission denied" in fault.what for fault in inspect(wide).faults if fault.code == "file_unreadable")
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(CheckpointError, match="cannot be listed: Permission denied"):
        inspect(wide)
