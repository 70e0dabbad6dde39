"""Bringing a version here: what changes meanwhile is named, and a killed run goes on inside its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastmtp import fetch, storage
from fastmtp.errors import IntegrityError, UnreadableError
from fastmtp.files import open_files
from fastmtp.stores.base import Changed, Readable, open_store, whole
from fastmtp.stores.local import FileStore
from fastmtp.upload import publish
from tests.conftest import S3Server
from tests.fastmtp.s3proxy import Proxy, proxy
from tests.fastmtp.test_storage import MEBI, QUIET, entries, make_bucket, use

ENDPOINTS = pytest.mark.parametrize("endpoint", ["s3_server", "moto_server"])
SHARD = "a.safetensors"
PARTS = 5  # of the shard, in 16 MiB


@pytest.fixture
def prefix(endpoint: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    use(request.getfixturevalue(endpoint), monkeypatch)
    make_bucket()
    return f"s3://models/{tmp_path.name}"


@ENDPOINTS
def test_an_object_that_is_replaced_between_listing_and_reading(prefix: str) -> None:
    store = open_store(prefix)
    store.put("config.json", b"first")
    files, info = open_files(prefix), store.head("config.json")
    files.list()
    assert info and files.read("config.json", 1, 3) == store.read("config.json", 1, 3, stamp=info.stamp) == b"ir"
    store.put("config.json", b"other")
    with pytest.raises(UnreadableError, match=r"config\.json changed while it was read\. Try again"):
        files.read("config.json", 1, 3)
    with pytest.raises(Changed, match=r"config\.json changed while it was read\. Try again"):
        store.read("config.json", 1, 3, stamp=info.stamp)
    assert files.list() and files.read("config.json", 1, 3) == b"th"


def test_a_pointer_that_moves_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, moves = open_store(f"file://{tmp_path}"), [2]
    read = FileStore.read
    store.put("latest.json", b"0")

    def moved(self: FileStore, key: str, begin: int, end: int, *, stamp: str | None = None) -> bytes:
        if moves[0]:
            moves[0] -= 1
            self.put(key, b"moved %d" % moves[0])
        return read(self, key, begin, end, stamp=stamp)

    monkeypatch.setattr(FileStore, "read", moved)
    assert whole(store, "latest.json") == b"moved 0"
    moves[0] = 1000
    with pytest.raises(Changed, match="again and again"):
        whole(store, "latest.json")


@pytest.fixture
def store(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy(s3_server.url) as found:
        use(S3Server(found.url, {**s3_server.env, "AWS_ENDPOINT_URL_S3": found.url}, s3_server.directory), monkeypatch)
        monkeypatch.setenv("FASTMTP_S3_WORKERS", "1")
        make_bucket()
        yield found


@pytest.fixture
def version(store: Proxy, tmp_path: Path) -> str:
    """A version with one shard of several parts."""
    directory, uri = tmp_path / "result", f"s3://models/{tmp_path.name}"
    directory.mkdir()
    (directory / SHARD).write_bytes(os.urandom((PARTS - 1) * 16 * MEBI + 5))
    (directory / "config.json").write_text("{}")
    publish(directory, uri, "v-1", entries(directory), {})
    return f"{uri}/v-1"


KILLED = """
import os, signal, sys
from pathlib import Path
from fastmtp import fetch
from fastmtp.progress import Reporter
from fastmtp.stores.s3 import S3Store
read, left = S3Store.read, [3]
def dying(self, key, begin, end, **options):
    if key.endswith("a.safetensors"):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return read(self, key, begin, end, **options)
S3Store.read = dying
fetch.fetch(fetch.find(sys.argv[1]), Path(sys.argv[2]), Reporter("publish", quiet=True))
"""


def killed(version: str, target: Path) -> Path:
    """Fetch until three parts of the shard are there, then kill -9. Returns where they lie."""
    done = subprocess.run([sys.executable, "-c", KILLED, version, str(target)], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL and not target.exists()
    return target.with_name(f".{target.name}.partial") / f".{SHARD}.part"


def parts_read(store: Proxy) -> int:
    return sum(request.method == "GET" and request.key.endswith(SHARD) for request in store.requests)


def test_a_killed_run_goes_on_inside_a_file(version: str, store: Proxy, tmp_path: Path) -> None:
    killed(version, tmp_path / "back")
    store.requests.clear()
    assert fetch.fetch(fetch.find(version), tmp_path / "back", QUIET)["bytes_fetched"] > 0
    assert parts_read(store) == PARTS - 3
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert names == {SHARD, "config.json", ".fastmtp-source.json"}
    assert (tmp_path / "back" / SHARD).read_bytes() == (tmp_path / "result" / SHARD).read_bytes()


def test_parts_that_never_reached_the_disk_are_read_again(version: str, store: Proxy, tmp_path: Path) -> None:
    """As after a machine went down: what is noted is there in name only."""
    with killed(version, tmp_path / "back").open("r+b") as file:
        file.write(bytes(MEBI))
    store.requests.clear()
    fetch.fetch(fetch.find(version), tmp_path / "back", QUIET)
    assert parts_read(store) == PARTS - 3 + PARTS
    assert (tmp_path / "back" / SHARD).read_bytes() == (tmp_path / "result" / SHARD).read_bytes()


def test_another_object_is_read_from_its_beginning(version: str, store: Proxy, tmp_path: Path) -> None:
    killed(version, tmp_path / "back")
    uri = version.removesuffix("/v-1")
    (tmp_path / "result" / SHARD).write_bytes(os.urandom((PARTS - 1) * 16 * MEBI + 5))
    publish(tmp_path / "result", uri, "v-2", entries(tmp_path / "result"), {})
    store.requests.clear()
    fetch.fetch(fetch.find(uri), tmp_path / "back", QUIET)
    assert parts_read(store) == PARTS
    assert (tmp_path / "back" / SHARD).read_bytes() == (tmp_path / "result" / SHARD).read_bytes()


def test_what_nothing_vouches_for_is_read_whole(version: str, store: Proxy, tmp_path: Path) -> None:
    """Plain files below a prefix have no digest that would show a hole."""
    storage.open_store(version).delete(["manifest.json"])
    storage.open_store(version.removesuffix("/v-1")).delete(["latest.json"])
    killed(version, tmp_path / "back")
    store.requests.clear()
    fetch.fetch(fetch.find(version), tmp_path / "back", QUIET)
    assert parts_read(store) == PARTS


def test_a_file_that_is_wrong_in_the_store_is_no_endless_loop(
    version: str, store: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(version, tmp_path / "back")
    from fastmtp.stores.s3 import S3Store

    monkeypatch.setattr(S3Store, "read", _zeros(S3Store.read))
    with pytest.raises(IntegrityError, match="is not what its manifest says"):
        fetch.fetch(fetch.find(version), tmp_path / "back", QUIET)
    assert not (tmp_path / "back").exists()


def _zeros(read: object) -> object:
    def found(self: Readable, key: str, begin: int, end: int, *, stamp: str | None = None) -> bytes:
        if key.endswith(SHARD):
            return bytes(end - begin)
        data: bytes = read(self, key, begin, end, stamp=stamp)  # type: ignore[operator]
        return data

    return found
