"""Small heads with random weights, of every convention: of the trainable families, and of some that are not yet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fastmtp.families.base import Family
from fastmtp.families.glm4_moe import FAMILY as GLM
from fastmtp.families.mimo import FAMILY as MIMO
from fastmtp.head import MTPHead, build_head
from tests.fastmtp.fixtures import EXPERTS, SIZES, random_head

TRAINABLE = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
# [hidden, embedding] and a zeroed first embedding; a state carried from before the norm; both with plain gains.
OTHERS = ("mimo", "glm4-moe")


def head_of(name: str, **changes: Any) -> MTPHead:  # noqa: ANN401 - fields of a family
    """A head with random weights; `changes` are made to its family."""
    if name in TRAINABLE:
        head = random_head(name)
        head.family = replace(head.family, **changes)
        return head
    family, config = _mimo() if name == "mimo" else _glm()
    torch.manual_seed(0)
    head = build_head(replace(family, **changes), config)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def _mimo() -> tuple[Family, dict[str, Any]]:
    return _with_classes(MIMO, "qwen2.modeling_qwen2.Qwen2"), {**SIZES, "model_type": "qwen2"}


def _glm() -> tuple[Family, dict[str, Any]]:
    routed = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    config = {**SIZES, **EXPERTS, **routed, "use_qk_norm": True, "model_type": "glm4_moe"}
    return _with_classes(GLM, "glm4_moe.modeling_glm4_moe.Glm4Moe"), config


def _with_classes(family: Family, base: str) -> Family:
    names = {"layer_class": "DecoderLayer", "rotary_class": "RotaryEmbedding", "norm_class": "RMSNorm"}
    return replace(family, **{field: f"transformers.models.{base}{name}" for field, name in names.items()})
