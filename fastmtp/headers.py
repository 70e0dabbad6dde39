"""Headers of safetensors files: which tensor lies where.

Format: 8 bytes little-endian length, that many bytes of JSON header, then the tensors' bytes without holes
(https://github.com/huggingface/safetensors, README, "Format"). Loads no torch and reads no tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastmtp.errors import CheckpointError
from fastmtp.files import Files

SUFFIX = ".safetensors"
AGAIN = "Download it again."
_MAX_HEADER = 100_000_000  # the format's own limit
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class TensorEntry(NamedTuple):
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


def read_header(files: Files, name: str, size: int) -> list[TensorEntry]:
    """Entries of one safetensors file in order of offset, checked against its size.

    Raises:
        CheckpointError: truncated or malformed: no header, bytes that overlap, have holes or miss the file's end.
    """
    entries, start = parse_header(files, name, size)
    position = start
    for entry in entries:
        if entry.begin != position:
            what = "overlap" if entry.begin < position else "leave a hole"
            raise CheckpointError(f"{files.name}/{name}: tensors {what} at byte {position}, {entry.key}.", mend=AGAIN)
        position = entry.end
    if position != size:
        raise CheckpointError(f"{files.name}/{name} has {size} bytes, its header needs {position}.", mend=AGAIN)
    return entries


def parse_header(files: Files, name: str, size: int) -> tuple[list[TensorEntry], int]:
    """Entries in order of offset, and where the data begins. Raises CheckpointError as `read_header`."""
    path = f"{files.name}/{name}"
    data = files.read(name, 0, min(size, files.probe))
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else _MAX_HEADER + 1
    if length > min(_MAX_HEADER, size - 8):
        raise CheckpointError(f"{path} is truncated or no safetensors file.", mend=AGAIN)
    text = data[8 : 8 + length]
    if len(text) < length:
        text += files.read(name, 8 + len(text), 8 + length)
    try:
        header = json.loads(text, parse_float=_refuse)
        items = [(key, value) for key, value in header.items() if key != "__metadata__"]
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a broken header.", mend=AGAIN) from error
    odd = next((key for key, _ in items if not key.isprintable()), None)
    if odd is not None:
        raise CheckpointError(f"{path} has a broken header: a tensor is named {odd!r:.100}.", mend=AGAIN)
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    entries = [_entry(path, name, key, value, 8 + length, sizes) for key, value in items]
    return sorted(entries, key=lambda entry: entry[4:]), 8 + length


def _entry(
    path: str,
    name: str,
    key: str,
    value: Any,
    start: int,
    sizes: dict[tuple[str, tuple[int, ...]], int],
) -> TensorEntry:
    """One entry of a header. `sizes` remembers what a dtype and shape need: experts by the thousand are alike."""
    try:
        begin, end = value["data_offsets"]
        kind = value["dtype"], tuple(value["shape"])
        needed = sizes.get(kind)
        if needed is None:
            needed = sizes[kind] = _nbytes(*kind)
        if end - begin != needed:
            what = f"{path}: {key} has {end - begin} bytes, {kind[0]} {list(kind[1])} needs {needed}."
            raise CheckpointError(what, mend=AGAIN)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: entry {key} does not read: {value!r:.100}.", mend=AGAIN) from error
    return TensorEntry(key, name, *kind, start + begin, start + end)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = math.prod(shape) * _BITS[dtype]
    if min(shape, default=0) < 0 or bits % 8:
        raise ValueError(shape)
    return bits // 8


def _refuse(number: str) -> None:
    raise ValueError(f"{number} where only whole numbers belong")


def header_of(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and JSON header of a safetensors file that holds `entries` one after the other under their keys."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    offset = 0
    for key, entry in entries.items():
        offsets = [offset, offset + entry.nbytes]
        header[key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
