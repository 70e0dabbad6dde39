"""Files of a new directory that are files of an old one: as a reflink, a hard link or a copy; or with ranges replaced.

Nothing here opens a source for writing, and nothing writes to a file that exists: a target is new, or it is an error.
What is written is hashed on the way and compared with its source; what is linked is the source's own file, which the
kernel says.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastmtp.errors import InputError, IntegrityError
from fastmtp.files import BLOCK
from fastmtp.hashing import remember
from fastmtp.stage import FileEntry, fsync_path

Mode = Literal["auto", "reflink", "hardlink", "copy"]
Link = Literal["reflink", "hardlink"]
_FICLONE = 0x40049409  # linux/fs.h
# What a file system, a mount or a kernel setting answers when it does not link these two places.
_NO_LINK = {
    errno.EXDEV, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EMLINK,
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Bytes `begin` to `end` of `path`, or `data` where there is none.

    `cast` turns a block of them into what is written; every block but the last has `BLOCK` bytes.
    """

    path: Path | None
    begin: int
    end: int
    data: bytes = b""
    cast: Callable[[bytes], bytes] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes read for it."""
        return len(self.data) if self.path is None else self.end - self.begin


def links_possible(source: Path, directory: Path, mode: Mode) -> Link | None:
    """How files beside `source` can be linked into `directory` under `mode`; None when they must be copied.

    Raises:
        InputError: `mode` demands a link that this place does not give.
    """
    wanted: tuple[Link, ...] = ("reflink", "hardlink") if mode == "auto" else () if mode == "copy" else (mode,)
    trial = directory / ".link-trial"
    for how in wanted:
        try:
            _link(source, trial, how)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            continue
        finally:
            trial.unlink(missing_ok=True)
        return how
    if mode in ("auto", "copy"):
        return None
    raise InputError(
        f"{mode} is not possible from {source.parent} to {directory.parent}.",
        mend="Put both on one file system that supports it, or use --mode copy.",
    )


def link(source: Path, target: Path, how: Link) -> FileEntry:
    """Make `target` the file `source` (no symbolic link), and say so.

    Raises:
        IntegrityError: the source changed meanwhile.
        OSError: the two places cannot be linked.
    """
    before = source.stat()
    _link(source, target, how)
    if how == "reflink":
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        fsync_path(target)
    made, after = target.stat(), source.stat()
    same = os.path.samestat(made, after) if how == "hardlink" else made.st_size == after.st_size
    if not same or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise IntegrityError(f"{source} changed while it was linked.")
    return FileEntry(size=made.st_size, link=how, mtime_ns=made.st_mtime_ns)


def assemble(pieces: Sequence[Piece], target: Path, on_bytes: Callable[[int], None]) -> FileEntry:
    """Write `pieces` one after the other into the new file `target`, in flat memory, and prove it.

    What is written is hashed on the way; then the file is read back and compared with the pieces, byte by byte, while
    the disk makes it durable.

    Raises:
        IntegrityError: the file does not hold what the pieces give, or a source ended early.
    """
    digest = hashlib.sha256()
    with target.open("xb") as file, ThreadPoolExecutor(1) as beside:
        hashed: Future[None] | None = None
        for block in blocks_of(pieces):
            file.write(block)
            if hashed:
                hashed.result()
            hashed = beside.submit(digest.update, block)
            on_bytes(len(block))
        file.flush()
        durable = beside.submit(os.fsync, file.fileno())
        size = _compare(target, pieces, on_bytes)
        durable.result()
    if size >= BLOCK:
        # Publishing then need not read it again.
        remember(target, digest.hexdigest())
    return FileEntry(size=size, sha256=digest.hexdigest())


def blocks_of(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """What `pieces` write, block by block."""
    for piece in pieces:
        yield from _blocks(piece)


def whole(source: Path) -> list[Piece]:
    """All of a file."""
    return [Piece(source, 0, source.stat().st_size)]


def _link(source: Path, target: Path, how: Link) -> None:
    if how == "hardlink":
        os.link(source, target)
        return
    with source.open("rb") as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            target.unlink()
            raise


def _blocks(piece: Piece) -> Iterator[bytes]:
    """What a piece writes. Raises IntegrityError where its file ends early."""
    if piece.path is None:
        yield piece.data
        return
    with piece.path.open("rb") as file:
        file.seek(piece.begin)
        left = piece.end - piece.begin
        while left:
            block = file.read(min(left, BLOCK))
            if len(block) < min(left, BLOCK):
                raise IntegrityError(f"{piece.path} ends {left} bytes early.")
            left -= len(block)
            yield piece.cast(block) if piece.cast else block


def _compare(path: Path, pieces: Sequence[Piece], on_bytes: Callable[[int], None]) -> int:
    """Read a file beside the pieces it was made of. Returns its size; raises IntegrityError where they differ."""
    with path.open("rb") as file, ThreadPoolExecutor(1) as beside:
        blocks = blocks_of(pieces)
        block = next(blocks, b"")
        while block:
            # The source's next block is read while this one's copy is.
            following = beside.submit(next, blocks, b"")
            if file.read(len(block)) != block:
                raise IntegrityError(f"{path} does not hold what was written to it, before byte {file.tell()}.")
            on_bytes(len(block))
            block = following.result()
        size = file.tell()
        if file.read(1):
            raise IntegrityError(f"{path} is longer than what was written to it.")
    return size
