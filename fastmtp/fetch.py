"""Bring a published version, or any checkpoint in a store, into a directory: whole and verified, or not at all.

What is there already is not read again: files of an earlier version in the same directory, of other directories that
the caller names, and of a run that was killed. The directory serves as it is: `vllm serve DIR`. Loads no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fastmtp.errors import CheckpointError, InputError, IntegrityError
from fastmtp.files import is_hub
from fastmtp.hashing import cache_directory, remember, sha256_cached
from fastmtp.progress import Reporter
from fastmtp.stage import digest_of, fsync_directory, sha256_file, write_atomic
from fastmtp.storage import latest, manifest_of
from fastmtp.stores.base import ERRORS, ObjectInfo, Store, explained, locate, open_store, reason
from fastmtp.table import size

# Hidden, so that no loader takes it for a part of the model.
RECORD = ".fastmtp-source.json"
_PART = 16 << 20
_FILES_AT_ONCE = 2

Allow = Callable[[str], None]


class Source(NamedTuple):
    """What there is to fetch: a version, or the files below a prefix (`version` is then None).

    Entries have name, uri, size, and sha256 where it is known.
    """

    uri: str
    version: str | None
    entries: list[dict[str, Any]]

    @property
    def nbytes(self) -> int:
        return sum(entry["size"] for entry in self.entries)


def find(uri: str, pointer: str = "/model") -> Source:
    """What a URI means: a version, a destination (its latest), DESTINATION@ALIAS, or a prefix of plain files.

    Raises:
        CheckpointError: nothing is there, or it does not read.
    """
    try:
        place, _, alias = uri.rpartition("@") if "@" in uri.rpartition("/")[2] else (uri, "", "")
        place = place.rstrip("/")
        store = open_store(place)
        manifest = None if alias else manifest_of(store, "")
        manifest = manifest or latest(place, alias or None)
        if manifest:
            return Source(place, str(manifest["version"]), _checked(uri, manifest["files"]))
        found = {} if alias else store.objects()
    except (*ERRORS, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise CheckpointError(f"{uri} cannot be read: {reason(error)}.", pointer=pointer) from error
    entries = [
        {"name": name, "uri": store.uri(name), "size": info.size, "stamp": info.stamp}
        for name, info in found.items()
        if not any(part.startswith(".") for part in name.split("/"))
    ]
    if not entries:
        raise CheckpointError(
            f"{uri} holds nothing.", mend="Name a version, or a checkpoint's prefix.", pointer=pointer
        )
    return Source(place, None, _checked(uri, entries))


def fetch(
    source: Source, directory: Path, reporter: Reporter, *, reuse: Sequence[Path] = (), allow: Allow | None = None
) -> dict[str, Any]:
    """Make `directory` what `source` is. Waits where another process does the same.

    Args:
        reuse: directories whose files of the same name and bytes are linked rather than fetched.
        allow: called with the URI of each file that lies elsewhere than the version; raises where it must not be read.

    Returns:
        How many files, and bytes, were fetched and found here.

    Raises:
        InputError: the directory holds something else, or there is no room.
        IntegrityError: a file is not what its manifest says.
    """
    for entry in source.entries:
        if allow and not entry["uri"].startswith(f"{source.uri}/"):
            allow(entry["uri"])
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        if directory.exists() and any(directory.iterdir()) and read_record(directory) is None:
            raise InputError(f"{directory} holds something else.", mend="Name a new directory.")
        if _is_there(directory, source):
            reporter.skipped()
            return {"fetched": 0, "bytes_fetched": 0, "found": len(source.entries)}
        return _Fetching(source, directory, reporter, [directory, *reuse]).run()


def fetch_any(uri: str, directory: Path, reporter: Reporter, reuse: Sequence[Path]) -> dict[str, Any]:
    """`fetch` by URI; a hub id is downloaded by huggingface_hub, and its files copied."""
    if is_hub(uri):
        from fastmtp.hub import hub_snapshot

        snapshot = hub_snapshot(uri)
        uri = f"file://{snapshot.resolve()}"
    with explained(uri, ""):
        return fetch(find(uri, ""), directory, reporter, reuse=reuse)


def manifest_for(source: Source) -> dict[str, Any]:
    """The manifest of a version, as far as checking needs it. Raises InputError for what is none."""
    if source.version is None:
        raise InputError(f"{source.uri} is no published version.", mend="Name two checkpoints to compare them.")
    return {"version": source.version, "files": source.entries}


def cached_model(uri: str, reporter: Reporter, allow: Allow | None = None) -> Path:
    """A directory of this machine's cache with the model at `uri`, fetched where it is not there yet."""
    source = find(uri)
    identity = source.version or digest_of([[entry["name"], entry["stamp"]] for entry in source.entries])
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", source.uri.partition("://")[2]).strip("-.")[-80:]
    target = cache_directory() / "models" / f"{slug}-{digest_of([source.uri, identity])[:12]}"
    with explained(uri, "/model"):
        fetch(source, target, reporter, allow=allow)
    return target


