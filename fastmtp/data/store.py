"""Prepared rows: which there are, where each lies, and reading and writing them.

    rows.jsonl                one line per row, in the order of the input
    rows-00000.safetensors    ids, states and mask of the first rows (`fastmtp.data.shards`), and so on

Rows lie in the order in which they were given, whatever order their states are computed in. A finished shard is
finished for good: the writer of the same rows finds it and asks only for what is missing.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fastmtp.data.masks import Span, require_supervision
from fastmtp.data.shards import AGAIN, Shard, ShardFile, Verifier, bytes_of
from fastmtp.errors import DataError, IntegrityError
from fastmtp.stage import write_atomic
from fastmtp.table import size

INDEX = "rows.jsonl"
SHARDS = "rows-*.safetensors"
SHARD_TOKENS = 1 << 17

Row = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class RowEntry:
    """What a row is and where it lies.

    Attributes:
        key, root: of its conversation.
        split: train or holdout.
        length: tokens.
        prompt_length: tokens before the first supervised one.
        finish: how its answer ended: stop or length.
        turn: place of its last supervised message in the conversation.
        spans: supervised tokens, half-open ranges; none given: all after the prompt.
        shard, offset: file, and place of the first token in it; the writer fills them in.
        check: crc32 of its ids as int32; the writer fills it in, the reader compares.
    """

    key: str
    split: str
    length: int
    prompt_length: int
    finish: str
    root: str = ""
    turn: int = 0
    spans: tuple[Span, ...] = ()
    shard: str = ""
    offset: int = 0
    check: int = 0

    @property
    def answers(self) -> tuple[Span, ...]:
        """The supervised spans."""
        return self.spans or ((self.prompt_length, self.length),)

    @property
    def supervised(self) -> int:
        """How many tokens are supervised."""
        return sum(end - begin for begin, end in self.answers)


class Rows(Protocol):
    """Rows to train on, wherever their states come from.

    `ahead` says whether a thread may load the next rows while the present ones are computed on: where loading is
    computing too, both would only wait for each other.
    """

    entries: Sequence[RowEntry]
    ahead: bool

    def split(self, name: str) -> list[RowEntry]:
        """Entries of train or holdout, in stored order."""

    def rows(self, entries: Sequence[RowEntry]) -> list[Row]:
        """For each entry input_ids [n] int64, hidden_states [n, H], loss_mask [n] bool."""

    def answer_ids(self, entry: RowEntry) -> list[int]:
        """The supervised tokens of a row; needs no states."""


class RowWriter:
    """Writes rows whose tokens are known and whose states come in any order.

    Args:
        rows: (entry, ids) in the order of the store.
        shard_tokens: tokens after which a shard is full.

    Raises:
        DataError: no row, masks of nothing or of everything, or no room on the disk.
    """

    def __init__(
        self,
        directory: Path,
        verifier: Verifier,
        rows: Sequence[tuple[RowEntry, Sequence[int]]],
        *,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        require_supervision(entry for entry, _ in rows)
        self._directory, self._verifier = directory, verifier
        self._ids = [torch.tensor(ids, dtype=torch.int32) for _, ids in rows]
        self.entries = _placed([entry for entry, _ in rows], self._ids, shard_tokens)
        self._members: dict[str, list[int]] = {}
        for index, entry in enumerate(self.entries):
            self._members.setdefault(entry.shard, []).append(index)
        self._missing = {name: set(places) for name, places in self._members.items() if not self._finished(name)}
        self._open: dict[str, ShardFile] = {}
        require_room(directory, sum(self.entries[row].length for row in self.missing()), verifier.hidden_size)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def missing(self) -> list[int]:
        """Places of the rows whose states are still wanted, in order; those of one shard are neighbours."""
        return sorted(row for rows in self._missing.values() for row in rows)

    def shards(self) -> list[list[int]]:
        """The same, shard by shard: who computes states in this order keeps the most when it is killed."""
        return [sorted(rows) for _, rows in sorted(self._missing.items())]

    def put(self, index: int, ids: Sequence[int], states: Tensor) -> None:
        """States [n, H] of row `index`, and the ids that they were computed on.

        Raises:
            IntegrityError: those are not the row's ids, their number differs, or a state is not finite.
        """
        entry = self.entries[index]
        if self._ids[index].tolist() != list(ids) or states.shape != (entry.length, self._verifier.hidden_size):
            raise IntegrityError(f"States {list(states.shape)} for row {index} ({entry.key}) are of other tokens.")
        if entry.shard not in self._open:
            self._open[entry.shard] = self._begin(entry.shard)
        self._open[entry.shard].put(entry.offset, states)
        left = self._missing[entry.shard]
        left.discard(index)
        if not left:
            self._open.pop(entry.shard).finish()
            del self._missing[entry.shard]

    def close(self) -> None:
        """Write the index, and drop what other rows left. Raises IntegrityError while a row's states are missing."""
        if missing := self.missing():
            raise IntegrityError(f"{len(missing)} of {len(self.entries)} rows have no states, row {missing[0]} first.")
        for path in (*self._directory.glob(SHARDS), *self._directory.glob(f".{SHARDS}.partial")):
            if path.name not in self._members:
                path.unlink()
        lines = "".join(json.dumps(vars(entry)) + "\n" for entry in self.entries).encode()
        index = self._directory / INDEX
        if not index.is_file() or index.read_bytes() != lines:
            write_atomic(index, lines)

    def _finished(self, name: str) -> bool:
        """Whether a shard is there, of this verifier, with these rows' ids."""
        path = self._directory / name
        if not path.is_file():
            return False
        try:
            shard = Shard(path, self._verifier)
        except DataError:
            return False
        ids, mask = self._contents(name)
        return bool(torch.equal(shard.ids, ids) and torch.equal(shard.mask, mask))

    def _begin(self, name: str) -> ShardFile:
        return ShardFile(self._directory / name, self._verifier, *self._contents(name))

    def _contents(self, name: str) -> tuple[Tensor, Tensor]:
        ids = torch.cat([self._ids[row] for row in self._members[name]])
        mask = torch.zeros(len(ids), dtype=torch.uint8)
        for row in self._members[name]:
            entry = self.entries[row]
            for begin, end in entry.answers:
                mask[entry.offset + begin : entry.offset + end] = 1
        return ids, mask


