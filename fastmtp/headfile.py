"""A head on its way back into a checkpoint: which bytes of its file become which native tensor.

The head may be stored as the checkpoint stores its own, or with its experts in the other layout, or in another float
type: layouts differ by which bytes follow which, so they are rearranged by offset; types are converted block by block.
torch is loaded only for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fastmtp.copying import Piece
from fastmtp.errors import CheckpointError, InputError
from fastmtp.extract import HEAD_FILE
from fastmtp.families.base import Config, Layout
from fastmtp.files import LocalFiles
from fastmtp.headers import SUFFIX, TensorEntry, read_header
from fastmtp.native import FLOATS, HeadInfo
from fastmtp.stage import MANIFEST, read_manifest, sha256_file

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


def open_head(head: Path) -> tuple[Path, str]:
    """The safetensors file of a head (a result of extract or train, or a file by itself), and a digest of it."""
    if head.is_file() and head.suffix == SUFFIX:
        return head, sha256_file(head)
    path = head / HEAD_FILE
    if not path.is_file():
        raise InputError(
            f"{head} holds no {HEAD_FILE}.", mend="Name a result of extract or train, or a .safetensors file."
        )
    return path, read_manifest(head).digest() if (head / MANIFEST).is_file() else sha256_file(path)


def pieces_of(path: Path, native: HeadInfo, config: Config) -> dict[str, list[Piece]]:
    """Native key -> where its new bytes come from, every tensor checked against the checkpoint's own.

    Args:
        config: the verifier's text config.

    Raises:
        CheckpointError: a tensor too few or too many, of another shape, or of a type that cannot be converted.
    """
    entries = {entry.key: entry for entry in read_header(LocalFiles(path.parent), path.name, path.stat().st_size)}
    other: Layout = "fused" if native.layout == "split" else "split"
    shapes = native.family.shapes(config, native.layout)
    swapped = native.layout != "dense" and entries.keys() != shapes.keys()
    if swapped:
        found = native.family.shapes(config, other)
        swapped = entries.keys() == found.keys()
        shapes = found if swapped else shapes
    _require_fit(path, entries, shapes)
    if not swapped:
        return {key: [_piece(path, entries[key], native.tensors[key])] for key in native.tensors}
    taken = _split_from_fused if native.layout == "split" else _fused_from_split
    return {key: taken(path, entries, key, own) for key, own in native.tensors.items()}


def _require_fit(path: Path, entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]) -> None:
    different = sorted(entries.keys() ^ shapes.keys())
    if different:
        where = "lacks" if different[0] in shapes else "has besides"
        raise CheckpointError(f"{path} {where} {different[0]}; it is not a head of this checkpoint.")
    for key, entry in entries.items():
        if entry.shape != shapes[key]:
            raise CheckpointError(f"{path}: {key} is {list(entry.shape)}, the model has {list(shapes[key])}.")
        if entry.dtype not in FLOATS:
            raise CheckpointError(f"{path}: {key} is {entry.dtype}; a head in {', '.join(FLOATS)} is supported.")


def _piece(path: Path, entry: TensorEntry, own: TensorEntry, part: tuple[int, int] | None = None) -> Piece:
    """All of an entry, or bytes `part` of it, as `own` is stored."""
    begin, end = part or (0, entry.nbytes)
    cast = None if entry.dtype == own.dtype else _cast(entry.dtype, own.dtype, entry.key)
    return Piece(path, entry.begin + begin, entry.begin + end, cast=cast)


def _split_from_fused(path: Path, entries: Mapping[str, TensorEntry], key: str, own: TensorEntry) -> list[Piece]:
    """Expert i's gate is the first half of gate_up_proj[i], its up the second; down is down_proj[i]."""
    if key in entries:
        return [_piece(path, entries[key], own)]
    base, index, name = key.removesuffix(".weight").rsplit(".", 2)
    entry = entries[f"{base}.{_DOWN if name == _DOWN else _GATE_UP}"]
    each = entry.nbytes // entry.shape[0]
    begin = int(index) * each + (each // 2 if name == "up_proj" else 0)
    return [_piece(path, entry, own, (begin, begin + (each if name == _DOWN else each // 2)))]


def _fused_from_split(path: Path, entries: Mapping[str, TensorEntry], key: str, own: TensorEntry) -> list[Piece]:
    if key in entries:
        return [_piece(path, entries[key], own)]
    base, name = key.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if name == _GATE_UP else (_DOWN,)
    names = [f"{base}.{index}.{part}.weight" for index in range(own.shape[0]) for part in parts]
    return [_piece(path, entries[part], own) for part in names]


def _cast(stored: str, wanted: str, key: str) -> Callable[[bytes], bytes]:
    """Conversion of a block, rounding to nearest even as torch does. Raises CheckpointError for what does not fit."""
    import torch

    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

    def convert(block: bytes) -> bytes:
        values = torch.frombuffer(bytearray(block), dtype=types[stored])
        made = values.to(types[wanted])
        if not torch.isfinite(made).all():
            raise CheckpointError(f"{key} holds a value that {wanted}, the model's type, cannot hold.")
        return bytes(made.view(torch.uint8).numpy().data)

    return convert
