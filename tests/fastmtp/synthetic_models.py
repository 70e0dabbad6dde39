"""Sizes, names and shapes of the models that `synthetic` writes: a tiny config of each family, and its backbone.

Names and shapes are those of transformers' modules, of DeepSeek's, GLM's and MiMo's checkpoints where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastmtp.families import families
from fastmtp.families.base import Family, Layout, Shapes, mlp, text_config

WRAPPED = ("qwen3.5", "qwen3.5-moe")  # families that also come as the text part of a multimodal checkpoint
VARIANTS: tuple[tuple[str, Layout], ...] = (
    ("qwen3-next", "split"), ("qwen3-next", "fused"), ("qwen3.5", "dense"), ("qwen3.5-moe", "split"),
    ("qwen3.5-moe", "fused"), ("deepseek-v3", "split"), ("glm4-moe", "split"), ("mimo", "dense"),
)  # fmt: skip

_COMMON: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "initializer_range": 0.02, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_QWEN_MOE: dict[str, Any] = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4, "shared_expert_intermediate_size": 4,
}  # fmt: skip
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 4,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4, "kv_lora_rank": 4, "q_lora_rank": 6,
}  # fmt: skip
_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3-next": {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"} | _QWEN | _QWEN_MOE,
    "qwen3.5": {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"} | _QWEN,
    "qwen3.5-moe": {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"} | _QWEN | _QWEN_MOE,
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"} | _ROUTED | _LATENT,
    "glm4-moe": {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    | _ROUTED
    | {"attention_bias": True, "use_qk_norm": True},
    "mimo": {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True},
}


def small_config(family: str, *, wrapped: bool = False, tied: bool = False, **changes: object) -> dict[str, Any]:
    """config.json of a tiny model of a family with one MTP layer declared; `changes` go to the text model's fields."""
    text = _COMMON | _FIELDS[family] | {families()[family].layers_field: 1, "tie_word_embeddings": tied} | changes
    if not wrapped:
        return text
    inner = str(text["model_type"])
    return {
        "architectures": [str(text.pop("architectures")[0]).replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": inner.removesuffix("_text"),
        "tie_word_embeddings": tied,
        "text_config": text,
        "vision_config": {
            "model_type": inner.removesuffix("_text"), "depth": 1, "hidden_size": 8, "intermediate_size": 8,
            "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "num_position_embeddings": 4, "out_hidden_size": text["hidden_size"],
        },
    }  # fmt: skip


def large_config(*, layers: int, num_experts: int, vocab_size: int) -> dict[str, Any]:
    """config.json with the tensor sizes of Qwen3-Next-80B-A3B, which has 48 layers, 512 experts, 151936 tokens."""
    kinds = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(layers)]
    return small_config(
        "qwen3-next", hidden_size=2048, num_hidden_layers=layers, layer_types=kinds, num_attention_heads=16,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, num_experts=num_experts, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, vocab_size=vocab_size,
    )  # fmt: skip


def backbone_shapes(family: Family, config: Mapping[str, Any], layout: Layout) -> Shapes:
    """Key -> shape of everything but the head."""
    text = text_config(config)
    root = "model." if text is config else "model.language_model."
    vocabulary = (text["vocab_size"], text["hidden_size"])
    shapes: Shapes = {f"{root}embed_tokens.weight": vocabulary, f"{root}norm.weight": vocabulary[1:]}
    ours = {family.ours(key, text): shape for key, shape in family.shapes(text, layout).items()}
    whole = {name.removeprefix("layers.0."): shape for name, shape in ours.items() if name.startswith("layers.0.")}
    for number in range(text["num_hidden_layers"]):
        layer = _layer(family, text, number, whole)
        shapes |= {f"{root}layers.{number}.{name}": shape for name, shape in layer.items()}
    if text is not config:
        shapes |= {f"model.visual.{name}": shape for name, shape in _vision(config["vision_config"]).items()}
    if not text["tie_word_embeddings"]:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def _layer(family: Family, text: Mapping[str, Any], number: int, whole: Shapes) -> Shapes:
    """A backbone layer: like the head's, but for linear attention and the dense layers some models begin with."""
    layer = dict(whole)
    if "layer_types" in text and text["layer_types"][number] == "linear_attention":
        layer = {name: shape for name, shape in layer.items() if not name.startswith("self_attn.")}
        layer |= _linear_attention(text, merged=family.name == "qwen3-next")
    if number < text.get("first_k_dense_replace", 0):
        layer = {name: shape for name, shape in layer.items() if not name.startswith("mlp.")}
        layer |= mlp(text["hidden_size"], text["intermediate_size"])
    return layer


def _linear_attention(text: Mapping[str, Any], *, merged: bool) -> Shapes:
    """Gated delta net: Qwen3-Next merges the input projections that Qwen3.5 keeps apart."""
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    if merged:
        projections: Shapes = {"in_proj_qkvz.weight": (2 * (keys + values), hidden)}
        projections["in_proj_ba.weight"] = (2 * heads, hidden)
    else:
        rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
        projections = {f"in_proj_{name}.weight": (count, hidden) for name, count in rows.items()}
    projections |= {
        "conv1d.weight": (2 * keys + values, 1, text["linear_conv_kernel_dim"]),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "norm.weight": (text["linear_value_head_dim"],),
        "out_proj.weight": (hidden, values),
    }
    return {f"linear_attn.{name}": shape for name, shape in projections.items()}


def _vision(config: Mapping[str, Any]) -> Shapes:
    """Vision tower of Qwen3.5: patches, blocks, and the merger whose output joins the text."""
    hidden, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    merged = hidden * config["spatial_merge_size"] ** 2
    linears = {"merger.linear_fc1": (merged, merged), "merger.linear_fc2": (config["out_hidden_size"], merged)}
    norms = ["merger.norm"]
    for number in range(config["depth"]):
        block = f"blocks.{number}."
        linears |= {f"{block}attn.qkv": (3 * hidden, hidden), f"{block}attn.proj": (hidden, hidden)}
        linears |= {f"{block}mlp.linear_fc1": (inner, hidden), f"{block}mlp.linear_fc2": (hidden, inner)}
        norms += [f"{block}norm1", f"{block}norm2"]
    shapes: Shapes = {
        "patch_embed.proj.weight": (hidden, config["in_channels"], config["temporal_patch_size"], patch, patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (config["num_position_embeddings"], hidden),
    }
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    return shapes | {f"{name}.{part}": (hidden,) for name in norms for part in ("weight", "bias")}