class RowStore:
    """Reads what a RowWriter wrote.

    Raises:
        DataError: no index, or states that are not those of `verifier` after its final norm; says what differs.
    """

    ahead = True

    def __init__(self, directory: Path, verifier: Verifier) -> None:
        self.entries: Sequence[RowEntry] = read_index(directory)
        names = sorted({entry.shard for entry in self.entries})
        self._shards = {name: Shard(directory / name, verifier) for name in names}
        self._directory = directory

    def split(self, name: str) -> list[RowEntry]:
        """Entries of train or holdout, in stored order."""
        return [entry for entry in self.entries if entry.split == name]

    def row(self, entry: RowEntry) -> Row:
        """input_ids [n] int64, hidden_states [n, H] bf16 (in the memory map), loss_mask [n] bool.

        Raises:
            IntegrityError: the ids there are not the row's.
        """
        shard, part = self._shards[entry.shard], slice(entry.offset, entry.offset + entry.length)
        ids = shard.ids[part]
        if len(ids) != entry.length or _check(ids) != entry.check:
            raise IntegrityError(f"{self._directory / entry.shard} does not hold the tokens of row {entry.key}.")
        return ids.long(), shard.states[part], shard.mask[part].bool()

    def rows(self, entries: Sequence[RowEntry]) -> list[Row]:
        """Several rows."""
        return [self.row(entry) for entry in entries]

    def answer_ids(self, entry: RowEntry) -> list[int]:
        """The supervised tokens of a row."""
        ids, _, mask = self.row(entry)
        return [int(token) for token in ids[mask]]


def read_index(directory: Path) -> list[RowEntry]:
    """The rows of a prepared directory. Raises DataError."""
    path = directory / INDEX
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [RowEntry(**{**line, "spans": tuple((begin, end) for begin, end in line["spans"])}) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} does not read: {error}", mend=AGAIN) from error


def require_room(directory: Path, tokens: int, hidden_size: int) -> None:
    """Raise DataError when the states of so many tokens do not fit on the disk."""
    needed, free = bytes_of(tokens, hidden_size), shutil.disk_usage(directory).free
    if needed > free:
        raise DataError(
            f"The hidden states of {tokens:,} tokens take {size(needed)} (tokens x hidden size x 2 bytes);"
            f" {directory.parent} has {size(free)} free.",
            mend="Lower data.max_samples, use another disk, or set data.hidden_states to online.",
        )


def _placed(entries: Sequence[RowEntry], ids: Sequence[Tensor], shard_tokens: int) -> list[RowEntry]:
    placed: list[RowEntry] = []
    number, offset = 0, 0
    for entry, tokens in zip(entries, ids, strict=True):
        assert len(tokens) == entry.length > 0, f"row {entry.key} has {len(tokens)} tokens, not {entry.length}"
        if offset >= shard_tokens:
            number, offset = number + 1, 0
        placed.append(replace(entry, shard=f"rows-{number:05d}.safetensors", offset=offset, check=_check(tokens)))
        offset += entry.length
    return placed


def _check(ids: Tensor) -> int:
    return zlib.crc32(memoryview(ids.numpy()))  # type: ignore[arg-type]
