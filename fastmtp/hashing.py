"""sha256 of large files, once: what was read before is remembered by device, inode, size and modification time.

A hard link is the same inode, so the shards of a stitched checkpoint are known where the model's are. Remembered in
`cache_directory()`, a small file each; whatever is wrong with that, the file is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from fastmtp.stage import write_atomic

# What the cache of a core holds: a block that is hashed right after it was read is still there.
_BLOCK = 512 << 10
_STEP = 8 << 20  # bytes after which progress is told
_THREADS = 4
# A file written a moment ago may be written once more within one tick of its clock.
_SETTLED = 1.0


class Digest(Protocol):
    """What takes bytes bit by bit, as those of hashlib do."""

    def update(self, data: memoryview, /) -> None: ...


def cache_directory() -> Path:
    """FASTMTP_CACHE_DIR, or ~/.cache/fastmtp."""
    return Path(os.environ.get("FASTMTP_CACHE_DIR") or "~/.cache/fastmtp").expanduser()


def remembered(path: Path) -> str | None:
    """sha256 of a file that was hashed before and is still that one. Reads nothing of it."""
    found = path.stat()
    with contextlib.suppress(OSError, ValueError, KeyError):
        entry = json.loads(_place(found).read_bytes())
        if (entry["size"], entry["mtime_ns"]) == (found.st_size, found.st_mtime_ns):
            return str(entry["sha256"])
    return None


def remember(path: Path, sha256: str) -> None:
    """Note what was just found out about a file that nobody writes to any more."""
    found = path.stat()
    entry = {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": sha256}
    # A full or read-only disk costs time later, nothing else.
    with contextlib.suppress(OSError):
        place = _place(found)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, json.dumps(entry).encode())


def sha256_cached(path: Path, on_bytes: Callable[[int], None] = lambda _count: None) -> str:
    """sha256 of a file: remembered, or read now and remembered."""
    known = remembered(path)
    if known:
        on_bytes(path.stat().st_size)
        return known
    before = path.stat()
    digest = hashlib.sha256()
    step = bytearray(_STEP)
    with path.open("rb", buffering=0) as file:
        while count := fill(file, step, digest):
            on_bytes(count)
    after = path.stat()
    unchanged = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if unchanged and time.time() - after.st_mtime > _SETTLED:
        remember(path, digest.hexdigest())
    return digest.hexdigest()


def fill(file: io.FileIO, data: bytearray, *digests: Digest) -> int:
    """Fill `data` from a file, and bring each block into `digests` as it comes. Returns how many bytes there were."""
    view, done = memoryview(data), 0
    while done < len(data) and (count := file.readinto(view[done : done + _BLOCK])):
        for digest in digests:
            digest.update(view[done : done + count])
        done += count
    return done


def sha256_all(paths: Iterable[Path], on_bytes: Callable[[int], None] = lambda _count: None) -> dict[Path, str]:
    """sha256 of many files, several at once. `on_bytes` is called from several threads."""
    wanted = list(paths)
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    try:
        return dict(zip(wanted, pool.map(lambda path: sha256_cached(path, on_bytes), wanted), strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def _place(found: os.stat_result) -> Path:
    return cache_directory() / "sha256" / f"{found.st_dev:x}-{found.st_ino:x}.json"
