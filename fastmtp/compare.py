"""What differs between two checkpoints, tensor by tensor, and whether that is exactly the head.

Tensors are matched by name, wherever each checkpoint keeps them: the two may be sharded differently. A file that is one
and the same on disk (a hard link) is not read. Loads no torch.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from fastmtp.checkpoint import INDEX, Checkpoint, open_checkpoint
from fastmtp.files import BLOCK
from fastmtp.headers import SUFFIX, TensorEntry
from fastmtp.native import FLOATS, examine
from fastmtp.norms import floats
from fastmtp.progress import Reporter
from fastmtp.stage import MANIFEST

# Stitching leaves these out.
_OTHER_WEIGHTS = re.compile(r"\.(bin|pt|pth|pkl|ckpt)$")

Verdict = Literal["identical", "exactly the head", "part of the head", "more than the head"]


class Difference(BaseModel):
    """One tensor that is not the same in both."""

    key: str
    what: Literal["only in A", "only in B", "type or shape", "values"]
    of_head: bool
    file_a: str | None
    file_b: str | None
    change: float | None = Field(None, description="For values of a float type: ||b - a|| / ||a||.")


class Comparison(BaseModel):
    """Everything `fastmtp verify` says. Keys are the family's own, without a wrapper's prefix on the head's."""

    a: str
    b: str
    verdict: Verdict
    tensors: int = Field(description="Tensors in either.")
    head: int = Field(description="Tensors of A's head.")
    differences: list[Difference]
    side_files: dict[str, str] = Field(
        description="Other files that differ: name -> how. Weights in other formats that only A has, and an index that "
        "lists the same tensors in other files, make no difference to the verdict."
    )
    bytes_read: int = Field(description="Of each; files that are one and the same on disk are not read.")


def compare(a: str | Path, b: str | Path, reporter: Reporter) -> Comparison:
    """Compare two checkpoints. Raises CheckpointError for one that cannot be read."""
    return _Comparing(open_checkpoint(a), open_checkpoint(b), reporter).run()


class _Comparing:
    def __init__(self, a: Checkpoint, b: Checkpoint, reporter: Reporter) -> None:
        self.a, self.b, self.reporter = a, b, reporter
        self.left, self.right = _by_own_name(a), _by_own_name(b)
        head, _ = examine(a)
        self.head = set(head.tensors) if head else set()
        self.done = 0

    def run(self) -> Comparison:
        both = [key for key in self.left if key in self.right]
        read = [key for key in both if self._must_read(key)]
        total = sum(self.left[key].nbytes for key in read)
        self.reporter.phase("comparing tensors", total, "bytes")
        found = [self._difference(key, "only in A") for key in self.left if key not in self.right]
        found += [self._difference(key, "only in B") for key in self.right if key not in self.left]
        found += [self._difference(key, "type or shape") for key in both if not self._alike(key)]
        for key in sorted(read, key=lambda key: (self.left[key].file, self.left[key].begin)):
            if not self._same_bytes(key):
                found.append(self._difference(key, "values", self._change(key)))
        found.sort(key=lambda difference: difference.key)
        side = _side_files(self.a, self.b)
        return Comparison(
            a=self.a.files.name, b=self.b.files.name, verdict=self._verdict(found, side),
            tensors=len(self.left.keys() | self.right.keys()), head=len(self.head), differences=found,
            side_files=side, bytes_read=total,
        )  # fmt: skip

    def _alike(self, key: str) -> bool:
        a, b = self.left[key], self.right[key]
        return (a.dtype, a.shape) == (b.dtype, b.shape)

    def _must_read(self, key: str) -> bool:
        a, b = self.left[key], self.right[key]
        if not self._alike(key):
            return False
        roots = self.a.files.root, self.b.files.root
        same_place = (a.begin, a.end) == (b.begin, b.end) and None not in roots
        return not (same_place and self.a.root.joinpath(a.file).samefile(self.b.root / b.file))

    def _same_bytes(self, key: str) -> bool:
        same = True
        for one, other in zip(self.a.blocks(self.left[key]), self.b.blocks(self.right[key]), strict=True):
            same = same and one == other
            self.done += len(one)
            self.reporter.advance(self.done, note=self.left[key].file)
        return same

    def _change(self, key: str) -> float | None:
        """||b - a|| / ||a||, block by block; None for types that are no floats, or where a is zero."""
        a, b = self.left[key], self.right[key]
        if a.dtype not in FLOATS:
            return None
        moved = length = 0.0
        for one, other in zip(self.a.blocks(a), self.b.blocks(b), strict=True):
            part_moved, part_length = _squares(one, other, a.dtype)
            moved, length = moved + part_moved, length + part_length
        found = math.sqrt(moved / length) if length else math.nan
        return round(found, 6) if math.isfinite(found) else None

    def _difference(
        self,
        key: str,
        what: Literal["only in A", "only in B", "type or shape", "values"],
        change: float | None = None,
    ) -> Difference:
        a, b = self.left.get(key), self.right.get(key)
        return Difference(
            key=key, what=what, of_head=key in self.head, file_a=a.file if a else None, file_b=b.file if b else None,
            change=change,
        )  # fmt: skip

    def _verdict(self, found: list[Difference], side: dict[str, str]) -> Verdict:
        counted = [name for name, how in side.items() if self._counts(name, how)]
        if not found and not counted:
            return "identical"
        if counted or not all(difference.of_head and difference.what == "values" for difference in found):
            return "more than the head"
        return "exactly the head" if len(found) == len(self.head) else "part of the head"

    def _counts(self, name: str, how: str) -> bool:
        """Whether a side file's difference is one of the checkpoint."""
        if name != INDEX:
            return not (how == "only in A" and _OTHER_WEIGHTS.search(name))
        loses = set(self.b.unlisted) - set(self.a.unlisted)
        return bool(loses) or (how == "only in A" and len(self.b.shards) > 1)


def _by_own_name(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Key -> entry, without a wrapper's prefix where the head has one."""
    head, _ = examine(checkpoint)
    renamed = {entry.key: key for key, entry in head.tensors.items()} if head else {}
    return {renamed.get(key, key): entry for key, entry in checkpoint.tensors.items()}


def _side_files(a: Checkpoint, b: Checkpoint) -> dict[str, str]:
    """Files beside the shards that are in one only, or have other bytes."""
    found: dict[str, str] = {}
    for name in sorted(a.listed.keys() | b.listed.keys()):
        if name == MANIFEST or (name.endswith(SUFFIX) and "/" not in name):
            continue
        if name not in b.listed:
            found[name] = "only in A"
        elif name not in a.listed:
            found[name] = "only in B"
        elif not _same_file(a, b, name):
            found[name] = "other bytes"
    return found


def _same_file(a: Checkpoint, b: Checkpoint, name: str) -> bool:
    size = a.listed[name].size
    if size is None or size != b.listed[name].size:
        return False
    ranges = ((begin, min(begin + BLOCK, size)) for begin in range(0, size, BLOCK))
    return all(a.files.read(name, *part) == b.files.read(name, *part) for part in ranges)


def _squares(one: bytes, other: bytes, dtype: str) -> tuple[float, float]:
    """Sums of (b - a)^2 and of a^2."""
    a, b = floats(one, dtype), floats(other, dtype)
    moved = b - a
    return float(moved @ moved), float(a @ a)
