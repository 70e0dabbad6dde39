"""What differs between model families, as data: a family is one `Family` value, and adding one is adding one file.

Loads no torch. Classes are named by string and imported only where a head is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD_PREFIX = "mtp."


@dataclass(frozen=True)
class Family:
    """How a family stores and runs its MTP head.

    Attributes:
        model_types: `model_type` values of config.json (or of its text_config) that belong to it.
        layers_field: config field that declares how many MTP layers there are.
        config_class, layer_class, rotary_class, norm_class: dotted names in transformers.
        concat: order of the two halves of `mtp.fc`'s input.
        carried: what a step hands to the next as its hidden state.
    """

    name: str
    model_types: tuple[str, ...]
    layers_field: str
    layer_class: str
    rotary_class: str
    norm_class: str
    concat: tuple[str, str] = ("embedding", "hidden")
    carried: str = "post_norm"
    norm: str = "gain = 1 + w"

    def layers_declared(self, config: Mapping[str, Any]) -> int:
        """How many MTP layers a (text) config declares; 0 when it says nothing."""
        return int(config.get(self.layers_field) or 0)

    def expected_shapes(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Key -> shape of every tensor of the head except the experts, whose layout differs from file to file."""
        hidden, head_dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        layer = f"{HEAD_PREFIX}layers.0."
        shapes: dict[str, tuple[int, ...]] = {
            f"{HEAD_PREFIX}fc.weight": (hidden, 2 * hidden),
            f"{HEAD_PREFIX}pre_fc_norm_embedding.weight": (hidden,),
            f"{HEAD_PREFIX}pre_fc_norm_hidden.weight": (hidden,),
            f"{HEAD_PREFIX}norm.weight": (hidden,),
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            # Queries come with an output gate of the same width.
            f"{layer}self_attn.q_proj.weight": (2 * heads * head_dim, hidden),
            f"{layer}self_attn.k_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}self_attn.v_proj.weight": (kv_heads * head_dim, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{layer}self_attn.q_norm.weight": (head_dim,),
            f"{layer}self_attn.k_norm.weight": (head_dim,),
        }
        if experts_in(config):
            shared = config["shared_expert_intermediate_size"]
            shapes |= {
                f"{layer}mlp.gate.weight": (config["num_experts"], hidden),
                f"{layer}mlp.shared_expert.gate_proj.weight": (shared, hidden),
                f"{layer}mlp.shared_expert.up_proj.weight": (shared, hidden),
                f"{layer}mlp.shared_expert.down_proj.weight": (hidden, shared),
                f"{layer}mlp.shared_expert_gate.weight": (1, hidden),
            }
        else:
            inner = config["intermediate_size"]
            shapes |= {
                f"{layer}mlp.gate_proj.weight": (inner, hidden),
                f"{layer}mlp.up_proj.weight": (inner, hidden),
                f"{layer}mlp.down_proj.weight": (hidden, inner),
            }
        return shapes

    def expert_shapes(self, config: Mapping[str, Any], layout: str) -> dict[str, tuple[int, ...]]:
        """Key -> shape of the experts' tensors in a layout: `split` (one by one) or `fused` (stacked)."""
        if not experts_in(config):
            return {}
        hidden, inner, count = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
        prefix = f"{HEAD_PREFIX}layers.0.mlp.experts."
        if layout == "fused":
            return {f"{prefix}gate_up_proj": (count, 2 * inner, hidden), f"{prefix}down_proj": (count, hidden, inner)}
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(count):
            shapes[f"{prefix}{index}.gate_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}{index}.up_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}{index}.down_proj.weight"] = (hidden, inner)
        return shapes


def experts_in(config: Mapping[str, Any]) -> int:
    """Number of routed experts of the head's layer; 0 when it is dense."""
    return int(config.get("num_experts") or 0)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model: a multimodal wrapper nests it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
