"""The MTP head and its recursion, exactly as vLLM runs it.

The head is the family's own decoder layer from transformers, with its attention replaced. One step at origin t:

    y = norm(layer(fc([norm_e(emb(x_{t+k+1})); norm_h(previous)])))          predicts x_{t+k+2}

where `previous` is the verifier's state after its final norm at step 0, and afterwards what the step before carried:
y, or in some families what `norm` was given. The order of the two halves, what is carried and whether the embedding at
position 0 is zeroed are the family's (`fastmtp.families`).

`serving` recursion: the head has one KV cache. Positions up to t hold the keys and values of step 0; step k, which
runs at position t+k, sees those and its own chain's steps 1..k, nothing else. In a parallel pass that is: step-0 keys
under the causal mask, later steps' keys on the diagonal. Everything is computed at the given origins only; the places
before them give step 0's keys and values. `plain` recursion (FastMTP's training): every step attends causally to its
own step's keys, at unshifted positions, and is computed everywhere.

Rows are packed without padding, and no row sees another. Sources: vLLM 0.32, `v1/spec_decode/llm_base_proposer.py` and
`model_executor/models/qwen3_next_mtp.py`; FastMTP, arXiv 2509.18362.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fastmtp.attention import Attention, CausalRows, ServingCache
from fastmtp.data.rows import PackedRows
from fastmtp.errors import CheckpointError
from fastmtp.experts import grouped_experts
from fastmtp.families import family_of
from fastmtp.families.base import Family, Layout, text_config

_ATTENTION = "fastmtp_rows"
_EXPERTS = "fastmtp_grouped"
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class StepOutput:
    """What one step of the recursion says.

    Attributes:
        origins: [M] int64, ascending indices t into the packed rows.
        states: [M, H], y after the head's norm: what the output head reads.
    """

    origins: Tensor
    states: Tensor


class MTPHead(nn.Module):
    """One MTP layer with its input projection and norms. Embedding and output head are the verifier's and not in here.

    Parameters carry our names (`Family.ours`); only experts are held stacked (`from_native`).
    """

    def __init__(
        self,
        family: Family,
        config: PretrainedConfig,
        layer: nn.Module,
        rotary: nn.Module,
        norm: Callable[..., nn.Module],
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = norm(hidden, eps=eps)
        self.pre_fc_norm_hidden = norm(hidden, eps=eps)
        self.layers = nn.ModuleList([layer])
        self.norm = norm(hidden, eps=eps)
        self.rotary = rotary
        self.family, self.config = family, config

    def initialize(self, std: float) -> None:
        """Weights of a head made from nothing: normal matrices, norms with gain 1."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)
            else:
                nn.init.constant_(parameter, 0.0 if self.family.norm == "1 + w" else 1.0)

    def forward(
        self, rows: PackedRows, embedding: Tensor, num_steps: int, origins: Tensor, recursion: str = "serving"
    ) -> list[StepOutput]:
        """All steps of a recursion, `serving` or `plain`; wrappers such as DDP and FSDP expect this entry."""
        run = {"serving": self.serving, "plain": self.plain}[recursion]
        return list(run(rows, embedding, num_steps, origins))

    def project(self, previous: Tensor, embedded: Tensor, positions: Tensor) -> Tensor:
        """What the layer reads at M places: previous [M, H], embedded [M, H], positions [M] -> [M, H]."""
        if self.family.zero_first_embedding:
            embedded = embedded.masked_fill(positions[:, None] == 0, 0.0)
        halves = {"embedding": self.pre_fc_norm_embedding(embedded), "hidden": self.pre_fc_norm_hidden(previous)}
        projected: Tensor = self.fc(torch.cat([halves[half] for half in self.family.concat], dim=-1))
        return projected

    def step(
        self, previous: Tensor, embedded: Tensor, positions: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """One step at M places; arguments as `project`. Returns y [M, H], and what the next step gets as `previous`."""
        states = self.project(previous, embedded, positions)[None]
        rope = self.rotary(states, positions[None])
        states = self.layers[0](states, position_embeddings=rope, attention_mask=None, fastmtp_attention=attention)[0]
        y = self.norm(states)
        return y, y if self.family.carried == "after the norm" else states

    def _attend(self, previous: Tensor, embedded: Tensor, positions: Tensor, attention: Attention) -> None:
        """The part of a step that makes keys and values, for `attention` to keep."""
        states = self.project(previous, embedded, positions)[None]
        rope, layer = self.rotary(states, positions[None]), self.layers[0]
        states = layer.get_submodule("input_layernorm")(states)
        inner = layer.get_submodule("self_attn")
        inner(states, position_embeddings=rope, attention_mask=None, fastmtp_attention=attention)

    def serving(self, rows: PackedRows, embedding: Tensor, num_steps: int, origins: Tensor) -> Iterator[StepOutput]:
        """Run the recursion as vLLM does, at chosen origins.

        Args:
            embedding: [V, H], the verifier's token embedding.
            origins: [N] bool. Step k is given at those whose token x_{t+k+1} exists; a step without any is not given.
        """
        ids, remaining, positions = rows.input_ids, rows.remaining(), rows.positions()
        current = (origins & (remaining >= 1)).nonzero().squeeze(1)
        if not len(current):
            return
        cache = ServingCache(rows, current)
        if len(context := cache.context):
            embedded = F.embedding(ids[context + 1], embedding)
            self._attend(rows.hidden_states[context], embedded, positions[context], cache.remember)
        attention, carried = cache.begin, rows.hidden_states[current]
        for step in range(num_steps):
            keep = remaining[current] >= step + 1
            if not bool(keep.all()):
                cache.narrow(keep)
                current, carried = current[keep], carried[keep]
                if not len(current):
                    return
            embedded = F.embedding(ids[current + step + 1], embedding)
            states, carried = self.step(carried, embedded, positions[current] + step, attention)
            yield StepOutput(current, states)
            attention = cache.extend

    def plain(self, rows: PackedRows, embedding: Tensor, num_steps: int, origins: Tensor) -> Iterator[StepOutput]:
        """Run FastMTP's training recursion; arguments and results as `serving`, computed at every position."""
        ids, remaining, positions = rows.input_ids, rows.remaining(), rows.positions()
        carried = rows.hidden_states
        current = torch.arange(len(ids), device=ids.device)
        for step in range(num_steps):
            keep = remaining[current] >= step + 1
            current, carried = current[keep], carried[keep]
            if not len(current):
                return
            lengths = tuple(length - step - 1 for length in rows.lengths if length > step + 1)
            embedded = F.embedding(ids[current + step + 1], embedding)
            states, carried = self.step(carried, embedded, positions[current], CausalRows(lengths))
            chosen = origins[current]
            yield StepOutput(current[chosen], states[chosen])


def head_from_config(config: Mapping[str, Any]) -> MTPHead:
    """A head of the shape that a config.json describes, in fp32, with unset weights.

    Raises:
        CheckpointError: no family of ours, or one that is not trained yet.
    """
    family = family_of(config)
    if not family.trainable:
        raise CheckpointError(
            f"{family.title}: its head can be read, verified and stitched, but not trained yet.", pointer="/model"
        )
    return build_head(family, config)


def build_head(family: Family, config: Mapping[str, Any]) -> MTPHead:
    """A head by a family's classes and conventions; see `head_from_config`."""
    text = dict(text_config(config))
    # The head is one full-attention layer whatever the backbone's pattern; built from index 0 of the backbone's own
    # list it would be linear attention.
    text.update(num_hidden_layers=1, layer_types=["full_attention"], decoder_sparse_step=1, mlp_only_layers=[])
    text.pop("full_attention_interval", None)
    text.pop("dtype", None)
    model_type = text.pop("model_type")
    head_config = AutoConfig.for_model(model_type, **text)
    head_config._attn_implementation = _ATTENTION
    head_config._experts_implementation = _EXPERTS
    AttentionInterface.register(_ATTENTION, _dispatch)
    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, grouped_experts)
    return MTPHead(
        family,
        head_config,
        _load_class(family.layer_class)(head_config, 0),
        _load_class(family.rotary_class)(head_config),
        _load_class(family.norm_class),
    )


