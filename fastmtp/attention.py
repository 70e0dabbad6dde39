"""The head's attention over packed rows: as vLLM's KV cache lets it see at serving time, and plainly causal.

Rows lie end to end without padding and no row sees another. Memory grows with tokens, not with their square: scores
exist for a block of queries at a time, forward and backward, and the softmax is redone from its log-sum-exp in the
backward pass (Dao, arXiv 2307.08691). Written with matrix products alone, so it runs on any device in any type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fastmtp.data.rows import PackedRows

# Scores held at once, in elements: 4 MiB on a CPU, so that they stay in the cache; 256 MiB elsewhere.
_CPU_BLOCK, _GPU_BLOCK = 2**20, 2**26


class Attention(Protocol):
    """What the decoder layer calls: query [1, heads, M, D], key and value [1, kv_heads, M, D] -> [1, M, heads, D]."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor: ...


class CausalRows:
    """Causal attention inside each of the rows that lie end to end."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        rows = zip(*(part.split(self._lengths, dim=2) for part in (query, key, value)), strict=True)
        parts = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True) for q, k, v in rows
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)


class ServingCache:
    """The KV cache as each origin would find it: step 0's keys up to the origin, then those of its own chain.

    Its methods are the attention of the head's successive passes: `remember`, `begin`, then `extend` per later step.

    Args:
        rows: the packed rows.
        origins: [M] int64, ascending indices into them.

    Attributes:
        context: [P] int64, ascending: the places before an origin of their row that are none themselves. Step 0 gives
            a key and a value there, and nothing else of it is ever used.
    """

    def __init__(self, rows: PackedRows, origins: Tensor) -> None:
        row_of, positions = rows.row_of(), rows.positions()
        last = torch.full((len(rows.lengths),), -1, device=origins.device)
        last = last.scatter_reduce(0, row_of[origins], positions[origins], "amax")
        kept = positions <= last[row_of]
        starts = kept.cumsum(0)[origins] - 1 - positions[origins]
        kept[origins] = False
        self.context = kept.nonzero().squeeze(1)
        # Keys come from context and origins apart; this puts them into the rows' order.
        self._order = torch.cat([self.context, origins]).argsort()
        self._starts, self._ends = starts, starts + positions[origins]  # [M], each query's first and last base key
        self._remembered: list[tuple[Tensor, Tensor]] = []
        self._base: tuple[Tensor, Tensor] | None = None
        self._chain: list[tuple[Tensor, Tensor]] = []

    def remember(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # noqa: ARG002
        """Step 0 at the context: keep keys and values. Nobody reads what attention gives there."""
        self._remembered.append((key[0], value[0]))
        return query.new_zeros(()).expand_as(query).transpose(1, 2)

    def begin(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Step 0 at the origins."""
        pairs = zip(*self._remembered, (key[0], value[0]), strict=True)
        keys, values = (torch.cat(parts, dim=1)[:, self._order] for parts in pairs)
        self._base = keys, values
        return self._attend(query, scaling)

    def extend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """A later step at the origins."""
        self._chain.append((key[0], value[0]))
        return self._attend(query, scaling)

    def narrow(self, keep: Tensor) -> None:
        """Drop origins (keep: [M] bool), such as those whose next token lies outside their row."""
        self._starts, self._ends = self._starts[keep], self._ends[keep]
        self._chain = [(key[:, keep], value[:, keep]) for key, value in self._chain]

    def _attend(self, query: Tensor, scaling: float) -> Tensor:
        assert self._base is not None
        keys, values = self._base
        grouped = (query[0] * scaling).unflatten(0, (keys.shape[0], -1))
        empty = keys.new_empty(keys.shape[0], query.shape[2], 0, keys.shape[2])
        chain_keys = torch.stack([key for key, _ in self._chain], dim=2) if self._chain else empty
        chain_values = torch.stack([value for _, value in self._chain], dim=2) if self._chain else empty
        operands = (part.to(values.dtype) for part in (grouped, keys, values, chain_keys, chain_values))
        blocks = list(_blocks(self._starts, self._ends, query.shape[1]))
        out: Tensor = _Attend.apply(*operands, self._ends, blocks)  # type: ignore[no-untyped-call]
        return out.flatten(0, 1).transpose(0, 1)[None]


@dataclass(frozen=True)
class _Block:
    """Queries of one row, the base keys that any of them sees, and how many of these every one sees."""

    queries: slice
    keys: slice
    common: int


