"""Each way in which a checkpoint can be wrong, made of a good one, and what must be said of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastmtp.checkpoint import CONFIG, INDEX
from fastmtp.families.base import Layout
from tests.fastmtp.synthetic import Plan, write

FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FC = "mtp.fc.weight"
Header = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        code, level: of the fault that must be found.
        spoil: makes it of the checkpoint in a directory.
        named: what the text must name besides the directory: file, key, value.
        family, layout, plan: of the good checkpoint.
    """

    code: str
    level: str
    spoil: Callable[[Path], object]
    named: tuple[str, ...]
    family: str = "qwen3-next"
    layout: Layout = "split"
    plan: Plan | None = None

    def make(self, directory: Path) -> Path:
        """The spoilt checkpoint."""
        root = write(directory, family=self.family, layout=self.layout, plan=self.plan)
        self.spoil(root)
        return root


def config(**changes: object) -> Callable[[Path], object]:
    """Set fields of config.json; None takes one out."""

    def spoil(root: Path) -> None:
        found = json.loads((root / CONFIG).read_text()) | changes
        kept = {name: value for name, value in found.items() if value is not None}
        (root / CONFIG).write_text(json.dumps(kept))

    return spoil


def index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the index."""

    def spoil(root: Path) -> None:
        found = json.loads((root / INDEX).read_text())
        change(found)
        (root / INDEX).write_text(json.dumps(found))

    return spoil


def text(name: str, content: str) -> Callable[[Path], object]:
    """Write a file."""
    return lambda root: (root / name).write_text(content)


def both(*spoils: Callable[[Path], object]) -> Callable[[Path], object]:
    """One after the other."""
    return lambda root: [spoil(root) for spoil in spoils]


def shard(name: str, change: Callable[[dict[str, tuple[Header, bytes]]], object]) -> Callable[[Path], object]:
    """Write a shard anew, its tensors (key -> header entry, bytes) changed; the index follows."""

    def spoil(root: Path) -> None:
        raw = (root / name).read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        tensors = {key: (one, raw[8 + length :][slice(*one["data_offsets"])]) for key, one in header.items()}
        before = set(tensors)
        change(tensors)
        write_shard(root / name, tensors)
        if (root / INDEX).exists():
            found = json.loads((root / INDEX).read_text())
            kept = {key: file for key, file in found["weight_map"].items() if key not in before}
            found["weight_map"] = kept | dict.fromkeys(tensors, name)
            found["metadata"] = {}
            (root / INDEX).write_text(json.dumps(found))

    return spoil


def write_shard(path: Path, tensors: dict[str, tuple[Header, bytes]]) -> None:
    """A safetensors file of these tensors, in this order."""
    header: Header = {"__metadata__": {"format": "pt"}}
    data = b""
    for key, (entry, content) in tensors.items():
        header[key] = {**entry, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def drop(match: str, name: str = LAST) -> Callable[[Path], object]:
    """Take tensors out of a shard and the index, as tools that save a model anew do."""

    def change(tensors: dict[str, tuple[Header, bytes]]) -> None:
        for key in [key for key in tensors if match in key]:
            del tensors[key]

    return shard(name, change)


def rename(old: str, new: str, name: str = LAST) -> Callable[[Path], object]:
    """Rename tensors by a part of their name."""

    def change(tensors: dict[str, tuple[Header, bytes]]) -> None:
        for key in [key for key in tensors if old in key]:
            tensors[key.replace(old, new)] = tensors.pop(key)

    return shard(name, change)


def store(key: str, dtype: str, shape: list[int], width: int, name: str = LAST) -> Callable[[Path], object]:
    """Store a tensor as another type or shape."""
    count = 1
    for length in shape:
        count *= length
    return shard(name, lambda tensors: tensors.update({key: ({"dtype": dtype, "shape": shape}, bytes(count * width))}))


def _unlink(name: str) -> Callable[[Path], object]:
    return lambda root: (root / name).unlink()


def _cut(root: Path) -> None:
    raw = (root / LAST).read_bytes()
    (root / LAST).write_bytes(raw[:-5])


def _stale(root: Path) -> None:
    (root / "stale.safetensors").write_bytes((root / LAST).read_bytes())


def _move(found: dict[str, Any]) -> None:
    found["weight_map"][FC] = FIRST


def _outside(found: dict[str, Any]) -> None:
    found["weight_map"][FC] = "../evil.safetensors"


def _invent(found: dict[str, Any]) -> None:
    found["weight_map"]["mtp.invented.weight"] = LAST


def _forget(found: dict[str, Any]) -> None:
    del found["weight_map"][FC]


def _link(root: Path) -> None:
    (root / "merges.txt").unlink()
    (root / "merges.txt").symlink_to(root / "nowhere")


FP8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
CASES = [
    Case("config_missing", "error", _unlink(CONFIG), (CONFIG,)),
    Case("json_broken", "error", text(CONFIG, "{half"), (CONFIG,)),
    Case("json_broken", "error", text(INDEX, "[]"), (INDEX,)),
    Case("file_unreadable", "error", _link, ("merges.txt",)),
    Case("file_broken", "error", _cut, (LAST,)),
    Case("file_broken", "error", text(LAST, "no safetensors"), (LAST,)),
    Case("file_missing", "error", _unlink(FIRST), (FIRST, "index")),
    Case("file_outside", "error", index(_outside), ("../evil.safetensors", "outside")),
    Case("file_unlisted", "warning", lambda root: write_shard(root / "a.safetensors", {}), ("a.safetensors",)),
    Case("index_broken", "error", text(INDEX, '{"weight_map": {"x": ["y"]}}'), (INDEX,)),
    Case("index_missing", "serving", _unlink(INDEX), (INDEX, FIRST)),
    Case("no_safetensors", "error", both(_unlink(FIRST), _unlink(LAST), _unlink(INDEX)), ("safetensors",)),
    Case("key_twice", "error", _stale, ("lm_head.weight", LAST, "stale.safetensors")),
    Case("key_lost", "error", index(_invent), ("mtp.invented.weight", LAST)),
    Case("key_misplaced", "error", index(_move), (FC, FIRST, LAST)),
    Case("total_size_stale", "warning", index(lambda one: one["metadata"].update(total_size=7)), (INDEX, "7 bytes")),
    Case("family_unknown", "error", config(model_type="gpt2"), ("gpt2", "Known are")),
    Case("config_incomplete", "error", config(hidden_size=None), (CONFIG, "hidden_size")),
    Case("config_incomplete", "error", config(num_key_value_heads=None), (CONFIG, "num_key_value_heads")),
    Case("config_wrong", "error", config(num_hidden_layers="two"), (CONFIG, "num_hidden_layers", "two")),
    Case("config_wrong", "error", config(num_attention_heads=0, head_dim=0), (CONFIG, "Qwen3-Next")),
    Case("head_lost", "error", drop("mtp."), ("mtp.", "num_nextn_predict_layers: 1")),
    Case(
        "head_none", "error", both(drop("mtp_layers"), config(num_nextn_predict_layers=None)),
        ("has no MTP head", "model.mtp_layers.0.", "has no num_nextn_predict_layers"), family="mimo",
    ),
    Case("head_undeclared", "error", config(num_nextn_predict_layers=0), ("num_nextn_predict_layers: 0", CONFIG)),
    Case("head_several", "error", config(num_nextn_predict_layers=2), ("num_nextn_predict_layers: 2",)),
    Case("head_default", "warning", config(num_nextn_predict_layers=None), (CONFIG, "num_nextn_predict_layers")),
    Case("head_incomplete", "error", drop("mtp.layers.0.mlp.experts.0."), ("mtp.layers.0.mlp.experts.0.down_proj",)),
    Case("head_unexpected", "error", rename("mtp.norm", "mtp.more"), ("mtp.more.weight", LAST)),
    Case("head_quantised", "error", store(FC, "F8_E4M3", [8, 16], 1), (FC, "F8_E4M3", LAST)),
    Case("head_shape", "error", store(FC, "BF16", [8, 15], 2), (FC, "[8, 15]", "[8, 16]", LAST)),
    Case("head_mixed", "warning", store(FC, "F32", [8, 16], 4), ("BF16, F32",)),
    Case("head_nested", "serving", rename("mtp.", "model.language_model.mtp."), ("model.language_model.mtp.",)),
    Case("head_unlisted", "serving", lambda root: root, ("mtp.safetensors", "--mend"),
         plan=Plan(head="own file", index="without the head")),
    Case("head_unlisted", "warning", index(_forget), (LAST, "omits mtp.fc.weight")),
    Case("head_not_exempt", "warning", config(quantization_config=FP8), ("fp8", "mtp")),
    Case("shared_missing", "error", drop("lm_head"), ("lm_head.weight", "tie_word_embeddings")),
    Case("shared_twice", "error", store("second.lm_head.weight", "BF16", [16, 8], 2), ("second.lm_head", "2 tensors")),
    Case("shared_quantised", "error", store("lm_head.weight", "I8", [16, 8], 1), ("lm_head.weight", "I8", LAST)),
    Case("shared_shape", "error", config(vocab_size=17), ("embed_tokens.weight", "[16, 8]", "[17, 8]", FIRST)),
    Case("layer_missing", "error", config(num_hidden_layers=3), ("model.layers.2.",)),
    Case("layer_incomplete", "error", drop("model.layers.1.mlp.up_proj"), ("model.layers.1", "mlp.up_proj"), "mimo"),
    Case("layer_shape", "error", store("model.layers.1.mlp.up_proj.weight", "BF16", [9, 8], 2),
         ("model.layers.1.mlp.up_proj.weight", "[9, 8]", LAST), "mimo"),
    Case("norm_missing", "error", drop("model.norm.weight", FIRST), ("model.norm.weight",)),
]  # fmt: skip
