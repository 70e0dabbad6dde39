"""Losses over the full vocabulary, tile by tile, with the gradient formed in the forward pass.

Kinds, per token, with p the softmax of the head's logits and q the verifier's own distribution at the same place:

    ce   -log p(target)
    kl   sum_v q_v log(q_v / p_v)
    tv   sum_v max(0, p_v - q_v); 1 - tv is the chance that speculative sampling accepts a token drawn from p

Logits are made for a tile of tokens and vocabulary at a time, small enough to stay in the cache while they are used;
each one is computed once, exponentiated once, and taken back through the output head while it is there. Cross-entropy
alone needs one sweep over the vocabulary, since its gradient is linear in the exponentials:

    d ce / d state = (1 - p_target) * (sum_{v != target} e_v W_v / sum_{v != target} e_v  -  W_target)

A mixture with `kl` or `tv` needs the normalisers first, and so keeps two [tokens, V] buffers of at most `chunk_bytes`.
The output head is frozen: it never gets a gradient. Equal to the naive form up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastmtp.sweeps import KINDS, Found, compute_type, one_sweep, two_sweeps

CROSS_ENTROPY: Mapping[str, float] = MappingProxyType({"ce": 1.0})
_CHUNK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class LossOutput:
    """Losses of N tokens.

    Attributes:
        total: scalar fp32, differentiable: sum_n scale_n * sum_kind mixture_kind * each[kind]_n.
        each: kind -> [N] fp32, without scale, mixture or gradient. Holds `ce`, and what the mixture names.
        hits: [N] bool, whether no logit is above the target's.
    """

    total: Tensor
    each: Mapping[str, Tensor]
    hits: Tensor


def token_losses(
    states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mixture: Mapping[str, float] = CROSS_ENTROPY,
    teacher: Tensor | None = None,
    scale: Tensor | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> LossOutput:
    """Losses of `targets` under softmax(states @ weight.T).

    Tokens of several steps may be laid end to end in one call, each with its step's weight in `scale`: the output
    head is then read once for all.

    Args:
        states: [N, H], floating point.
        weight: [V, H], the output head; frozen.
        targets: [N] int64.
        mixture: kind -> its weight in `total`, at least one.
        teacher: [N, H], the verifier's states after its final norm where it predicts `targets`; for `kl` and `tv`.
        scale: [N], weight of each token in `total`; 1 unless given.
        chunk_bytes: most that logits may take at once.
    """
    assert not weight.requires_grad
    assert mixture and not set(mixture) - set(KINDS)
    guided = {kind: share for kind, share in mixture.items() if kind != "ce"}
    assert not guided or teacher is not None
    if scale is None:
        scale = torch.ones(len(targets), device=states.device)
    total, hits, *values = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        states, weight, targets, dict(mixture), teacher if guided else None, scale, chunk_bytes
    )
    return LossOutput(total, dict(zip(("ce", *guided), values, strict=True)), hits)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        mixture: dict[str, float],
        teacher: Tensor | None,
        scale: Tensor,
        chunk_bytes: int,
    ) -> tuple[Tensor, ...]:
        compute = compute_type(weight)
        slope = torch.zeros(states.shape, device=states.device) if ctx.needs_input_grad[0] else None
        found = Found(mixture, targets, slope)
        with torch.autocast(states.device.type, enabled=False):
            if teacher is None:
                one_sweep(found, states.to(compute), weight, chunk_bytes)
            else:
                two_sweeps(found, states.to(compute), teacher.to(compute), weight, chunk_bytes)
            per_token = torch.stack([share * found.each[kind] for kind, share in mixture.items()]).sum(0)
            total = (per_token * scale).sum()
            slope = None if slope is None else slope.mul_(scale[:, None]).to(states.dtype)
        hits = found.labels >= found.highest
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(hits, *found.each.values())
        return total, hits, *found.each.values()

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (slope,) = ctx.saved_tensors
        return None if slope is None else slope * grad_total.to(slope.dtype), None, None, None, None, None, None
