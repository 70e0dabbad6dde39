"""Rows without stored states: nothing on disk but token ids, and the verifier runs for the rows of each batch.

For verifiers whose states would not fit on the disk. The verifier stays in memory beside the head, and each epoch costs
its forward pass over the rows.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastmtp.checkpoint import Checkpoint
from fastmtp.data.engines.loading import Loader
from fastmtp.data.masks import mask_of, require_supervision
from fastmtp.data.shards import AGAIN, Verifier
from fastmtp.data.states import forward_states
from fastmtp.data.store import INDEX, Row, RowEntry, Rows, RowStore, read_index
from fastmtp.errors import DataError
from fastmtp.stage import write_atomic

IDS = "ids.safetensors"
_PASS_TOKENS = 8192


def write_ids(directory: Path, verifier: Verifier, rows: Sequence[tuple[RowEntry, Sequence[int]]]) -> None:
    """Write index and ids of rows whose states will be computed in training.

    Raises:
        DataError: masks of nothing or of everything.
    """
    require_supervision(entry for entry, _ in rows)
    offset, lines = 0, []
    for entry, ids in rows:
        placed = replace(entry, shard=IDS, offset=offset, check=_check(torch.tensor(ids, dtype=torch.int32)))
        lines.append(json.dumps(asdict(placed)) + "\n")
        offset += entry.length
    every = torch.tensor([token for _, ids in rows for token in ids], dtype=torch.int32)
    save_file({"input_ids": every}, directory / IDS, metadata=verifier.metadata())
    write_atomic(directory / INDEX, "".join(lines).encode())


class OnlineRows:
    """Reads what `write_ids` wrote, with states from a forward pass of the verifier.

    Args:
        loader: of the verifier; it is loaded when states are first wanted.
        tokens: of one forward pass, padding included.

    Raises:
        DataError: the ids do not read, are not those that the index speaks of, or another verifier's.
    """

    ahead = False

    def __init__(self, directory: Path, verifier: Verifier, loader: Loader, tokens: int = _PASS_TOKENS) -> None:
        self.entries: Sequence[RowEntry] = read_index(directory)
        path = directory / IDS
        try:
            with safe_open(path, framework="pt") as file:
                self._ids: Tensor = file.get_tensor("input_ids")
                verifier.require(file.metadata() or {}, path)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} does not read: {error}", mend=AGAIN) from error
        for entry in self.entries:
            if _check(self._ids[entry.offset : entry.offset + entry.length]) != entry.check:
                raise DataError(f"{path} does not hold the tokens of row {entry.key}.", mend=AGAIN)
        self._loader, self._tokens = loader, tokens

    def split(self, name: str) -> list[RowEntry]:
        """Entries of train or holdout, in stored order."""
        return [entry for entry in self.entries if entry.split == name]

    def rows(self, entries: Sequence[RowEntry]) -> list[Row]:
        """For each entry input_ids [n] int64, hidden_states [n, H] bf16, loss_mask [n] bool."""
        if not entries:
            return []
        ids = [self._ids[entry.offset : entry.offset + entry.length].long() for entry in entries]
        states = forward_states(self._loader.get(), [row.tolist() for row in ids], self._tokens)
        masks = [torch.tensor(mask_of(entry.answers, entry.length)) for entry in entries]
        return [(row, found.bfloat16(), mask) for row, found, mask in zip(ids, states, masks, strict=True)]

    def answer_ids(self, entry: RowEntry) -> list[int]:
        """The supervised tokens of a row."""
        row = self._ids[entry.offset : entry.offset + entry.length]
        return row[torch.tensor(mask_of(entry.answers, entry.length))].tolist()


def open_rows(directory: Path, checkpoint: Checkpoint) -> Rows:
    """The rows of a prepared directory, with stored states or without.

    Raises:
        DataError: they do not read, or are of another verifier.
    """
    if not (directory / IDS).is_file():
        return RowStore(directory, Verifier.of(checkpoint))
    loader = Loader(checkpoint.root, directory.parent / f".{directory.name}.offload", "auto")
    return OnlineRows(directory, Verifier.of(checkpoint), loader)


def _check(ids: Tensor) -> int:
    return zlib.crc32(memoryview(ids.numpy()))  # type: ignore[arg-type]
