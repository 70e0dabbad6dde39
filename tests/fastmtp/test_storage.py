"""Publishing to a directory and to real S3 endpoints: whole, proved, manifest last; refused where it cannot be."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from pydantic import ValidationError

from fastmtp import fetch, storage
from fastmtp.config import PublishConfig
from fastmtp.errors import CheckpointError, ConfigError, DestinationError, InputError, IntegrityError
from fastmtp.fetching import RECORD
from fastmtp.progress import Reporter
from fastmtp.publish import options_of
from fastmtp.stage import FileEntry, sha256_file
from fastmtp.stores import begun
from fastmtp.stores.base import open_store
from fastmtp.stores.claim import Claim
from fastmtp.stores.settings import MAX_OBJECT, StoreSettings
from fastmtp.upload import Options, check_sizes, publish
from tests.conftest import S3Server

MEBI = 1 << 20
QUIET = Reporter("publish", quiet=True)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTMTP_S3_PART_SIZE", "5MiB")


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


def make_bucket() -> None:
    """`models`, at the endpoint that is in use."""
    # Not every endpoint takes that twice.
    with contextlib.suppress(ClientError):
        storage.s3_client().create_bucket(Bucket="models")


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    return use(s3_server, monkeypatch)


@pytest.fixture(params=["file", "rclone"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/published/"
    use(request.getfixturevalue("s3_server"), monkeypatch)
    return f"s3://models/{tmp_path.name}/"


Result = tuple[Path, dict[str, FileEntry]]


def entries(directory: Path) -> dict[str, FileEntry]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        path.relative_to(directory).as_posix(): FileEntry(size=path.stat().st_size, sha256=sha256_file(path))
        for path in paths
    }


@pytest.fixture
def result(tmp_path: Path) -> Result:
    directory = tmp_path / "result"
    (directory / "sub").mkdir(parents=True)
    (directory / "sub" / "small.txt").write_text("small")
    (directory / "a.safetensors").write_bytes(os.urandom(6 * MEBI))
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory, entries(directory)


def changed(result: Result, tmp_path: Path) -> Result:
    """The same with another small file, the large ones linked."""
    directory = tmp_path / "result-2"
    (directory / "sub").mkdir(parents=True)
    (directory / "sub" / "small.txt").write_text("other")
    for name in ("a.safetensors", "model.safetensors.index.json"):
        os.link(result[0] / name, directory / name)
    return directory, entries(directory)


def get(uri: str, directory: Path, **arguments: Any) -> dict[str, Any]:
    return fetch.fetch(fetch.find(uri), directory, QUIET, **arguments)


def test_round_trip(uri: str, result: Result, tmp_path: Path) -> None:
    directory, files = result
    placed: list[int] = []
    assert storage.latest(uri) is None
    manifest = publish(directory, uri, "v-1", files, {"note": "first"}, placed.append)
    assert sum(placed) == sum(entry.size for entry in files.values())
    assert storage.latest(uri) == manifest and manifest["note"] == "first"
    stored = json.loads(storage.read_bytes(uri + "v-1/manifest.json"))
    assert stored == manifest
    assert [item["uri"] for item in stored["files"]] == [f"{uri}v-1/{name}" for name in files]
    assert storage.verify(uri, manifest) == 3
    assert storage.read_bytes(uri + "v-1/sub/small.txt") == b"small"
    assert get(uri, tmp_path / "back")["fetched"] == 3
    assert {name: entry.sha256 for name, entry in entries(tmp_path / "back").items() if name != RECORD} == {
        name: entry.sha256 for name, entry in files.items()
    }
    assert get(uri + "v-1", tmp_path / "back") == {"fetched": 0, "bytes_fetched": 0, "found": 3}
    other, other_files = changed(result, tmp_path)
    publish(other, uri, "v-2", other_files, {})
    found = storage.latest(uri)
    assert found is not None and found["version"] == "v-2"
    # Only what is missing is read, and the directory moves on to the new version whole.
    assert get(uri, tmp_path / "back") == {"fetched": 1, "bytes_fetched": 5, "found": 2}
    assert (tmp_path / "back" / "sub" / "small.txt").read_text() == "other"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".partial", ".replaced"))]


def test_a_fetched_directory_is_verified_by_what_was_fetched(uri: str, result: Result, tmp_path: Path) -> None:
    publish(result[0], uri, "v-1", result[1], {})
    get(uri, tmp_path / "back")
    source = fetch.find(fetch.uri_of(str(tmp_path / "back")))
    found = storage.check_version(source.uri, fetch.manifest_for(source))
    assert (found.version, found.files, found.bytes_read) == ("v-1", 3, found.bytes)
    with (tmp_path / "back" / "a.safetensors").open("r+b") as file:
        file.write(b"x")
    with pytest.raises(IntegrityError, match=r"back/a\.safetensors"):
        storage.check_version(source.uri, fetch.manifest_for(source))
    with pytest.raises(InputError, match="was not fetched"):
        fetch.manifest_for(fetch.find(fetch.uri_of(str(result[0]))))


def test_no_manifest_before_everything_is_there(uri: str, result: Result) -> None:
    """Case U3: who looks meanwhile must not see a half-uploaded version; the run after it completes it."""
    directory, files = result
    (directory / "sub" / "small.txt").rename(directory / "away")
    with pytest.raises(DestinationError):
        publish(directory, uri, "v-1", files, {})
    store = open_store(uri)
    assert storage.latest(uri) is None and store.head("v-1/manifest.json") is None
    # Shards come first, the index after the side files: a loader that looks too early finds no index.
    assert store.head("v-1/a.safetensors") and not store.head("v-1/model.safetensors.index.json")
    (directory / "away").rename(directory / "sub" / "small.txt")
    assert storage.verify(uri, publish(directory, uri, "v-1", files, {})) == 3
    assert not store.objects(".fastmtp/")


def test_bytes_that_changed_are_found(uri: str, result: Result, tmp_path: Path) -> None:
    directory, files = result
    manifest = publish(directory, uri, "v-1", files, {})
    open_store(uri).put("v-1/sub/small.txt", b"smalL")
    with pytest.raises(IntegrityError, match=r"small\.txt"):
        storage.verify(uri, manifest)
    with pytest.raises(IntegrityError, match=r"small\.txt"):
        get(uri, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    # Publishing the same again mends it; the manifest stays.
    assert publish(directory, uri, "v-1", files, {"note": "again"}) == manifest
    assert storage.verify(uri, manifest) == 3


def test_a_file_that_is_not_what_was_hashed_is_not_published(uri: str, result: Result) -> None:
    directory, files = result
    files["sub/small.txt"] = FileEntry(size=5, sha256="0" * 64)
    with pytest.raises(IntegrityError, match=r"small\.txt is not what its manifest says"):
        publish(directory, uri, "v-1", files, {})
    assert storage.latest(uri) is None


def test_what_the_store_has_is_copied_or_referred_to(uri: str, result: Result, tmp_path: Path) -> None:
    directory, files = result
    base = uri + "base"
    for name in files:
        open_store(base).put(name, (directory / name).read_bytes())
    manifest = publish(directory, uri + "out", "v-1", files, {}, options=Options(base=base, unchanged="refer"))
    where = {item["name"]: item["uri"] for item in manifest["files"]}
    assert where["a.safetensors"] == f"{base}/a.safetensors" and where["sub/small.txt"].endswith(
        "out/v-1/sub/small.txt"
    )
    assert storage.verify(uri + "out", manifest) == 3
    assert get(uri + "out", tmp_path / "back")["fetched"] == 3
    # What lies elsewhere is read only where that is allowed.
    allowed: list[str] = []
    get(uri + "out", tmp_path / "again", allow=allowed.append)
    assert allowed == [f"{base}/a.safetensors"]
    copied = publish(directory, uri + "out", "v-2", files, {}, options=Options(unchanged="copy"))
    assert all(f"{uri}out/v-2/" in item["uri"] for item in copied["files"])


def test_aliases_and_retention(uri: str, result: Result, tmp_path: Path) -> None:
    directory, files = result
    other, other_files = changed(result, tmp_path)
    publish(directory, uri, "v-1", files, {}, options=Options(alias="production"))
    publish(other, uri, "v-2", other_files, {}, options=Options(unchanged="refer"))
    (other / "sub" / "small.txt").write_text("third")
    publish(other, uri, "v-3", entries(other), {})
    open_store(uri).put("v-2/somebody-elses", b"stays")
    with pytest.raises(InputError, match="no version v-9"):
        storage.set_alias(uri, "production", "v-9")
    with pytest.raises(InputError, match="no name"):
        storage.set_alias(uri, "../latest", "v-1")
    assert storage.prune_claimed(uri, 1) == ["v-2"]
    assert [(one["version"], one["names"]) for one in storage.overview(uri)] == [
        ("v-3", ["latest"]), ("v-1", ["production"]),
    ]  # fmt: skip
    assert list(open_store(uri).objects("v-2/")) == ["v-2/somebody-elses"]
    manifest = storage.latest(uri, "production")
    assert manifest and storage.verify(uri, manifest) == 3
    assert fetch.find(uri.rstrip("/") + "@production").version == "v-1"


def test_files_that_a_kept_version_refers_to_outlive_their_own(uri: str, result: Result, tmp_path: Path) -> None:
    directory, files = result
    other, other_files = changed(result, tmp_path)
    publish(directory, uri, "v-1", files, {})
    manifest = publish(other, uri, "v-2", other_files, {}, options=Options(unchanged="refer", keep=1))
    assert open_store(uri).head("v-1/manifest.json") is None
    assert storage.verify(uri, manifest) == 3
    (other / "a.safetensors").unlink()
    (other / "a.safetensors").write_bytes(b"small now")
    publish(other, uri, "v-3", entries(other), {}, options=Options(keep=1))
    assert not open_store(uri).objects("v-1/") and not open_store(uri).objects("v-2/")


def test_two_writers_of_one_destination(uri: str, result: Result) -> None:
    """Case U3: the second is refused; one that died is not in the way; of many at once at most one gets through."""
    directory, files = result
    taken = pytest.raises(DestinationError, match=r"written by another job: publishing v-0, process \d+")
    with Claim(open_store(uri), "publishing v-0"), taken:
        publish(directory, uri, "v-1", files, {})
    store = open_store(uri)
    far_away = {"machine": "", "pid": 1, "started": 0.0}
    store.put(".fastmtp/claims/dead.json", json.dumps({**who(), "pid": 2**22 + 1}).encode())
    publish(directory, uri, "v-1", files, {})
    assert not store.objects(".fastmtp/claims/")
    store.put(".fastmtp/claims/other.json", json.dumps(far_away).encode())
    with pytest.raises(DestinationError):
        publish(directory, uri, "v-1", files, {})
    store.delete([".fastmtp/claims/other.json"])
    inside, most, lock = 0, 0, threading.Lock()

    def take() -> None:
        nonlocal inside, most
        try:
            with Claim(open_store(uri), "x"):
                with lock:
                    inside += 1
                    most = max(most, inside)
                threading.Event().wait(0.3)
                with lock:
                    inside -= 1
        except DestinationError:
            pass

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most <= 1 and inside == 0


def who() -> dict[str, Any]:
    from fastmtp.stores import claim

    return claim._who()


def test_notes_clear_away_only_what_they_list(uri: str) -> None:
    store = open_store(uri)
    begun.note(store, "v-old", ["a"])
    store.put("v-old/a", b"half")
    store.put("v-old/other", b"not ours")
    begun.clear(store, set())
    assert list(store.objects()) == ["v-old/other"]


def test_what_is_published_but_does_not_read_is_named(uri: str) -> None:
    open_store(uri).put("latest.json", b"{half")
    with pytest.raises(DestinationError, match="does not read"):
        storage.latest(uri)
    with pytest.raises(CheckpointError, match="holds nothing"):
        fetch.find(uri + "nothing")


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil"])
def test_a_manifest_that_points_outside_is_refused(tmp_path: Path, name: str) -> None:
    """Case U3."""
    files = [{"name": name, "uri": "x", "size": 1, "sha256": "0"}]
    open_store(f"file://{tmp_path}/p").put("v/manifest.json", json.dumps({"version": "v", "files": files}).encode())
    with pytest.raises(IntegrityError, match="outside"):
        get(f"file://{tmp_path}/p/v", tmp_path / "back")
    assert not (tmp_path / "evil").exists()


def test_fetching_spares_what_is_there(uri: str, result: Result, tmp_path: Path) -> None:
    directory, files = result
    publish(directory, uri, "v-1", files, {})
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    with pytest.raises(InputError, match="something else"):
        get(uri, tmp_path / "taken")
    found = get(uri, tmp_path / "linked", reuse=[directory])
    assert found == {"fetched": 0, "bytes_fetched": 0, "found": 3}
    assert (tmp_path / "linked" / "a.safetensors").samefile(directory / "a.safetensors")
    # A run that was killed half-way left whole files and a torn one.
    partial = tmp_path / ".back.partial"
    partial.mkdir()
    os.link(directory / "a.safetensors", partial / "a.safetensors")
    (partial / ".model.safetensors.index.json.part").write_text("torn")
    assert get(uri, tmp_path / "back")["fetched"] == 2
    # Plain files, which no manifest vouches for, come whole and are not read twice either.
    (tmp_path / "again" / "x").parent.mkdir()
    assert get(uri + "v-1/sub", tmp_path / "plain")["fetched"] == 1
    assert get(uri + "v-1/sub", tmp_path / "plain") == {"fetched": 0, "bytes_fetched": 0, "found": 1}


def test_a_version_that_was_moved_is_read_where_it_is(uri: str, result: Result, tmp_path: Path) -> None:
    publish(result[0], uri + "then", "v-1", result[1], {})
    then, now = open_store(uri + "then"), open_store(uri + "now")
    for key, info in then.objects("v-1/").items():
        now.put(key, then.read(key, 0, info.size))
    then.delete(then.objects("v-1/"))
    assert get(uri + "now/v-1", tmp_path / "back")["fetched"] == 3


def test_probe(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.probe("s3://models/anywhere/")
    assert not list(s3.directory.rglob(".fastmtp-probe*"))
    with pytest.raises(DestinationError, match="no-such-bucket"):
        storage.probe("s3://no-such-bucket/x/")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DestinationError, match="cannot be written") as caught:
        storage.probe("s3://models/anywhere/")
    assert "wrong" not in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(DestinationError):
        storage.probe(f"file://{tmp_path}/file/")
    with pytest.raises(DestinationError, match="neither"):
        storage.probe("ftp://x/")


def test_what_a_job_chooses_goes_with_every_object(s3: S3Server, result: Result, tmp_path: Path) -> None:
    uri = f"s3://models/{tmp_path.name}"
    chosen = PublishConfig(uri=uri, kms_key="key-1", storage_class="STANDARD_IA", tags={"team": "a b"})
    publish(result[0], uri, "v-1", result[1], {}, options=options_of(chosen, None))
    client = storage.s3_client()
    for name in (*result[1], "manifest.json"):
        found = client.head_object(Bucket="models", Key=f"{tmp_path.name}/v-1/{name}")
        assert (found["StorageClass"], found["SSEKMSKeyId"]) == ("STANDARD_IA", "key-1"), name
    with pytest.raises(ValidationError, match="base must be in the store of uri"):
        PublishConfig(uri=uri, base="file:///models")


def test_sizes_are_judged_before_anything_is_read(tmp_path: Path) -> None:
    """Case U1: a sparse file of 30 GB is planned at once; too many parts, or too large an object, is refused."""
    with (tmp_path / "big").open("wb") as file:
        file.truncate(30 * 10**9)
    before = int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
    files = {"big": FileEntry(size=(tmp_path / "big").stat().st_size)}
    assert check_sizes(files, StoreSettings()) == {"big": 3577}
    assert int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0]) - before < MEBI
    assert check_sizes({"huge": FileEntry(size=MAX_OBJECT)}, StoreSettings())["huge"] <= 10_000
    with pytest.raises(DestinationError, match="objects of"):
        check_sizes({"huge": FileEntry(size=MAX_OBJECT + 1)}, StoreSettings())
    with pytest.raises(DestinationError, match="parts of"):
        check_sizes({"big": FileEntry(size=60 * 10**9)}, StoreSettings(part_size=5 * MEBI))


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTMTP_S3_BANDWIDTH", "200MB")
    monkeypatch.setenv("FASTMTP_S3_PART_SIZE", "64MiB")
    monkeypatch.setenv("FASTMTP_S3_KMS_KEY", "key-1")
    found = StoreSettings.from_env().chosen(kms_key=None, storage_class="STANDARD_IA", tags={"a": "b c"})
    assert (found.bandwidth, found.part_size) == (200_000_000, 64 * MEBI)
    assert found.write_arguments() == {
        "StorageClass": "STANDARD_IA", "Tagging": "a=b+c", "ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-1",
    }  # fmt: skip
    for name, value in (("PART_SIZE", "big"), ("WORKERS", "0"), ("ADDRESSING", "x")):
        with monkeypatch.context() as patch:
            patch.setenv(f"FASTMTP_S3_{name}", value)
            with pytest.raises(ConfigError, match=name):
                StoreSettings.from_env()
