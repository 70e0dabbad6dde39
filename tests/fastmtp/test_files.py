"""A checkpoint is the same wherever it lies, is read in ranges only, and a place that does not answer is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastmtp import pipeline, procs, storage
from fastmtp.checkpoint import CONFIG, INDEX, open_checkpoint
from fastmtp.config import JobSpec
from fastmtp.errors import CheckpointError, UnreachableError, UnreadableError
from fastmtp.extract import HEAD_FILE, extract, runs
from fastmtp.files import LocalFiles, S3Files, is_hub, is_local, local_path, open_files
from fastmtp.hub import HubFiles
from fastmtp.inspection import inspect
from fastmtp.native import find_head
from fastmtp.pipeline import Workdir, resolve_model
from fastmtp.preflight import Policy, check_job
from fastmtp.progress import Reporter
from tests.conftest import S3Server
from tests.fastmtp.hub import COMMIT, Hub, serve
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import small_config
from tests.fastmtp.test_cli import fastmtp

PLACES = ["rclone", "moto", "hub"]
PROBE = 256 << 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose files are much larger than what a first read takes."""
    config = small_config("qwen3.5-moe", vocab_size=8192, hidden_size=128, moe_intermediate_size=256, num_experts=4)
    plan = Plan(shards=3, head="spread")
    return write(tmp_path_factory.mktemp("files") / "m", family="qwen3.5-moe", config=config, plan=plan)