def _dispatch(
    module: nn.Module,  # noqa: ARG001 - transformers' attention interface
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    scaling: float,
    fastmtp_attention: Attention,
    **_: object,
) -> tuple[Tensor, None]:
    return fastmtp_attention(query, key, value, scaling), None


def _load_class(dotted: str) -> Callable[..., nn.Module]:
    module, name = dotted.rsplit(".", 1)
    loaded: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    return loaded


def load_native(head: MTPHead, native: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Fill a head with native tensors, all of them; raises as `from_native`."""
    head.load_state_dict(from_native(native, config), strict=True)


def from_native(native: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Native tensors (experts in either layout) -> the module's state dict, each exactly once.

    Copies of the embedding and output head that some families repeat inside the head are left out: they are shared.
    `to_native` is its inverse.

    Raises:
        CheckpointError: a tensor is missing, is not the head's, or has another shape; the message names it.
    """
    family, text = family_of(config), text_config(config)
    copies, experts = family.copy_shapes(text), family.experts(text)
    own = {key: value for key, value in native.items() if key not in copies}
    fused = any(key.endswith(_GATE_UP) for key in own)
    _require_whole(own, family.shapes(text, "dense" if experts is None else "fused" if fused else "split"))
    state = {family.ours(key, text): value for key, value in own.items()}
    if experts and not fused:
        prefix = "layers.0.mlp.experts."
        split = {
            name: [state.pop(f"{prefix}{index}.{name}.weight") for index in range(experts.count)]
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = zip(split["gate_proj"], split["up_proj"], strict=True)
        state[prefix + _GATE_UP] = torch.stack([torch.cat(pair) for pair in gate_up])
        state[prefix + _DOWN] = torch.stack(split["down_proj"])
    return state


def _require_whole(native: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for key in sorted(native.keys() ^ shapes.keys()):
        problem = "lacks" if key in shapes else "has no place for"
        raise CheckpointError(f"The head {problem} {key}.", pointer="/model")
    for key, shape in shapes.items():
        if tuple(native[key].shape) != shape:
            raise CheckpointError(
                f"{key} has shape {list(native[key].shape)}; config.json asks for {list(shape)}.", pointer="/model"
            )


def to_native(state: Mapping[str, Tensor], config: Mapping[str, Any], layout: Layout) -> dict[str, Tensor]:
    """The module's state dict -> native tensors, experts in a layout: `split` (one by one) or `fused`."""
    family, text = family_of(config), text_config(config)
    split: dict[str, Tensor] = {}
    for key, value in state.items():
        if layout == "split" and key.endswith(_GATE_UP):
            base = key.removesuffix(_GATE_UP)
            for index, pair in enumerate(value):
                split[f"{base}{index}.gate_proj.weight"], split[f"{base}{index}.up_proj.weight"] = pair.chunk(2)
        elif layout == "split" and key.endswith(f"experts.{_DOWN}"):
            base = key.removesuffix(_DOWN)
            split |= {f"{base}{index}.down_proj.weight": down for index, down in enumerate(value)}
        else:
            split[key] = value
    return {family.native(key, text): value.contiguous() for key, value in split.items()}
