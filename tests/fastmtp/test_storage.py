"""Publishing to a directory and to a real S3 endpoint: whole, verified, manifest last; refused where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastmtp import storage
from fastmtp.errors import DestinationError, IntegrityError
from fastmtp.stage import FileEntry, sha256_file
from tests.conftest import S3Server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture(params=["file", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/published/"
    request.getfixturevalue("s3")
    return f"s3://models/{tmp_path.name}/"


@pytest.fixture
def result(tmp_path: Path) -> tuple[Path, dict[str, FileEntry]]:
    directory = tmp_path / "result"
    (directory / "sub").mkdir(parents=True)
    (directory / "sub" / "small.txt").write_text("small")
    (directory / "big.bin").write_bytes(bytes(range(256)) * 40_000)
    names = ["big.bin", "sub/small.txt"]
    entries = {n: FileEntry(size=(directory / n).stat().st_size, sha256=sha256_file(directory / n)) for n in names}
    return directory, entries


def test_round_trip(uri: str, result: tuple[Path, dict[str, FileEntry]], tmp_path: Path) -> None:
    directory, files = result
    sent: list[int] = []
    assert storage.latest(uri) is None
    manifest = storage.publish(directory, uri, "v-1", files, {"note": "first"}, sent.append)
    assert sum(sent) == sum(entry.size for entry in files.values())
    assert storage.latest(uri) == manifest and manifest["note"] == "first"
    assert storage.verify(uri, manifest) == 2
    storage.fetch(uri, manifest, tmp_path / "back")
    assert (tmp_path / "back" / "big.bin").read_bytes() == (directory / "big.bin").read_bytes()
    assert storage.read_bytes(uri + "v-1/sub/small.txt") == b"small"
    storage.publish(directory, uri, "v-2", files, {}, sent.append)
    found = storage.latest(uri)
    assert found is not None and found["version"] == "v-2"


def test_no_manifest_before_everything_is_there(
    uri: str, result: tuple[Path, dict[str, FileEntry]], tmp_path: Path
) -> None:
    """Case U3: who looks meanwhile must not see a half-uploaded version; the run after it completes it."""
    directory, files = result
    (directory / "sub" / "small.txt").unlink()
    with pytest.raises(DestinationError):
        storage.publish(directory, uri, "v-1", files, {})
    assert storage.latest(uri) is None
    assert storage.open_store(uri).size("v-1/manifest.json") is None
    (directory / "sub" / "small.txt").write_text("small")
    assert storage.verify(uri, storage.publish(directory, uri, "v-1", files, {})) == 2


def test_bytes_that_changed_are_found(uri: str, result: tuple[Path, dict[str, FileEntry]], tmp_path: Path) -> None:
    directory, files = result
    manifest = storage.publish(directory, uri, "v-1", files, {})
    storage.open_store(uri).put_bytes("v-1/sub/small.txt", b"smalL")
    with pytest.raises(IntegrityError, match=r"small\.txt"):
        storage.verify(uri, manifest)
    with pytest.raises(IntegrityError, match=r"small\.txt"):
        storage.fetch(uri, manifest, tmp_path / "back")


def test_a_wrong_digest_stops_publishing(uri: str, result: tuple[Path, dict[str, FileEntry]]) -> None:
    """What is read back is compared with what was meant, whatever the store does to it (case U2)."""
    directory, files = result
    files["sub/small.txt"] = FileEntry(size=5, sha256="0" * 64)
    with pytest.raises(IntegrityError, match="remote bytes differ"):
        storage.publish(directory, uri, "v-1", files, {})
    assert storage.latest(uri) is None


def test_what_is_published_but_does_not_read_is_named(uri: str) -> None:
    storage.open_store(uri).put_bytes("latest.json", b"{half")
    with pytest.raises(DestinationError, match="does not read"):
        storage.latest(uri)


def test_a_manifest_that_points_outside_is_refused(tmp_path: Path) -> None:
    manifest = {"version": "v", "files": [{"name": "../evil", "uri": "x", "size": 1, "sha256": "0"}]}
    with pytest.raises(IntegrityError, match="outside"):
        storage.fetch(f"file://{tmp_path}", manifest, tmp_path / "back")
    assert not (tmp_path / "evil").exists()


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


def test_manifest_lists_uris(uri: str, result: tuple[Path, dict[str, FileEntry]]) -> None:
    directory, files = result
    manifest = storage.publish(directory, uri, "v-1", files, {})
    stored = json.loads(storage.read_bytes(uri + "v-1/manifest.json"))
    assert stored == manifest
    assert [item["uri"] for item in stored["files"]] == [f"{uri}v-1/{name}" for name in files]