def read_record(directory: Path) -> dict[str, Any] | None:
    """Where a directory was fetched from: uri, version, and of each file name, uri, size, sha256 and stamp."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / RECORD).read_bytes())
        if isinstance(found, dict) and isinstance(found.get("files"), list):
            return found
    return None


def _checked(uri: str, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for entry in entries:
        path = PurePosixPath(str(entry["name"]))
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise IntegrityError(f"{uri}: its manifest names {entry['name']}, outside the version.")
    return entries


def _is_there(directory: Path, source: Source) -> bool:
    """Whether the directory was fetched from the same thing, and its files have not been touched since."""
    record = read_record(directory)
    if record is None or (record["uri"], record["version"]) != (source.uri, source.version):
        return False
    have = {entry["name"]: entry for entry in record["files"]}
    if have.keys() != {entry["name"] for entry in source.entries}:
        return False
    key = "sha256" if source.version else "stamp"
    return all(
        have[entry["name"]][key] == entry[key] and _untouched(directory / entry["name"], have[entry["name"]])
        for entry in source.entries
    )


def _untouched(path: Path, entry: dict[str, Any]) -> bool:
    if not path.is_file():
        return False
    found = path.stat()
    return (found.st_size, found.st_mtime_ns) == (entry["size"], entry["mtime_ns"])


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time. The lock's file stays: removing it would let two in."""
    descriptor = os.open(directory.with_name(f".{directory.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Fetching:
    def __init__(self, source: Source, directory: Path, reporter: Reporter, reuse: Sequence[Path]) -> None:
        self.source, self.directory, self.reporter, self.reuse = source, directory, reporter, reuse
        self.store = open_store(source.uri)
        self.partial = directory.with_name(f".{directory.name}.partial")
        self.lock = threading.Lock()
        self.done = 0
        self.counts = {"fetched": 0, "bytes_fetched": 0, "found": 0}

    def run(self) -> dict[str, Any]:
        self.partial.mkdir(exist_ok=True)
        self._require_room()
        what = self.source.version or self.source.uri
        self.reporter.phase(f"fetching {what}", self.source.nbytes, "bytes")
        pool = ThreadPoolExecutor(_FILES_AT_ONCE)
        try:
            files = [future.result() for future in [pool.submit(self._file, one) for one in self.source.entries]]
        finally:
            pool.shutdown(cancel_futures=True)
        record = {"uri": self.source.uri, "version": self.source.version, "files": files}
        write_atomic(self.partial / RECORD, json.dumps(record, indent=1).encode())
        self._swap_in()
        return self.counts

    def _require_room(self) -> None:
        free, there = shutil.disk_usage(self.partial).free, sum(one.stat().st_size for one in self.partial.iterdir())
        if self.source.nbytes > free + there:
            raise InputError(
                f"{self.directory.parent} has {size(free)} free, {self.source.uri} has {size(self.source.nbytes)}.",
                mend="Free space, or name another disk (FASTMTP_CACHE_DIR for models of jobs).",
            )

    def _file(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Get one file into the partial directory. Returns its entry in the record."""
        target = self.partial / entry["name"]
        target.parent.mkdir(parents=True, exist_ok=True)
        store, key = locate(self.store, entry["uri"])
        info = store.head(key)
        if info is None or info.size != entry["size"]:
            raise IntegrityError(f"{entry['uri']} is gone or has another size than its manifest says.")
        sha256 = entry.get("sha256")
        if self._found_here(target, entry, sha256, info):
            with self.lock:
                self.counts["found"] += 1
            self._advance(info.size)
        else:
            target.unlink(missing_ok=True)
            self._download(store, key, info, target, sha256)
        found = target.stat()
        return {
            "name": entry["name"], "uri": entry["uri"], "size": info.size, "sha256": sha256_cached(target),
            "stamp": info.stamp, "mtime_ns": found.st_mtime_ns,
        }  # fmt: skip

    def _found_here(self, target: Path, entry: dict[str, Any], sha256: str | None, info: ObjectInfo) -> bool:
        """Whether the file is in the partial directory, or could be linked into it."""
        if sha256 is None:
            # Without a digest, only the record of an earlier fetch can tell, by the object's stamp.
            return self._link_if(self.directory / entry["name"], target, self._recorded(entry, info))
        if target.is_file() and target.stat().st_size == entry["size"] and sha256_cached(target) == sha256:
            return True
        return any(self._link_if(directory / entry["name"], target, sha256) for directory in self.reuse)

    def _recorded(self, entry: dict[str, Any], info: ObjectInfo) -> str | None:
        for known in (read_record(self.directory) or {"files": []})["files"]:
            if (known["uri"], known["stamp"], known["size"]) == (entry["uri"], info.stamp, info.size):
                return str(known["sha256"])
        return None

    def _link_if(self, path: Path, target: Path, sha256: str | None) -> bool:
        if sha256 is None or not path.is_file() or sha256_cached(path) != sha256:
            return False
        target.unlink(missing_ok=True)
        try:
            os.link(path.resolve(), target)
        except OSError:
            return False
        return True

    def _download(self, store: Store, key: str, info: ObjectInfo, target: Path, sha256: str | None) -> None:
        temporary = target.with_name(f".{target.name}.part")
        with temporary.open("wb") as file:
            file.truncate(info.size)

            def part(begin: int) -> None:
                end = min(begin + _PART, info.size)
                data = store.read(key, begin, end, stamp=info.stamp)
                if os.pwrite(file.fileno(), data, begin) != end - begin:
                    raise IntegrityError(f"{store.uri(key)} gave {len(data)} of {end - begin} bytes at {begin}.")
                self._advance(len(data))

            pool = ThreadPoolExecutor(store.settings.workers)
            try:
                for done in [pool.submit(part, begin) for begin in range(0, info.size, _PART)]:
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)
            os.fsync(file.fileno())
        found = sha256_file(temporary)
        if sha256 is not None and found != sha256:
            temporary.unlink()
            raise IntegrityError(f"{store.uri(key)} is not what its manifest says.")
        temporary.replace(target)
        remember(target, found)
        with self.lock:
            self.counts["fetched"] += 1
            self.counts["bytes_fetched"] += info.size

    def _advance(self, count: int) -> None:
        with self.lock:
            self.done += count
            self.reporter.advance(self.done)

    def _swap_in(self) -> None:
        """In place of an earlier version, which is moved aside first."""
        fsync_directory(self.partial)
        aside = self.directory.with_name(f".{self.directory.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        if self.directory.exists():
            self.directory.rename(aside)
        self.partial.rename(self.directory)
        fsync_directory(self.directory.parent)
        shutil.rmtree(aside, ignore_errors=True)
