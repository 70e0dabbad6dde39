"""The MTP head and its recursion, exactly as vLLM runs it.

The head is the family's own decoder layer from transformers, with its attention replaced. One step at origin t:

    y = norm(layer(fc([norm_e(emb(x_{t+k+1})); norm_h(previous)])))          predicts x_{t+k+2}

where `previous` is the verifier's state after its final norm at step 0, and the step before's y afterwards.

`serving` recursion: the head has one KV cache. Positions up to t hold the keys and values of step 0; step k, which
runs at position t+k, sees those and its own chain's steps 1..k, nothing else. In a parallel pass that is: step-0 keys
under the causal mask, later steps' keys on the diagonal. Later steps are computed at the given origins only. `plain`
recursion (FastMTP's training): every step attends causally to its own step's keys, at unshifted positions.

Rows are packed without padding; attention runs row by row, so no row sees another. Sources: vLLM 0.32,
`v1/spec_decode/llm_base_proposer.py` and `model_executor/models/qwen3_next_mtp.py`; FastMTP, arXiv 2509.18362.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PretrainedConfig

from fastmtp.data.rows import PackedRows
from fastmtp.errors import CheckpointError
from fastmtp.families import family_of
from fastmtp.families.base import Layout, text_config

_ATTENTION = "fastmtp_rows"


class _Attention(Protocol):
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor: ...


@dataclass(frozen=True)
class StepOutput:
    """What one step of the recursion says.

    Attributes:
        origins: [M] int64, ascending indices t into the packed rows.
        states: [M, H], y after the head's norm: what the output head reads.
    """

    origins: Tensor
    states: Tensor


class CausalRows:
    """Causal attention inside each row. Keeps keys and values for later steps of the serving recursion."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.keys: tuple[Tensor, ...] = ()
        self.values: tuple[Tensor, ...] = ()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1, heads, N, D], key and value [1, kv_heads, N, D] -> [1, N, heads, D]."""
        queries = query.split(self.lengths, dim=2)
        self.keys, self.values = key.split(self.lengths, dim=2), value.split(self.lengths, dim=2)
        parts = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            for q, k, v in zip(queries, self.keys, self.values, strict=True)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)


class ChainAttention:
    """Attention of steps k >= 1 at chosen origins: step 0's keys up to each origin, and its own chain's.

    Args:
        base: step 0's attention, with the keys it kept.
        rows: [M] int64, row of each origin, ascending.
        places: [M] int64, position of each origin in its row.
    """

    def __init__(self, base: CausalRows, rows: Tensor, places: Tensor) -> None:
        self._base = base
        self._rows = rows
        self._places = places
        self._chain: list[tuple[Tensor, Tensor]] = []

    def narrow(self, keep: Tensor) -> None:
        """Drop origins (keep: [M] bool): those whose next token lies outside their row."""
        self._rows, self._places = self._rows[keep], self._places[keep]
        self._chain = [(key[:, keep], value[:, keep]) for key, value in self._chain]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1, heads, M, D], key and value [1, kv_heads, M, D] -> [1, M, heads, D]."""
        kv_heads, count = key.shape[1], query.shape[2]
        grouped = query[0].unflatten(0, (kv_heads, -1)) * scaling
        self._chain.append((key[0], value[0]))
        chain_keys = torch.stack([k for k, _ in self._chain], dim=2)
        chain_values = torch.stack([v for _, v in self._chain], dim=2)
        diagonal = torch.einsum("hgmd,hmsd->hgms", grouped, chain_keys)
        sizes = torch.bincount(self._rows, minlength=len(self._base.lengths)).tolist()
        outputs, start = [], 0
        for index, size in enumerate(sizes):
            if size:
                part = slice(start, start + size)
                outputs.append(
                    self._one_row(index, part, grouped[:, :, part], diagonal[:, :, part], chain_values[:, part])
                )
                start += size
        assert start == count
        return torch.cat(outputs, dim=2).flatten(0, 1).transpose(0, 1)[None]

    def _one_row(self, row: int, part: slice, query: Tensor, diagonal: Tensor, chain_values: Tensor) -> Tensor:
        """query [kv, group, S, D] against the row's step-0 keys [kv, T, D] and the chain -> [kv, group, S, D]."""
        keys, values = self._base.keys[row][0], self._base.values[row][0]
        length = keys.shape[1]
        later = torch.arange(length, device=keys.device) > self._places[part, None]
        scores = torch.einsum("hgmd,htd->hgmt", query, keys).masked_fill(later, float("-inf"))
        weights = torch.cat([scores, diagonal], dim=-1).float().softmax(-1).to(values.dtype)
        seen, own = weights[..., :length], weights[..., length:]
        return torch.einsum("hgmt,htd->hgmd", seen, values) + torch.einsum("hgms,hmsd->hgmd", own, chain_values)


