"""Prepared rows on disk: ids, mask and hidden states side by side in safetensors shards, read through a memory map.

    rows.jsonl             one line per row: key, split, lengths, finish reason, shard and offset
    rows-00000.safetensors input_ids [N] int32, loss_mask [N] uint8, hidden_states [N, H] bf16, rows end to end

Each shard's metadata says which verifier its states are of and that they are after the final norm; a reader refuses
others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastmtp.errors import DataError

INDEX = "rows.jsonl"
STATES = "post_final_norm"
SHARD_TOKENS = 1 << 18

Row = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class RowEntry:
    """Where a row lies and what it is. `split` is train or holdout; lengths are in tokens."""

    key: str
    split: str
    length: int
    prompt_length: int
    finish: str
    shard: str = ""
    offset: int = 0


class RowWriter:
    """Collects rows and writes them in shards of about SHARD_TOKENS tokens."""

    def __init__(self, directory: Path, verifier: str) -> None:
        self._directory = directory
        self._metadata = {"format": "pt", "hidden_states": STATES, "verifier": verifier}
        self._entries: list[RowEntry] = []
        self._pending: list[Row] = []
        self._tokens = 0
        self._shards = 0

    def add(self, entry: RowEntry, input_ids: Tensor, hidden_states: Tensor) -> None:
        """Add a row: input_ids [n] int, hidden_states [n, H]; the tokens after the prompt are supervised."""
        mask = torch.zeros(entry.length, dtype=torch.uint8)
        mask[entry.prompt_length :] = 1
        shard = f"rows-{self._shards:05d}.safetensors"
        self._entries.append(RowEntry(**{**asdict(entry), "shard": shard, "offset": self._tokens}))
        self._pending.append((input_ids.to(torch.int32), hidden_states.to(torch.bfloat16), mask))
        self._tokens += entry.length
        if self._tokens >= SHARD_TOKENS:
            self._flush()

    def close(self) -> None:
        """Write what is pending, and the index."""
        self._flush()
        lines = [json.dumps(asdict(entry)) for entry in self._entries]
        (self._directory / INDEX).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if not self._pending:
            return
        ids, hidden, mask = (torch.cat(parts) for parts in zip(*self._pending, strict=True))
        path = self._directory / f"rows-{self._shards:05d}.safetensors"
        save_file({"input_ids": ids, "hidden_states": hidden, "loss_mask": mask}, path, metadata=self._metadata)
        self._pending, self._tokens, self._shards = [], 0, self._shards + 1


class RowStore:
    """Reads what a RowWriter wrote.

    Args:
        verifier: fingerprint the states must be of. Raises DataError when they are of another, or before the final
        norm.
    """

    def __init__(self, directory: Path, verifier: str) -> None:
        lines = (directory / INDEX).read_text(encoding="utf-8").splitlines()
        self.entries = [RowEntry(**json.loads(line)) for line in lines]
        self._files: dict[str, Any] = {}
        for name in sorted({entry.shard for entry in self.entries}):
            file = safe_open(directory / name, framework="pt")
            metadata = file.metadata()
            if metadata.get("hidden_states") != STATES or metadata.get("verifier") != verifier:
                raise DataError(
                    f"{directory / name} holds states of another verifier, or before its final norm.",
                    mend="Prepare the data again with this model.",
                )
            self._files[name] = {key: file.get_slice(key) for key in ("input_ids", "hidden_states", "loss_mask")}

    def row(self, entry: RowEntry) -> Row:
        """input_ids [n] int64, hidden_states [n, H] bf16, loss_mask [n] bool."""
        file, part = self._files[entry.shard], slice(entry.offset, entry.offset + entry.length)
        return file["input_ids"][part].long(), file["hidden_states"][part], file["loss_mask"][part].bool()

    def split(self, name: str) -> list[RowEntry]:
        """Entries of `train` or `holdout`, in stored order."""
        return [entry for entry in self.entries if entry.split == name]