@pytest.fixture(scope="module")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The other real endpoint: moto's."""
    import httpx

    root = tmp_path_factory.mktemp("moto")
    url = f"http://127.0.0.1:{procs.free_port()}"
    argv = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/moto-api/", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    with procs.spawn(argv, log=root / "log") as child:
        procs.wait_until(ready, child, what="moto", log=root / "log", timeout=60)
        env = {"AWS_ENDPOINT_URL_S3": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        yield S3Server(url, env | {"AWS_DEFAULT_REGION": "us-east-1"}, root)


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Our hub in the place of the real one, with an empty cache."""
    with serve(model) as hub:
        _use_hub(hub.url, tmp_path / "cache", monkeypatch)
        yield hub
        _close()


def _use_hub(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    _close()


def _close() -> None:
    from huggingface_hub.utils import close_session

    close_session()


def _upload(server: S3Server, model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    client = storage.s3_client()
    if "models" not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket="models")
    for path in model.iterdir():
        client.upload_file(str(path), "models", f"team/one/{path.name}")
    client.put_object(Bucket="models", Key="team/one-more/config.json", Body=b"{}")
    client.put_object(Bucket="models", Key="team/one/.hidden", Body=b"")
    client.close()
    return "s3://models/team/one/"


@pytest.fixture(params=PLACES)
def remote(request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The checkpoint's name at a store or hub."""
    if request.param == "hub":
        return str(request.getfixturevalue("hub").repository)
    server = request.getfixturevalue("s3_server" if request.param == "rclone" else "moto_server")
    return _upload(server, model, monkeypatch)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes asked of each file, whatever kind of place it is in."""
    found: Counter[str] = Counter()

    def counting(kind: type) -> None:
        read = kind.read

        def counted(self: object, name: str, begin: int, end: int) -> bytes:
            found[name] += end - begin
            data: bytes = read(self, name, begin, end)
            return data

        monkeypatch.setattr(kind, "read", counted)

    for kind in (LocalFiles, S3Files, HubFiles):
        counting(kind)
    return found


def _extract(model: str | Path, target: Path) -> bytes:
    extract(model, target, Reporter("extract", quiet=True))
    return (target / HEAD_FILE).read_bytes()


def _headers_at_most(model: Path) -> int:
    """Config, index, and a first read of every safetensors file."""
    small = sum((model / name).stat().st_size for name in (CONFIG, INDEX))
    return small + sum(min(PROBE, path.stat().st_size) for path in model.glob("*.safetensors"))


def test_the_same_files_and_ranges(remote: str, model: Path) -> None:
    here, there = LocalFiles(model), open_files(remote)
    assert there.root is None
    listed = there.list()
    assert {name: info.size for name, info in listed.items()} == {name: i.size for name, i in here.list().items()}
    assert list(listed) == sorted(listed) and all(info.stamp for info in listed.values())
    shard = "model-00001-of-00003.safetensors"
    size = listed[shard].size or 0
    for begin, end in ((0, 8), (7, 300_000), (size - 5, size), (11, 11), (0, size)):
        assert there.read(shard, begin, end) == here.read(shard, begin, end), (begin, end)
    one, other = open_checkpoint(model), open_checkpoint(remote)
    assert (one.tensors, one.config, one.index, one.shards) == (other.tensors, other.config, other.index, other.shards)
    for files in (here, there):
        with pytest.raises(UnreadableError, match=r"3 of the 10 bytes"):
            files.read(shard, size - 3, size + 7)
        with pytest.raises(UnreadableError, match="absent"):
            files.read("absent.safetensors", 0, 8)


def test_inspect_reads_headers_only(remote: str, model: Path, reads: Counter[str]) -> None:
    found = inspect(remote)
    assert found.usable and found.head and found.head.tensors == 29
    limit = _headers_at_most(model)
    assert 0 < sum(reads.values()) <= limit < found.bytes / 4


def test_extract_reads_headers_and_the_head(remote: str, model: Path, reads: Counter[str], tmp_path: Path) -> None:
    assert _extract(remote, tmp_path / "there") == _extract(model, tmp_path / "here")
    head = find_head(open_checkpoint(model))
    reads.clear()
    _extract(remote, tmp_path / "again")
    norms = sum(entry.nbytes for key, entry in head.tensors.items() if key.endswith("norm.weight"))
    config = (model / CONFIG).stat().st_size
    assert head.nbytes < sum(reads.values()) <= _headers_at_most(model) + head.nbytes + norms + config


def test_the_hub_sends_what_is_read_and_the_token_stays(hub: Hub, model: Path, tmp_path: Path) -> None:
    inspect("org/model")
    limit = _headers_at_most(model)
    assert 0 < hub.sent.total() <= limit
    hub.sent.clear()
    _extract(f"hf://org/model@{COMMIT}", tmp_path / "head")
    head = find_head(open_checkpoint(model))
    norms = sum(entry.nbytes for key, entry in head.tensors.items() if key.endswith("norm.weight"))
    assert head.nbytes < hub.sent.total() <= limit + head.nbytes + norms + (model / CONFIG).stat().st_size
    assert not hub.tokens
    assert hub.seen[0] == "GET /api/models/org/model/revision/main" and all(COMMIT in s for s in hub.seen if "res" in s)


def test_neighbours_come_in_one_read(model: Path, reads: Counter[str], tmp_path: Path) -> None:
    """Experts by the thousand must not be a request each."""
    head = find_head(open_checkpoint(model))
    together = list(runs(head.tensors.values()))
    assert sorted(entry.key for run in together for entry in run) == sorted(head.tensors)
    assert len(together) < len(head.tensors)
    for run in together:
        assert all((a.file, a.end) == (b.file, b.begin) for a, b in zip(run, run[1:], strict=False))


def test_a_hub_without_ranges_sends_no_whole_shard(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    assert inspect("org/model").usable
    with pytest.raises(UnreadableError, match="sends all of it"):
        _extract("org/model", tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_an_answer_that_breaks_off_is_an_error(hub: Hub, tmp_path: Path) -> None:
    checkpoint = open_checkpoint("org/model")
    hub.cut = 100
    for call in (lambda: open_checkpoint("org/model"), lambda: _extract("org/model", tmp_path / "head")):
        with pytest.raises(UnreachableError, match="org/model"):
            call()
    with pytest.raises(UnreachableError):
        checkpoint.read(checkpoint.tensors["lm_head.weight"])
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("place", ["directory", *PLACES])
def test_a_short_answer_is_an_error(
    place: str, model: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that became shorter meanwhile, and a store that sends less and says that this is all."""
    name = "model-00003-of-00003.safetensors"
    begin = (model / name).read_bytes()[:5000]
    if place == "directory":
        checkpoint = open_checkpoint(shutil.copytree(model, tmp_path / "m"))
        (tmp_path / "m" / name).write_bytes(begin)
    elif place == "hub":
        hub: Hub = request.getfixturevalue("hub")
        checkpoint = open_checkpoint("org/model")
        hub.short = 100
    else:
        server = request.getfixturevalue("s3_server" if place == "rclone" else "moto_server")
        checkpoint = open_checkpoint(_upload(server, model, monkeypatch))
        client = storage.s3_client()
        client.put_object(Bucket="models", Key=f"team/one/{name}", Body=begin)
        client.close()
    with pytest.raises(UnreadableError, match=name):
        checkpoint.read(checkpoint.tensors["lm_head.weight"])
    with pytest.raises(CheckpointError):
        open_checkpoint(checkpoint.files.name)


@pytest.mark.parametrize(
    ("refusal", "kind", "match", "mend"),
    [
        ((404, "RepoNotFound"), UnreadableError, "not on the hub, or is private", "HF_TOKEN"),
        ((404, "RevisionNotFound"), UnreadableError, "Revision Not Found", "revision"),
        ((401, ""), UnreadableError, "not on the hub, or is private", "HF_TOKEN"),
        ((401, "GatedRepo"), UnreadableError, "is gated", "Accept its terms"),
        ((403, "GatedRepo"), UnreadableError, "is gated", "Accept its terms"),
        ((403, ""), UnreadableError, "refuses", "HF_TOKEN"),
        ((200, ""), UnreadableError, "cannot be read from the hub", "Check the id"),
        ((500, ""), UnreachableError, "does not answer", "Check the network"),
        ((429, ""), UnreachableError, "does not answer", "Check the network"),
    ],
)
def test_what_the_hub_refuses(
    refusal: tuple[int, str], kind: type[CheckpointError], match: str, mend: str, hub: Hub
) -> None:
    hub.refusal = refusal
    begun = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        open_files("org/model")
    assert time.monotonic() - begun < 5
    assert mend in caught.value.mend and caught.value.pointer == "/model"
    assert "org/model" in str(caught.value) and "hf_secret" not in str(caught.value)


def test_a_hub_that_fails_later_is_tried_for_seconds_only(hub: Hub) -> None:
    files = open_files("org/model")
    hub.refusal = (503, "")
    begun = time.monotonic()
    with pytest.raises(UnreachableError):
        files.read(CONFIG, 0, 8)
    assert time.monotonic() - begun < 10
    assert len([path for path in hub.seen if "resolve" in path]) == 3


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


@pytest.fixture
def no_hub(free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _use_hub(f"http://127.0.0.1:{free_port}", tmp_path / "cache", monkeypatch)
    yield
    _close()


def test_no_hub_and_no_cache(no_hub: None) -> None:
    begun = time.monotonic()
    for call in (open_files, inspect, resolve_model):
        with pytest.raises(UnreachableError, match="org/model") as caught:
            call("org/model")
        assert caught.value.code == "unreachable" and "name a local directory" in caught.value.mend
    assert time.monotonic() - begun < 10


def test_the_command_and_the_hub(hub: Hub, free_port: int, tmp_path: Path) -> None:
    """As a child process: from the hub, without it, and without it but with its cache."""
    env = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
    done = fastmtp("inspect", "org/model", "--json", **env)
    assert done.returncode == 0 and json.loads(done.stdout)["usable"], done.stderr
    away = env | {"HF_ENDPOINT": f"http://127.0.0.1:{free_port}"}
    done = fastmtp("inspect", "org/model", "--json", **away)
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["code"] == "unreachable"
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    program = "import sys; from fastmtp.pipeline import resolve_model; print(resolve_model(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, "org/model"], env={**os.environ, **env}, check=True)
    for changes in (away, env | {"HF_HUB_OFFLINE": "1"}):
        done = fastmtp("inspect", "org/model", "--json", **changes)
        assert done.returncode == 0 and "snapshots" in json.loads(done.stdout)["model"], done.stderr


def test_no_hub_but_its_cache(hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was downloaded once is used; half of it is not."""
    expected = _extract("org/model", tmp_path / "before")
    snapshot = resolve_model("org/model")
    assert {path.name for path in snapshot.iterdir()} == {path.name for path in model.iterdir()}
    monkeypatch.setattr(hub, "refusal", (503, ""))
    found = open_files("org/model")
    assert found.root == snapshot
    assert inspect("org/model").usable
    assert _extract("org/model@main", tmp_path / "after") == expected
    assert resolve_model("org/model") == snapshot
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UnreachableError):
        open_files("org/model")
    hub.refusal = (404, "RepoNotFound")
    with pytest.raises(UnreadableError, match="not on the hub"):
        open_files("org/model")


def test_no_room_for_a_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(UnreadableError, match="No space left on device") as caught:
        resolve_model("org/model")
    assert "HF_HOME" in caught.value.mend


def _job(tmp_path: Path, **changes: object) -> JobSpec:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "one plus one?", "answer": "two"}\n')
    source = {"prompts": str(prompts)}
    return JobSpec.parse({"model": "org/model", "data": source, "evaluate": source} | changes)


def test_a_job_whose_hub_does_not_answer_here_is_taken(
    no_hub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may see a hub that the API does not. An S3 endpoint is no such thing, nor is a lost directory."""
    summary = check_job(_job(tmp_path), Policy())
    assert summary.keys() == {"model", "warnings"} and "org/model" in summary["warnings"][0]
    with pytest.raises(CheckpointError, match="does not exist"):
        check_job(_job(tmp_path, model=str(tmp_path / "absent")), Policy())
    monkeypatch.setattr("fastmtp.serving.vllm_python", lambda: Path("/python"))
    result = pipeline.run_one("preflight", Workdir(tmp_path), _job(tmp_path), quiet=True)
    assert result["summary"]["warnings"] == summary["warnings"]
    with pytest.raises(UnreachableError):
        pipeline.run_one("extract", Workdir(tmp_path), _job(tmp_path), quiet=True)


def test_a_job_whose_hub_refuses_is_refused(hub: Hub, tmp_path: Path) -> None:
    assert check_job(_job(tmp_path), Policy())["family"] == "qwen3.5-moe"
    hub.refusal = (401, "GatedRepo")
    with pytest.raises(CheckpointError, match="gated") as caught:
        check_job(_job(tmp_path), Policy())
    assert caught.value.pointer == "/model"


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


def test_files_that_cannot_be_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links that lead nowhere, pipes, directories named like shards, and what the system refuses."""
    root = Path(shutil.copytree(model, tmp_path / "m"))
    os.mkfifo(root / "pipe.safetensors")
    (root / "loop.json").symlink_to("loop.json")
    (root / "folder.safetensors").mkdir()
    faults = {fault.file: fault.code for fault in inspect(root).faults if fault.level == "error"}
    assert faults == {"pipe.safetensors": "file_unreadable", "loop.json": "file_unreadable"}

    def refused(*_arguments: object, **_options: object) -> Iterator[None]:
        raise PermissionError(13, "Permission denied", str(model))

    monkeypatch.setattr(Path, "open", refused)
    codes = {(fault.code, fault.file) for fault in inspect(model).faults}
    assert {("file_unreadable", CONFIG), ("file_unreadable", "model-00001-of-00003.safetensors")} <= codes
    assert all("Permission denied" in fault.what for fault in inspect(model).faults if fault.code == "file_unreadable")
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(CheckpointError, match="cannot be listed: Permission denied"):
        inspect(model)
