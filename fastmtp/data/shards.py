"""The file that holds prepared rows: safetensors, written in place in any order, read through a memory map.

    input_ids      [N] int32       the rows' tokens, end to end
    hidden_states  [N, H] bf16     the verifier's states at the same places
    loss_mask      [N] uint8       1 where a token is the assistant's own

Its metadata says whose states these are. A shard under its own name is finished: it is written under another, and
renamed when every row is in it and on disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastmtp.checkpoint import Checkpoint
from fastmtp.errors import CheckpointError, DataError, IntegrityError
from fastmtp.extract import fingerprint
from fastmtp.families.base import text_config
from fastmtp.files import LocalFiles
from fastmtp.headers import TensorEntry, header_of, read_header
from fastmtp.stage import fsync_path

IDS, STATES, MASK = "input_ids", "hidden_states", "loss_mask"
AGAIN = "Prepare the data again with this model."
_INFINITE = 0x7F80  # bits of a bf16 whose exponent is all ones: an infinity or no number


@dataclass(frozen=True)
class Verifier:
    """Whose states: what identifies the checkpoint, how many layers they went through, and their size."""

    fingerprint: str
    layers: int
    hidden_size: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Verifier:
        """That of a checkpoint; reads no tensor."""
        text = text_config(checkpoint.config)
        return cls(fingerprint(checkpoint), int(text["num_hidden_layers"]), int(text["hidden_size"]))

    def metadata(self) -> dict[str, str]:
        """What is written into a shard; states are those after the final norm, always."""
        return {
            "format": "pt", "verifier": self.fingerprint, "layer": str(self.layers), "post_final_norm": "yes",
            "hidden_size": str(self.hidden_size),
        }  # fmt: skip

    def require(self, found: Mapping[str, str], where: Path) -> None:
        """Raise DataError naming all that differs from what is expected."""
        names = {
            "verifier": "another verifier", "layer": "another layer", "hidden_size": "another size",
            "post_final_norm": "a place other than after the final norm",
        }  # fmt: skip
        odd = [
            f"{what} ({key}: {found.get(key, 'not said')}, not {self.metadata()[key]})"
            for key, what in names.items()
            if found.get(key) != self.metadata()[key]
        ]
        if odd:
            raise DataError(f"{where} holds states of {', of '.join(odd)}.", mend=AGAIN)


class Shard:
    """A finished shard, memory-mapped: what is not looked at is not read.

    Raises:
        DataError: it does not read, or its states are not those of `verifier`.
    """

    def __init__(self, path: Path, verifier: Verifier) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                found = file.metadata() or {}
            size = path.stat().st_size
            entries = {entry.key: entry for entry in read_header(LocalFiles(path.parent), path.name, size)}
        except (OSError, SafetensorError, CheckpointError) as error:
            raise DataError(f"{path} does not read: {error}", mend=AGAIN) from error
        verifier.require(found, path)
        tokens = entries[IDS].shape[0] if IDS in entries else -1
        expected = _layout(path.name, tokens, verifier.hidden_size)
        if {key: entry[2:4] for key, entry in entries.items()} != {key: entry[2:4] for key, entry in expected.items()}:
            raise DataError(f"{path} holds no rows of size {verifier.hidden_size}.", mend=AGAIN)
        self.tokens = tokens
        # Private: nothing here reaches the file.
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        ids, states, mask = (data[entries[key].begin : entries[key].end] for key in (IDS, STATES, MASK))
        self.ids, self.mask = ids.view(torch.int32), mask
        self.states = states.view(torch.bfloat16).view(-1, verifier.hidden_size)


class ShardFile:
    """A shard being written: ids and mask at once, states row by row in any order.

    Args:
        ids: [N] int32, of all its rows end to end.
        mask: [N] uint8.
    """

    def __init__(self, path: Path, verifier: Verifier, ids: Tensor, mask: Tensor) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.partial")
        layout = _layout(path.name, len(ids), verifier.hidden_size)
        header = header_of(layout, verifier.metadata())
        self._states = len(header) + layout[STATES].begin
        self._width = 2 * verifier.hidden_size
        self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write(torch.frombuffer(bytearray(header), dtype=torch.uint8), 0)
        self._write(ids, len(header) + layout[IDS].begin)
        self._write(mask, len(header) + layout[MASK].begin)

    def put(self, offset: int, states: Tensor) -> None:
        """States [n, H] of the tokens from place `offset` on. Raises IntegrityError when one is not finite."""
        stored = states.detach().to("cpu", torch.bfloat16).contiguous()
        if int((stored.view(torch.int16) & 0x7FFF).max()) >= _INFINITE:
            raise IntegrityError(f"A hidden state for {self._path.name} is not finite.")
        self._write(stored, self._states + offset * self._width)

    def finish(self) -> None:
        """Put it under its own name, when everything is on disk."""
        os.fsync(self._file)
        self.close()
        self._temporary.replace(self._path)
        fsync_path(self._path.parent)

    def close(self) -> None:
        """Leave it unfinished; without effect on one that is finished."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, values: Tensor, offset: int) -> None:
        data = memoryview(values.contiguous().view(torch.uint8).view(-1).numpy())  # type: ignore[arg-type]
        while data:
            written = os.pwrite(self._file, data, offset)
            data, offset = data[written:], offset + written


def bytes_of(tokens: int, hidden_size: int) -> int:
    """Bytes that rows of so many tokens take on disk, headers apart."""
    return tokens * (2 * hidden_size + 5)


def _layout(name: str, tokens: int, hidden_size: int) -> dict[str, TensorEntry]:
    """Offsets are from the end of the header. Widest alignment first, so that each tensor can be viewed in the map."""
    states = 4 * tokens
    mask = states + 2 * tokens * hidden_size
    return {
        IDS: TensorEntry(IDS, name, "I32", (tokens,), 0, states),
        STATES: TensorEntry(STATES, name, "BF16", (tokens, hidden_size), states, mask),
        MASK: TensorEntry(MASK, name, "U8", (tokens,), mask, mask + tokens),
    }
