"""Sharded safetensors directories, read by header: where each tensor lies, without loading any of them.

A checkpoint is described by its index *and* its files' own headers: tools disagree about which of the two is right, so
both are read and every disagreement is an error that names file and key. Nothing here writes, and nothing loads torch.

Format: 8 bytes little-endian length, that many bytes of JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors, README, "Format").
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastmtp.errors import CheckpointError

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_MAX_HEADER = 100_000_000  # the format's own limit
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `begin` and `end` are absolute byte offsets in it."""

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Checkpoint:
    """A model directory as its headers describe it.

    Attributes:
        config: config.json.
        tensors: key -> entry, over every shard.
        shards: file name -> size in bytes, sorted.
        index: the index file's JSON, or None for a single-file checkpoint.
    """

    root: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    shards: dict[str, int]
    index: dict[str, Any] | None

    def head(self, prefix: str) -> dict[str, TensorEntry]:
        """Tensors whose key starts with `prefix`, sorted by key."""
        return {key: self.tensors[key] for key in sorted(self.tensors) if key.startswith(prefix)}

    def read(self, entry: TensorEntry) -> bytes:
        """A tensor's bytes as stored."""
        with (self.root / entry.file).open("rb") as file:
            file.seek(entry.begin)
            data = file.read(entry.nbytes)
        if len(data) != entry.nbytes:
            raise CheckpointError(f"{self.root / entry.file} ends inside {entry.key}.", mend="Download it again.")
        return data


def open_checkpoint(root: Path) -> Checkpoint:
    """Read config, index and every shard's header. Raises CheckpointError for whatever does not fit together."""
    if not root.is_dir():
        raise CheckpointError(
            f"{root} is no directory.", mend="Name a local checkpoint directory with config.json.", pointer="/model"
        )
    config = _read_json(root / CONFIG)
    index = _read_json(root / INDEX) if (root / INDEX).exists() else None
    names = _shard_names(root, index)
    tensors: dict[str, TensorEntry] = {}
    for name in names:
        for entry in read_header(root / name):
            if entry.key in tensors:
                other = tensors[entry.key].file
                raise CheckpointError(f"{entry.key} is in {other} and again in {name}.", mend="Delete the stale file.")
            tensors[entry.key] = entry
    if index is not None:
        _compare_with_index(root, index["weight_map"], tensors)
    sizes = {name: (root / name).stat().st_size for name in names}
    return Checkpoint(root=root, config=config, tensors=tensors, shards=sizes, index=index)


def read_header(path: Path) -> Iterator[TensorEntry]:
    """Entries of one safetensors file, checked against its size. Raises CheckpointError when truncated or malformed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
        if length > min(_MAX_HEADER, size - 8):
            raise CheckpointError(f"{path} is truncated or no safetensors file.", mend="Download it again.")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} has a broken header.", mend="Download it again.") from error
    start = 8 + length
    end_of_data = start
    for key, value in header.items():
        if key == "__metadata__":
            continue
        entry = _entry(path, key, value, start)
        end_of_data = max(end_of_data, entry.end)
        yield entry
    if end_of_data != size:
        raise CheckpointError(f"{path} has {size} bytes, its header needs {end_of_data}.", mend="Download it again.")


def _entry(path: Path, key: str, value: Any, start: int) -> TensorEntry:  # noqa: ANN401 - JSON
    try:
        begin, end = (int(offset) for offset in value["data_offsets"])
        shape = tuple(int(dim) for dim in value["shape"])
        dtype = str(value["dtype"])
        expected = math.prod(shape) * _BITS[dtype] // 8
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: entry {key} does not read.", mend="Download it again.") from error
    if not 0 <= begin <= end or end - begin != expected:
        raise CheckpointError(f"{path}: {key} has {end - begin} bytes, {dtype} {list(shape)} needs {expected}.")
    return TensorEntry(key, path.name, dtype, shape, start + begin, start + end)


def _shard_names(root: Path, index: dict[str, Any] | None) -> list[str]:
    """Files of the checkpoint: what the index lists, and any other safetensors file beside them."""
    present = {path.name for path in root.glob("*.safetensors")}
    listed: set[str] = set()
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{root / INDEX} has no weight_map.", mend="Download it again.")
        listed = {str(name) for name in weight_map.values()}
        outside = sorted(name for name in listed if Path(name).name != name)
        if outside:
            raise CheckpointError(f"{root / INDEX} names {outside[0]}, outside the directory.")
        missing = sorted(listed - present)
        if missing:
            raise CheckpointError(
                f"{root} lacks {missing[0]}" + (f" and {len(missing) - 1} more shards" if missing[1:] else "") + ".",
                mend="The index lists it: download it again.",
                pointer="/model",
            )
    if not present:
        raise CheckpointError(f"{root} holds no safetensors file.", mend="Convert it to safetensors.", pointer="/model")
    return sorted(present | listed)


def _compare_with_index(root: Path, weight_map: dict[str, str], tensors: dict[str, TensorEntry]) -> None:
    """Keys the index misses are fine (some tools leave the head out); keys it misplaces or invents are not."""
    for key, name in weight_map.items():
        if key not in tensors:
            raise CheckpointError(
                f"{root / INDEX} says that {key} is in {name}, but it is in no file.", mend="Download the shard again."
            )
        if tensors[key].file != name:
            raise CheckpointError(
                f"{root / INDEX} says that {key} is in {name}, but it is in {tensors[key].file}.",
                mend="Rebuild the index.",
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} lacks {path.name}.", mend="Download it again.", pointer="/model"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} does not read as JSON.", mend="Download it again.", pointer="/model") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.", pointer="/model")
    return value