class MTPHead(nn.Module):
    """One MTP layer with its input projection and norms. Embedding and output head are the verifier's and not in here.

    Parameters carry the checkpoint's names without the `mtp.` prefix; only experts are held stacked (`from_native`).
    """

    def __init__(self, config: PretrainedConfig, layer: nn.Module, rotary: nn.Module, norm: Callable[..., nn.Module]):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = norm(hidden, eps=eps)
        self.pre_fc_norm_hidden = norm(hidden, eps=eps)
        self.layers = nn.ModuleList([layer])
        self.norm = norm(hidden, eps=eps)
        self.rotary = rotary
        self.config = config

    def initialize(self, std: float) -> None:
        """Weights of a head made from nothing: normal matrices, norms with gain 1."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)
            else:
                nn.init.zeros_(parameter)

    def step(self, previous: Tensor, embedded: Tensor, positions: Tensor, attention: _Attention) -> Tensor:
        """One step at M places: previous [M, H], embedded [M, H], positions [M] -> y [M, H]."""
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(previous)], dim=-1)
        states = self.fc(joined)[None]
        rope = self.rotary(states, positions[None])
        states = self.layers[0](states, position_embeddings=rope, attention_mask=None, fastmtp_attention=attention)
        return self.norm(states[0])  # type: ignore[no-any-return]

    def serving(self, rows: PackedRows, embedding: Tensor, num_steps: int, origins: Tensor) -> Iterator[StepOutput]:
        """Run the recursion as vLLM does, at chosen origins.

        Args:
            embedding: [V, H], the verifier's token embedding.
            origins: [N] bool. Step k is given at those whose token x_{t+k+1} exists.
        """
        ids, remaining, positions, row_of = rows.input_ids, rows.remaining(), rows.positions(), rows.row_of()
        base = CausalRows(tuple(length - 1 for length in rows.lengths))
        inputs = (remaining >= 1).nonzero().squeeze(1)
        every = self.step(rows.hidden_states[inputs], F.embedding(ids[inputs + 1], embedding), positions[inputs], base)
        chosen = origins[inputs]
        current, states = inputs[chosen], every[chosen]
        yield StepOutput(current, states)
        chain = ChainAttention(base, row_of[current], positions[current])
        for step in range(1, num_steps):
            keep = remaining[current] >= step + 1
            chain.narrow(keep)
            current, states = current[keep], states[keep]
            if not len(current):
                return
            embedded = F.embedding(ids[current + step + 1], embedding)
            states = self.step(states, embedded, positions[current] + step, chain)
            yield StepOutput(current, states)

    def plain(self, rows: PackedRows, embedding: Tensor, num_steps: int, origins: Tensor) -> Iterator[StepOutput]:
        """Run FastMTP's training recursion; arguments and results as `serving`, computed at every position."""
        ids, remaining, positions = rows.input_ids, rows.remaining(), rows.positions()
        states = rows.hidden_states
        current = torch.arange(len(ids), device=ids.device)
        for step in range(num_steps):
            keep = remaining[current] >= step + 1
            current, states = current[keep], states[keep]
            if not len(current):
                return
            lengths = tuple(length - step - 1 for length in rows.lengths if length > step + 1)
            embedded = F.embedding(ids[current + step + 1], embedding)
            states = self.step(states, embedded, positions[current], CausalRows(lengths))
            chosen = origins[current]
            yield StepOutput(current[chosen], states[chosen])


def head_from_config(config: Mapping[str, Any]) -> MTPHead:
    """A head of the shape that a config.json describes, in fp32, with unset weights."""
    family = family_of(config)
    text = dict(text_config(config))
    # The head is one full-attention layer whatever the backbone's pattern; built from index 0 of the backbone's own
    # list it would be linear attention.
    text.update(num_hidden_layers=1, layer_types=["full_attention"], decoder_sparse_step=1, mlp_only_layers=[])
    text.pop("full_attention_interval", None)
    text.pop("dtype", None)
    model_type = text.pop("model_type")
    head_config = AutoConfig.for_model(model_type, **text)
    head_config._attn_implementation = _ATTENTION
    head_config._experts_implementation = "eager"
    AttentionInterface.register(_ATTENTION, _dispatch)
    return MTPHead(
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
    fastmtp_attention: _Attention,
    **_: object,
) -> tuple[Tensor, None]:
    return fastmtp_attention(query, key, value, scaling), None


def _load_class(dotted: str) -> Callable[..., nn.Module]:
    module, name = dotted.rsplit(".", 1)
    loaded: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    return loaded


def from_native(native: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Native tensors (experts in either layout) -> the module's state dict. `to_native` is its inverse.

    Copies of the embedding and output head that some families repeat inside the head are left out: they are shared.
    """
    family, text = family_of(config), text_config(config)
    copies = family.copy_shapes(text)
    state = {family.ours(key, text): value for key, value in native.items() if key not in copies}
    experts = family.experts(text)
    prefix = "layers.0.mlp.experts."
    if experts and f"{prefix}gate_up_proj" not in state:
        try:
            split = {
                name: [state.pop(f"{prefix}{index}.{name}.weight") for index in range(experts.count)]
                for name in ("gate_proj", "up_proj", "down_proj")
            }
        except KeyError as error:
            raise CheckpointError(f"The head lacks {family.native(error.args[0], text)}.", pointer="/model") from error
        gate_up = zip(split["gate_proj"], split["up_proj"], strict=True)
        state[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gate_up])
        state[f"{prefix}down_proj"] = torch.stack(split["down_proj"])
    return state


def to_native(state: Mapping[str, Tensor], config: Mapping[str, Any], layout: Layout) -> dict[str, Tensor]:
    """The module's state dict -> native tensors, experts in a layout: `split` (one by one) or `fused`."""
    family, text = family_of(config), text_config(config)
    split: dict[str, Tensor] = {}
    for key, value in state.items():
        if layout == "split" and key.endswith("experts.gate_up_proj"):
            base = key.removesuffix("gate_up_proj")
            for index, pair in enumerate(value):
                split[f"{base}{index}.gate_proj.weight"], split[f"{base}{index}.up_proj.weight"] = pair.chunk(2)
        elif layout == "split" and key.endswith("experts.down_proj"):
            base = key.removesuffix("down_proj")
            split |= {f"{base}{index}.down_proj.weight": down for index, down in enumerate(value)}
        else:
            split[key] = value
    return {family.native(key, text): value.contiguous() for key, value in split.items()}
