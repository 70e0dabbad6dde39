"""Put a head back into its checkpoint: a new directory in which only the head's bytes differ.

Shards without the head are links to the source's (or copies, where links are not possible); shards with it are streamed
once, the head's bytes replaced on the way; side files are copied. Names, types, shards, index and every other byte stay
as they were: linked files are the source's own, streamed ones are compared with it (`fastmtp.copying`). The source is
only ever opened for reading, and a kill at any moment leaves nothing under the final name.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastmtp.checkpoint import INDEX, Checkpoint, open_checkpoint
from fastmtp.copying import Link, Mode, Piece, assemble, blocks_of, link, links_possible, whole
from fastmtp.errors import InputError, IntegrityError
from fastmtp.extract import fingerprint
from fastmtp.families.base import text_config
from fastmtp.headfile import open_head, pieces_of
from fastmtp.native import HeadInfo, find_head
from fastmtp.progress import Reporter
from fastmtp.stage import MANIFEST, FileEntry, Manifest, fsync_path, run_stage
from fastmtp.table import size

# Weights in other formats hold the head as it was, and may run code when they are loaded.
_LEFT_OUT = re.compile(r"\.(bin|pt|pth|pkl|ckpt)$")


def stitch(
    model: Path,
    head: Path,
    target: Path,
    reporter: Reporter,
    *,
    mode: Mode = "auto",
    mend: bool = False,
    replace: bool = False,
) -> Manifest:
    """Make `target`, the checkpoint `model` with the head of directory or file `head`.

    Args:
        mode: how unchanged shards get there; `auto` takes the first of reflink, hard link and copy that works.
        mend: also make the result loadable where the source is not: an index that lists every tensor, the head's keys
            without a wrapper's prefix.

    Raises:
        CheckpointError: the checkpoint cannot be used, or the head does not fit it.
        InputError: `target` lies in the source, or there is no room for it.
        IntegrityError: a byte outside the head differs from the source, or the source changed meanwhile.
    """
    source = open_checkpoint(model)
    native = find_head(source)
    if target.resolve().is_relative_to(model.resolve()) or model.resolve().is_relative_to(target.resolve()):
        raise InputError(f"{target} and the checkpoint {model} lie in each other.", mend="Name another directory.")
    path, digest = open_head(head)
    job = _Stitch(source, native, pieces_of(path, native, text_config(source.config)), mend, reporter)
    return run_stage(
        "stitch", target, config={"mode": mode, "mend": mend}, inputs={"model": fingerprint(source), "head": digest},
        reporter=reporter, replace=replace, body=lambda directory: job.run(directory, mode),
        inventory=lambda _directory: dict(sorted(job.entries.items())),
    )  # fmt: skip


@dataclass
class _Stitch:
    """One stitching; `entries` is filled as files get into place."""

    source: Checkpoint
    native: HeadInfo
    head: dict[str, list[Piece]]
    mend: bool
    reporter: Reporter

    def __post_init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}
        self.done = 0
        self.root = self.source.root
        wrapper = self.native.wrapper if self.mend else ""
        # Key in a file -> key in the result.
        self.renamed = {wrapper + key: key for key in self.native.tensors} if wrapper else {}

    def run(self, directory: Path, mode: Mode) -> dict[str, Any]:
        names = [name for name in self.source.listed if name != MANIFEST and not _LEFT_OUT.search(name)]
        written: dict[str, list[Piece]] = {name: self._shard(name) for name in self.native.files}
        written |= {name: whole(self.root / name) for name in names if name not in self.source.shards}
        if self.mend:
            written[INDEX] = [Piece(None, 0, 0, data=self._index())]
        linked: dict[str, Link] = {}
        for name in names:
            if name not in written:
                how = links_possible((self.root / name).resolve(), directory, mode)
                if how:
                    linked[name] = how
                else:
                    written[name] = whole(self.root / name)
        total = sum(piece.nbytes for pieces in written.values() for piece in pieces)
        self._require_room(directory, total)
        self.reporter.phase("writing the checkpoint", 2 * total, "bytes")
        for name, how in linked.items():
            self.entries[name] = link((self.root / name).resolve(), _place(directory, name), how)
        for name, pieces in written.items():
            self.entries[name] = assemble(pieces, _place(directory, name), functools.partial(self._advance, name))
        for parent in {(directory / name).parent for name in self.entries} - {directory}:
            fsync_path(parent)
        if self.source.files.list() != self.source.listed:
            raise IntegrityError(f"{self.root} changed while it was read.")
        return {
            "tensors_changed": self._changed(),
            "tensors_of_head": len(self.native.tensors),
            "bytes_of_head": self.native.nbytes,
            "bytes_written": total,
            "links": linked,
            "streamed": self.native.files,
            "left_out": sorted(self.source.listed.keys() - set(names) - {MANIFEST}),
            "mended": [*([INDEX] if self.mend else ()), *self.renamed],
        }

    def _shard(self, name: str) -> list[Piece]:
        """A shard from begin to end: its header, then its tensors, the head's from the head's file."""
        path = self.root / name
        own = {entry.key: key for key, entry in self.native.tensors.items()}
        entries = sorted(
            (entry for entry in self.source.tensors.values() if entry.file == name), key=lambda entry: entry.begin
        )
        start = entries[0].begin
        pieces = [self._header(path, start)]
        for entry in entries:
            if entry.key in own:
                pieces += self.head[own[entry.key]]
            elif (pieces[-1].path, pieces[-1].end) == (path, entry.begin):
                pieces[-1] = Piece(path, pieces[-1].begin, entry.end)
            else:
                pieces.append(Piece(path, entry.begin, entry.end))
        return pieces

    def _header(self, path: Path, end: int) -> Piece:
        """The header as it is; with other names where the head's are mended."""
        if not self.renamed:
            return Piece(path, 0, end)
        with path.open("rb") as file:
            header = json.loads(file.read(end)[8:])
        text = json.dumps({self.renamed.get(key, key): value for key, value in header.items()}).encode()
        text += b" " * (-len(text) % 8)
        return Piece(None, 0, 0, data=struct.pack("<Q", len(text)) + text)

    def _index(self) -> bytes:
        """An index of every tensor of every file, with what else the source's says."""
        found = dict(self.source.index or {})
        metadata = found.get("metadata")
        found["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), "total_size": self.source.nbytes}
        found["weight_map"] = {
            self.renamed.get(key, key): entry.file for key, entry in sorted(self.source.tensors.items())
        }
        return json.dumps(found, indent=2).encode() + b"\n"

    def _changed(self) -> int:
        """How many tensors of the head have other bytes than before."""
        return sum(
            _differ(self.source.blocks(entry), blocks_of(self.head[key])) for key, entry in self.native.tensors.items()
        )

    def _advance(self, name: str, count: int) -> None:
        self.done += count
        self.reporter.advance(self.done, note=name)

    def _require_room(self, directory: Path, total: int) -> None:
        free = shutil.disk_usage(directory).free
        if free < total:
            raise InputError(
                f"{directory.parent} has {size(free)} free, the stitched checkpoint needs {size(total)}.",
                mend="Free space, or use another disk; on the model's own file system, unchanged shards are links.",
            )


def _place(directory: Path, name: str) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _differ(left: Iterator[bytes], right: Iterator[bytes]) -> bool:
    """Whether two streams of bytes differ, however each is cut into blocks. Reads no further than that."""
    one = other = b""
    while True:
        one, other = one or next(left, b""), other or next(right, b"")
        size = min(len(one), len(other))
        if size == 0:
            return bool(one or other)
        if one[:size] != other[:size]:
            return True
        one, other = one[size:], other[size:]
