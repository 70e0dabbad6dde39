"""Synthetic checkpoints are what they claim: safetensors reads them, and the head is found in each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fastmtp.checkpoint import INDEX, open_checkpoint
from fastmtp.families import families
from fastmtp.families.base import Layout, text_config
from fastmtp.native import find_head
from tests.fastmtp.fixtures import write_checkpoint
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import VARIANTS, WRAPPED, small_config


def test_every_family_has_a_variant() -> None:
    assert {family for family, _ in VARIANTS} == families().keys()


@pytest.mark.parametrize(
    ("family", "layout", "wrapped"),
    [(*one, False) for one in VARIANTS] + [(*one, True) for one in VARIANTS if one[0] in WRAPPED],
)
def test_safetensors_reads_it_and_the_head_is_found(family: str, layout: Layout, wrapped: bool, tmp_path: Path) -> None:
    config = small_config(family, wrapped=wrapped)
    root = write(tmp_path, family=family, layout=layout, config=config)
    found = {}
    for shard in sorted(root.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    checkpoint = open_checkpoint(root)
    head = find_head(checkpoint)
    assert found.keys() == checkpoint.tensors.keys() == checkpoint.index["weight_map"].keys()
    assert {key: entry.shape for key, entry in head.tensors.items()} == head.family.shapes(text_config(config), layout)
    assert head.layout == layout
    assert all(value.isfinite().all() for value in found.values())
    gains = torch.cat([found[key].float() for key in head.tensors if key.endswith("norm.weight")])
    assert (gains.abs() < 0.1).all() if head.family.norm == "1 + w" else (gains - 1 < 0.2).all() and gains.min() >= 1


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_names_and_shapes_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """The backbone against a model that transformers saved from the same sizes."""
    real = open_checkpoint(write_checkpoint(tmp_path / "real", family))
    made = open_checkpoint(write(tmp_path / "made", family=family, config=dict(real.config)))
    assert {key: entry.shape for key, entry in made.tensors.items()} == {
        key: entry.shape for key, entry in real.tensors.items()
    }


@pytest.mark.parametrize("place", ["own file", "last shard", "spread"])
def test_where_the_head_lies(place: str, tmp_path: Path) -> None:
    plan = Plan(shards=3, head=place, head_file="model-mtp.safetensors")
    checkpoint = open_checkpoint(write(tmp_path, family="qwen3.5-moe", plan=plan))
    files = {entry.file for entry in find_head(checkpoint).tensors.values()}
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert files == {"own file": {plan.head_file}, "last shard": {shards[2]}, "spread": set(shards)}[place]
    assert set(checkpoint.shards) == set(shards) | files


@pytest.mark.parametrize("index", ["whole", "without the head", "partial", "absent"])
def test_what_the_index_lists(index: str, tmp_path: Path) -> None:
    plan = Plan(shards=1 if index == "absent" else 2, index=index)
    root = write(tmp_path, family="mimo", plan=plan)
    tensors = open_checkpoint(root).tensors
    head = {key for key in tensors if "mtp_layers" in key}
    assert head
    if index == "absent":
        assert not (root / INDEX).exists() and (root / "model.safetensors").exists()
        return
    listed = json.loads((root / INDEX).read_text())["weight_map"].keys()
    assert len(listed) == {"whole": len(tensors), "partial": 2 * len(tensors) // 3}.get(index, len(tensors) - len(head))
    assert index != "without the head" or not listed & head


def test_copies_ties_and_dtypes(tmp_path: Path) -> None:
    plan = Plan(copies=True, dtypes={"*.eh_proj.weight": "F8_E4M3", "*norm.weight": "F32"})
    config = small_config("deepseek-v3", tied=True, num_hidden_layers=3)
    tensors = open_checkpoint(write(tmp_path, family="deepseek-v3", config=config, plan=plan)).tensors
    assert "lm_head.weight" not in tensors
    assert tensors["model.layers.3.embed_tokens.weight"].shape == tensors["model.embed_tokens.weight"].shape
    assert tensors["model.layers.3.shared_head.head.weight"].dtype == "BF16"
    assert tensors["model.layers.3.eh_proj.weight"].dtype == "F8_E4M3"
    assert tensors["model.layers.1.input_layernorm.weight"].dtype == "F32"
    assert "model.layers.0.mlp.gate_proj.weight" in tensors and "model.layers.1.mlp.gate.weight" in tensors


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    roots = [write(tmp_path / str(number), family="mimo", seed=number // 2) for number in range(4)]
    contents = [b"".join(path.read_bytes() for path in sorted(root.iterdir())) for root in roots]
    assert contents[0] == contents[1] != contents[2] == contents[3]


def test_sparse_takes_no_disk(tmp_path: Path) -> None:
    config = small_config("qwen3.5", vocab_size=1_000_000, hidden_size=512)
    root = write(tmp_path, family="qwen3.5", config=config, sparse=True)
    assert sum(open_checkpoint(root).shards.values()) > 2_000_000_000
    assert sum(path.stat().st_blocks * 512 for path in root.iterdir()) < 1_000_000
