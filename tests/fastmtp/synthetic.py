"""Checkpoints with random bytes, of every family and layout, written without torch or transformers in milliseconds.

For tests of what happens to bytes, and for benchmarks. Names, shapes and side files are those of real checkpoints; the
sizes are tiny unless a config says otherwise. Values are finite and of a plausible size, norms follow their family's
convention, but no model computes anything sensible with them: `fixtures.write_checkpoint` makes those that do.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

from fastmtp.checkpoint import CONFIG, INDEX
from fastmtp.families import families
from fastmtp.families.base import Family, Layout, Shapes, text_config
from tests.fastmtp.synthetic_models import backbone_shapes, small_config

_WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
_BLOCK = 1 << 20
# What sign and exponent become, so that every float is finite: the top byte of a small number, either sign.
_SMALL = {"F64": 0x3F, "F32": 0x3C, "BF16": 0x3C, "F16": 0x24, "F8_E4M3": 0x20, "F8_E5M2": 0x24}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a checkpoint is laid out in files.

    Attributes:
        shards: how many files the backbone fills, as evenly as whole tensors allow; one is `model.safetensors`.
        head: where the head lies: in `head_file`, in the last shard, or tensor by tensor over all shards.
        index: what the index lists; "partial" leaves out every third key, of files that it lists otherwise.
        copies: the head repeats embedding and output head, where its family may.
        dtype, dtypes: of every tensor, and of those whose key a pattern matches (`fnmatch`, the first that does).
    """

    shards: int = 2
    head: Literal["own file", "last shard", "spread"] = "last shard"
    head_file: str = "mtp.safetensors"
    index: Literal["whole", "without the head", "partial", "absent"] = "whole"
    copies: bool = False
    dtype: str = "BF16"
    dtypes: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({"*.A_log": "F32", "*.e_score_correction_bias": "F32"})
    )

    def dtype_of(self, key: str) -> str:
        """The dtype a tensor is stored in."""
        return next((dtype for pattern, dtype in self.dtypes.items() if fnmatchcase(key, pattern)), self.dtype)


@dataclass(frozen=True)
class _Tensor:
    key: str
    dtype: str
    shape: tuple[int, ...]
    unit_norm: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _WIDTHS[self.dtype]


def write(
    directory: Path,
    *,
    family: str,
    layout: Layout = "split",
    config: dict[str, Any] | None = None,
    plan: Plan | None = None,
    seed: int = 0,
    sparse: bool = False,
) -> Path:
    """Write a checkpoint into `directory`, which may exist.

    Args:
        layout: of all experts, the backbone's and the head's; no matter for a family without.
        config: config.json, as `small_config` gives it; it decides on sizes, tied embeddings and a multimodal wrapper.
        sparse: write headers only; tensors read as zeros and take no disk.
    """
    config, plan, kind = config or small_config(family), plan or Plan(), families()[family]
    text = dict(text_config(config))
    backbone = backbone_shapes(kind, config, layout)
    head = kind.shapes(text, layout) | (kind.copy_shapes(text) if plan.copies else {})
    directory.mkdir(parents=True, exist_ok=True)
    files = _place(plan, _tensors(kind, plan, backbone), _tensors(kind, plan, head))
    for name, tensors in files.items():
        with (directory / name).open("wb") as file:
            _write_shard(file, tensors, seed, sparse=sparse)
    _write_json(directory / CONFIG, config)
    if plan.index != "absent":
        _write_json(directory / INDEX, _index(plan, files, head))
    for name, content in _side_files().items():
        (directory / name).write_text(content, encoding="utf-8")
    return directory


def _tensors(family: Family, plan: Plan, shapes: Shapes) -> list[_Tensor]:
    return [
        _Tensor(key, plan.dtype_of(key), shape, unit_norm=family.norm == "w" and key.endswith("norm.weight"))
        for key, shape in shapes.items()
    ]


def _place(plan: Plan, backbone: list[_Tensor], head: list[_Tensor]) -> dict[str, list[_Tensor]]:
    """File name -> its tensors."""
    shards: list[list[_Tensor]] = [[] for _ in range(plan.shards)]
    total = sum(tensor.nbytes for tensor in backbone)
    bounds = [total * number / plan.shards for number in range(1, plan.shards)]
    for tensor, end in zip(backbone, accumulate(tensor.nbytes for tensor in backbone), strict=True):
        shards[bisect_right(bounds, end - tensor.nbytes / 2)].append(tensor)
    for number, tensor in enumerate(head if plan.head != "own file" else []):
        shards[number % plan.shards if plan.head == "spread" else -1].append(tensor)
    files = {f"model-{number:05}-of-{plan.shards:05}.safetensors": part for number, part in enumerate(shards, 1)}
    if plan.shards == 1:
        files = {"model.safetensors": shards[0]}
    return files | ({plan.head_file: head} if plan.head == "own file" else {})


def _index(plan: Plan, files: Mapping[str, list[_Tensor]], head: Shapes) -> dict[str, Any]:
    placed = sorted((tensor.key, name) for name, tensors in files.items() for tensor in tensors)
    if plan.index == "without the head":
        placed = [(key, name) for key, name in placed if key not in head]
    if plan.index == "partial":
        placed = [item for number, item in enumerate(placed) if number % 3]
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(placed)}


def _write_shard(file: BinaryIO, tensors: list[_Tensor], seed: int, *, sparse: bool) -> None:
    """A safetensors file, tensors in the order that its own writer takes: widest dtype first, then by name."""
    tensors = sorted(tensors, key=lambda tensor: (-_WIDTHS[tensor.dtype], tensor.key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    if sparse:
        file.truncate(file.tell() + end)
        return
    for tensor in tensors:
        file.writelines(_content(tensor, seed))


def _content(tensor: _Tensor, seed: int) -> Iterator[bytes]:
    """A tensor's bytes; one of more than a megabyte repeats its first."""
    size, width = tensor.nbytes, _WIDTHS[tensor.dtype]
    block = bytearray(hashlib.shake_128(f"{seed} {tensor.key}".encode()).digest(min(size, _BLOCK)))
    if tensor.dtype in _SMALL:
        top = 0x3F if tensor.unit_norm else _SMALL[tensor.dtype]
        block[width - 1 :: width] = block[width - 1 :: width].translate(_masked(top, sign=not tensor.unit_norm))
        if tensor.unit_norm and width > 1:  # 1.0 to 1.12 as BF16 and F32
            block[width - 2 :: width] = block[width - 2 :: width].translate(_masked(0x80, low=0x0F))
    for begin in range(0, size, _BLOCK):
        yield bytes(block) if size - begin >= len(block) else bytes(block[: size - begin])


def _masked(value: int, *, sign: bool = False, low: int = 0) -> bytes:
    """Translation table: `value`, with the sign bit or the `low` bits of the byte that was there."""
    return bytes(value | (byte & ((0x80 if sign else 0) | low)) for byte in range(256))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _side_files() -> dict[str, str]:
    return {
        "tokenizer.json": json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}),
        "generation_config.json": json.dumps({"do_sample": False, "eos_token_id": 1}),
        "chat_template.jinja": "{% for message in messages %}{{ message.content }}{% endfor %}\n",
        "merges.txt": "#version: 0.2\n",
    }