def _blocks(starts: Tensor, ends: Tensor, heads: int) -> Iterator[_Block]:
    """Cut queries (base keys from `starts` to `ends` inclusive, both [M]) into blocks of bounded size."""
    budget = (_CPU_BLOCK if starts.device.type == "cpu" else _GPU_BLOCK) // heads
    first, last = starts.tolist(), ends.tolist()
    begin = 0
    for stop in range(1, len(first) + 1):
        # A block ends with its row, or before the query that would make it too large.
        if stop == len(first) or first[stop] != first[begin] or (
            (stop + 1 - begin) * (last[stop] + 1 - first[begin]) > budget
        ):  # fmt: skip
            yield _Block(slice(begin, stop), slice(first[begin], last[stop - 1] + 1), last[begin] + 1 - first[begin])
            begin = stop


def _scores(query: Tensor, keys: Tensor, chain_keys: Tensor, ends: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
    """Scores of a block against base keys [kv, group, S, T] and the chain's own [kv, group, S, steps], in fp32."""
    part = query[:, :, block.queries]
    seen = (part.flatten(1, 2) @ keys[:, block.keys].transpose(1, 2)).unflatten(1, part.shape[1:3]).float()
    places = torch.arange(block.keys.start + block.common, block.keys.stop, device=ends.device)
    seen[..., block.common :].masked_fill_(places > ends[block.queries, None], -torch.inf)
    return seen, torch.einsum("hgmd,hmsd->hgms", part, chain_keys[:, block.queries]).float()


class _Attend(torch.autograd.Function):
    """softmax over [base keys up to ends; the chain's] in one, block by block.

    Shapes: query [kv, group, M, D], scaled; keys, values [kv, T, D]; chain_keys, chain_values [kv, M, steps, D];
    ends [M] int64. Result as query.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        chain_keys: Tensor,
        chain_values: Tensor,
        ends: Tensor,
        blocks: list[_Block],
    ) -> Tensor:
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:3], device=query.device)
        with torch.autocast(query.device.type, enabled=False):
            for block in blocks:
                part = block.queries
                seen, own = _scores(query, keys, chain_keys, ends, block)
                top = torch.cat([seen.amax(-1, keepdim=True), own], dim=-1).amax(-1, keepdim=True)
                seen.sub_(top).exp_()
                own.sub_(top).exp_()
                norm = seen.sum(-1, keepdim=True) + own.sum(-1, keepdim=True)
                lse[:, :, part] = (top + norm.log()).squeeze(-1)
                mixed = (seen.flatten(1, 2).to(values.dtype) @ values[:, block.keys]).unflatten(1, seen.shape[1:3])
                mixed = mixed + torch.einsum("hgms,hmsd->hgmd", own.to(values.dtype), chain_values[:, part])
                out[:, :, part] = mixed / norm
        ctx.save_for_backward(query, keys, values, chain_keys, chain_values, ends, out, lse)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        query, keys, values, chain_keys, chain_values, ends, out, lse = ctx.saved_tensors
        grad_query, grad_chain_keys, grad_chain_values = map(torch.empty_like, (query, chain_keys, chain_values))
        grad_keys, grad_values = (torch.zeros_like(part, dtype=torch.float32) for part in (keys, values))
        for block in ctx.blocks:
            part, span = block.queries, block.keys
            seen, own = _scores(query, keys, chain_keys, ends, block)
            norm = lse[:, :, part, None]
            seen.sub_(norm).exp_()
            own.sub_(norm).exp_()
            asked, given = query[:, :, part], grad[:, :, part].contiguous()
            flat = given.flatten(1, 2)
            pull = (given * out[:, :, part]).float().sum(-1, keepdim=True)
            grad_values[:, span] += seen.flatten(1, 2).to(flat.dtype).transpose(1, 2) @ flat
            grad_chain_values[:, part] = torch.einsum("hgms,hgmd->hmsd", own.to(given.dtype), given)
            # d loss / d scores = weights * (grad . value - grad . out), written over the weights.
            seen *= (flat @ values[:, span].transpose(1, 2)).unflatten(1, seen.shape[1:3]).float().sub_(pull)
            own *= torch.einsum("hgmd,hmsd->hgms", given, chain_values[:, part]).float() - pull
            seen, own = seen.to(query.dtype), own.to(query.dtype)
            grad_keys[:, span] += seen.flatten(1, 2).transpose(1, 2) @ asked.flatten(1, 2)
            grad_chain_keys[:, part] = torch.einsum("hgms,hgmd->hmsd", own, asked)
            grad_query[:, :, part] = (seen.flatten(1, 2) @ keys[:, span]).unflatten(1, seen.shape[1:3])
            grad_query[:, :, part] += torch.einsum("hgms,hmsd->hgmd", own, chain_keys[:, part])
        return (
            grad_query,
            grad_keys.to(keys.dtype),
            grad_values.to(values.dtype),
            grad_chain_keys,
            grad_chain_values,
            None,
            None,
        )
