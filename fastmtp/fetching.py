"""The work of `fastmtp.fetch`: files linked or read into a directory beside the target, verified, then swapped in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from fastmtp.errors import InputError, IntegrityError
from fastmtp.hashing import remember, sha256_cached
from fastmtp.progress import Reporter
from fastmtp.ranges import PART, Ranges
from fastmtp.stage import fsync_path, sha256_file, write_atomic
from fastmtp.stores.base import ObjectInfo, Readable, locate, open_readable
from fastmtp.stores.settings import FILES_AT_ONCE
from fastmtp.table import size

# Hidden, so that no loader takes it for a part of the model.
RECORD = ".fastmtp-source.json"


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


def read_record(directory: Path) -> dict[str, Any] | None:
    """Where a directory was fetched from: uri, version, and of each file name, uri, size, sha256 and stamp."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / RECORD).read_bytes())
        if isinstance(found, dict) and isinstance(found.get("files"), list):
            return found
    return None


def _on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.is_file() else 0


class Fetching:
    """One fetch of `source` into `directory`, whose files, and those of `reuse`, may be what is wanted."""

    def __init__(
        self,
        source: Source,
        directory: Path,
        reporter: Reporter,
        reuse: Sequence[Path],
    ) -> None:
        self.source, self.directory, self.reporter, self.reuse = source, directory, reporter, reuse
        self.store = open_readable(source.uri)
        self.partial = directory.with_name(f".{directory.name}.partial")
        self.lock = threading.Lock()
        self.done = 0
        self.counts = {"fetched": 0, "bytes_fetched": 0, "found": 0}

    def run(self) -> dict[str, Any]:
        self.partial.mkdir(exist_ok=True)
        self._require_room()
        what = self.source.version or self.source.uri
        self.reporter.phase(f"fetching {what}", self.source.nbytes, "bytes")
        pool = ThreadPoolExecutor(FILES_AT_ONCE)
        try:
            files = [future.result() for future in [pool.submit(self._file, one) for one in self.source.entries]]
        finally:
            pool.shutdown(cancel_futures=True)
        record = {"uri": self.source.uri, "version": self.source.version, "files": files}
        write_atomic(self.partial / RECORD, json.dumps(record, indent=1).encode())
        self._swap_in()
        return self.counts

    def _require_room(self) -> None:
        # What is there of a file that is not whole takes less than its size says.
        free, there = shutil.disk_usage(self.partial).free, sum(_on_disk(one) for one in self.partial.rglob("*"))
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
            return self._link_if(self.directory / entry["name"], target, info.size, self._recorded(entry, info))
        if target.is_file() and target.stat().st_size == entry["size"] and sha256_cached(target) == sha256:
            return True
        return any(self._link_if(directory / entry["name"], target, info.size, sha256) for directory in self.reuse)

    def _recorded(self, entry: dict[str, Any], info: ObjectInfo) -> str | None:
        for known in (read_record(self.directory) or {"files": []})["files"]:
            if (known["uri"], known["stamp"], known["size"]) == (entry["uri"], info.stamp, info.size):
                return str(known["sha256"])
        return None

    def _link_if(self, path: Path, target: Path, size: int, sha256: str | None) -> bool:
        if sha256 is None or not path.is_file() or path.stat().st_size != size or sha256_cached(path) != sha256:
            return False
        target.unlink(missing_ok=True)
        try:
            os.link(path.resolve(), target)
        except OSError:
            return False
        return True

    def _download(self, store: Readable, key: str, info: ObjectInfo, target: Path, sha256: str | None) -> None:
        temporary = target.with_name(f".{target.name}.part")
        there = Ranges(temporary, info)
        if sha256 is None:
            # Nothing would show that what a killed run noted never reached the disk.
            there.forget()
        resumed = bool(there.done)
        with temporary.open("r+b" if resumed else "wb") as file, there.noting():
            file.truncate(info.size)
            self._read_parts(store, key, info, file.fileno(), there)
            os.fsync(file.fileno())
        found = sha256_file(temporary)
        if sha256 is not None and found != sha256:
            there.forget()
            temporary.unlink()
            if resumed:
                self._advance(-info.size)
                return self._download(store, key, info, target, sha256)
            raise IntegrityError(f"{store.uri(key)} is not what its manifest says.")
        temporary.replace(target)
        there.forget()
        remember(target, found)
        with self.lock:
            self.counts["fetched"] += 1
            self.counts["bytes_fetched"] += info.size
        return None

    def _read_parts(self, store: Readable, key: str, info: ObjectInfo, descriptor: int, there: Ranges) -> None:
        """Every part of an object that is not there yet, several at once, each to its place in the file."""

        def part(number: int) -> None:
            begin, end = number * PART, min((number + 1) * PART, info.size)
            if number not in there.done:
                data = store.read(key, begin, end, stamp=info.stamp)
                if os.pwrite(descriptor, data, begin) != end - begin:
                    raise IntegrityError(f"{store.uri(key)} gave {len(data)} of {end - begin} bytes at {begin}.")
                there.note(number)
            self._advance(end - begin)

        pool = ThreadPoolExecutor(store.settings.workers)
        try:
            for done in [pool.submit(part, number) for number in range(-(-info.size // PART))]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _advance(self, count: int) -> None:
        with self.lock:
            self.done += count
            self.reporter.advance(self.done)

    def _swap_in(self) -> None:
        """In place of an earlier version, which is moved aside first."""
        fsync_path(self.partial)
        aside = self.directory.with_name(f".{self.directory.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        if self.directory.exists():
            self.directory.rename(aside)
        self.partial.rename(self.directory)
        fsync_path(self.directory.parent)
        shutil.rmtree(aside, ignore_errors=True)
