"""What differs between model families, as data: a family is one `Family` value, and adding one is adding one file.

Loads no torch. Classes are named by string and imported only where a head is built. Conventions are those of vLLM
0.32's model classes (`vllm/model_executor/models/*_mtp.py`), since that is what serves the head.

Names used here: a *native* key is a tensor's name in the checkpoint; *our* name is the head module's (`fastmtp.head`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
Layout = Literal["dense", "split", "fused"]

_QWEN_NAMES = MappingProxyType(
    {
        "fc.weight": "fc.weight",
        "pre_fc_norm_embedding.weight": "pre_fc_norm_embedding.weight",
        "pre_fc_norm_hidden.weight": "pre_fc_norm_hidden.weight",
        "norm.weight": "norm.weight",
    }
)
_LAYER = "layers.0."
_EXPERTS = "mlp.experts."


@dataclass(frozen=True)
class Experts:
    """Routed experts of the head's layer: `count` of them, each a gated MLP `hidden` -> `inner` -> `hidden`."""

    count: int
    inner: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family stores and runs its MTP head.

    Attributes:
        model_types: `model_type` values of config.json (or of its text_config) that belong to it.
        layers_field: config field that declares how many MTP layers there are.
        layers_default: what vLLM takes where the field is absent.
        prefix: what the head's keys begin with; `{num_hidden_layers}` stands for the config's value.
        names: native name below `prefix` -> our name, for every tensor outside the decoder layer.
        layer: what the decoder layer's native names begin with, below `prefix`; ours begin with `layers.0.`.
        layer_shapes: config -> name below `layer` -> shape, for every tensor of the layer but the routed experts.
        experts: config -> the routed experts, or None for a dense layer.
        copies: native names of the embedding or output head that some checkpoints repeat inside the head -> which.
            They are shared with the verifier: never trained, and left as they are.
        concat: order of the two halves of the input projection's columns.
        carried: what a step hands to the next as its hidden state.
        norm: the gain of an RMSNorm with stored weight w.
        zero_first_embedding: vLLM zeroes the embedding at position 0.
        layer_class, rotary_class, norm_class: dotted names in transformers; empty for a family whose head is read,
            verified and stitched, but not trained yet.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    layers_field: str
    layer_shapes: Callable[[Config], Shapes]
    experts: Callable[[Config], Experts | None]
    layers_default: int = 1
    prefix: str = "mtp."
    names: Mapping[str, str] = field(default_factory=lambda: _QWEN_NAMES)
    layer: str = _LAYER
    copies: Mapping[str, Literal["embedding", "output"]] = field(default_factory=dict)
    concat: tuple[str, str] = ("embedding", "hidden")
    carried: Literal["after the norm", "before the norm"] = "after the norm"
    norm: Literal["1 + w", "w"] = "1 + w"
    zero_first_embedding: bool = False
    layer_class: str = ""
    rotary_class: str = ""
    norm_class: str = ""

    @property
    def trainable(self) -> bool:
        return bool(self.layer_class)

    def head_prefix(self, config: Config) -> str:
        """What native keys of the head begin with, under a text config. Raises KeyError for a field it lacks."""
        return self.prefix.format_map(config)

    def layers_declared(self, config: Config) -> int | None:
        """How many MTP layers a (text) config declares; None when it does not say."""
        value = config.get(self.layers_field)
        return None if value is None else int(value)

    def ours(self, native: str, config: Config) -> str:
        """Our name of a native key; `native` is its exact inverse. Raises KeyError for a key that is none of ours."""
        prefix = self.head_prefix(config)
        if not native.startswith(prefix):
            raise KeyError(native)
        name = native.removeprefix(prefix)
        if name in self.names:
            return self.names[name]
        if not name.startswith(self.layer) or name in self.copies:
            raise KeyError(native)
        return _LAYER + name.removeprefix(self.layer)

    def native(self, ours: str, config: Config) -> str:
        """Native key of one of our names. Raises KeyError for a name that is none of ours."""
        prefix = self.head_prefix(config)
        for name, own in self.names.items():
            if own == ours:
                return prefix + name
        if not ours.startswith(_LAYER):
            raise KeyError(ours)
        return prefix + self.layer + ours.removeprefix(_LAYER)

    def shapes(self, config: Config, layout: Layout) -> Shapes:
        """Native key -> shape of every tensor of the head, experts in `layout`. Raises KeyError as `head_prefix`."""
        hidden = config["hidden_size"]
        ours: Shapes = {
            "fc.weight": (hidden, 2 * hidden),
            "pre_fc_norm_embedding.weight": (hidden,),
            "pre_fc_norm_hidden.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        layer = self.layer_shapes(config) | self._expert_shapes(config, layout)
        ours |= {_LAYER + name: shape for name, shape in layer.items()}
        return {self.native(name, config): shape for name, shape in ours.items()}

    def copy_shapes(self, config: Config) -> Shapes:
        """Native key -> shape of the shared tensors that the head may repeat."""
        prefix = self.head_prefix(config)
        return {prefix + name: (config["vocab_size"], config["hidden_size"]) for name in self.copies}

    def _expert_shapes(self, config: Config, layout: Layout) -> Shapes:
        experts = self.experts(config)
        if experts is None:
            return {}
        if layout == "fused":
            return {
                f"{_EXPERTS}gate_up_proj": (experts.count, 2 * experts.inner, experts.hidden),
                f"{_EXPERTS}down_proj": (experts.count, experts.hidden, experts.inner),
            }
        one = mlp(experts.hidden, experts.inner, "")
        return {f"{_EXPERTS}{index}.{name}": shape for index in range(experts.count) for name, shape in one.items()}


def text_config(config: Config) -> Config:
    """The part of config.json that describes the language model: a multimodal wrapper nests it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def layer_norms(config: Config) -> Shapes:
    """The two norms of a decoder layer."""
    hidden = config["hidden_size"]
    return {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def mlp(hidden: int, inner: int, prefix: str = "mlp.") -> Shapes:
    """A gated MLP."""
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def grouped_attention(config: Config, *, gated: bool = False, bias: bool = False, norms: bool = False) -> Shapes:
    """Grouped-query attention; `gated` queries come with an output gate of the same width."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, config["num_key_value_heads"] * size
    shapes: Shapes = {
        "self_attn.q_proj.weight": (queries * (2 if gated else 1), hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if bias:
        shapes |= {f"self_attn.{name}_proj.bias": shapes[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
    if norms:
        shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    return shapes


def qwen_layer(config: Config) -> Shapes:
    """Full-attention layer of Qwen3-Next and Qwen3.5: gated attention with norms; one shared expert, or dense."""
    hidden = config["hidden_size"]
    shapes = layer_norms(config) | grouped_attention(config, gated=True, norms=True)
    if not config.get("num_experts"):
        return shapes | mlp(hidden, config["intermediate_size"])
    return shapes | {
        "mlp.gate.weight": (config["num_experts"], hidden),
        **mlp(hidden, config["shared_expert_intermediate_size"], "mlp.shared_expert."),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


def qwen_experts(config: Config) -> Experts | None:
    """Routed experts of a Qwen layer."""
    if not config.get("num_experts"):
        return None
    return Experts(int(config["num_experts"]), config["moe_intermediate_size"], config["hidden_size"])


def routed_mlp(config: Config) -> Shapes:
    """Router, its correction bias and the shared experts of DeepSeek-V3 and GLM-4.5."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    count = config["n_routed_experts"]
    return {
        "mlp.gate.weight": (count, hidden),
        "mlp.gate.e_score_correction_bias": (count,),
        **mlp(hidden, inner * config["n_shared_experts"], "mlp.shared_experts."),
    }


def routed_experts(config: Config) -> Experts:
    """Routed experts of DeepSeek-V3 and GLM-4.5."""
    return Experts(int(config["n_routed_experts"]), config["moe_intermediate_size"], config["hidden_size"])


# DeepSeek-V3 and GLM keep the head as one more decoder layer, behind the backbone's last, with no "mtp" in its name.
NEXTN_PREFIX = "model.layers.{num_hidden_layers}."
NEXTN_NAMES = MappingProxyType(
    {
        "eh_proj.weight": "fc.weight",
        "enorm.weight": "pre_fc_norm_embedding.weight",
        "hnorm.weight": "pre_fc_norm_hidden.weight",
        "shared_head.norm.weight": "norm.weight",
    }
)
NEXTN_COPIES: Mapping[str, Literal["embedding", "output"]] = MappingProxyType(
    {"embed_tokens.weight": "embedding", "shared_head.head.weight": "output"}
)
