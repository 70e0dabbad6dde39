"""Cross-entropy over the full vocabulary, in chunks of tokens, with the gradient formed in the forward pass.

Logits of [tokens, vocabulary] never exist for more than a chunk, and nothing is computed twice: while a chunk's
logits are there, their gradient is taken back through the output head at once. Equal to the naive form up to
rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 32_000_000  # logits held at once: 128 MB in fp32


def chunked_cross_entropy(states: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of `targets` under softmax(states @ weight.T).

    Args:
        states: [M, H], floating point.
        weight: [V, H], the output head; gets a gradient only if it asks for one.
        targets: [M] int64.

    Returns:
        The sum (scalar, fp32, differentiable) and [M] bool, whether no logit is above the target's.
    """
    total, hits = _ChunkedCrossEntropy.apply(states, weight, targets)  # type: ignore[no-untyped-call]
    return total, hits


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        need_states, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_states = torch.empty_like(states) if need_states else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        total = torch.zeros((), device=states.device, dtype=torch.float32)
        hits = torch.empty(len(targets), dtype=torch.bool, device=states.device)
        size = max(1, min(len(targets), _CHUNK_ELEMENTS // weight.shape[0]))
        # One buffer for all chunks: fresh pages for every temporary cost more than the arithmetic on them.
        buffer = torch.empty(size, weight.shape[0], device=states.device, dtype=weight.dtype)
        for begin in range(0, len(targets), size):
            part = slice(begin, begin + size)
            target = targets[part, None]
            raw = torch.mm(states[part].to(weight.dtype), weight.T, out=buffer[: len(target)])
            logits = raw.float()  # the buffer itself when that is fp32
            top = logits.amax(-1, keepdim=True)
            chosen = logits.gather(1, target)
            hits[part] = (chosen >= top).squeeze(1)
            exponents = logits.sub_(top).exp_()
            norm = exponents.sum(-1, keepdim=True)
            total += (norm.log() + top - chosen).sum()
            if need_states or need_weight:
                # d loss / d logits = softmax - onehot, written over the logits themselves.
                slope = exponents.div_(norm)
                slope.scatter_add_(1, target, torch.full_like(target, -1, dtype=slope.dtype))
                if grad_states is not None:
                    grad_states[part] = (slope.to(weight.dtype) @ weight).to(states.dtype)
                if grad_weight is not None:
                    grad_weight += slope.T @ states[part].float()
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _grad_hits: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN401
        grad_states, grad_weight = ctx.saved_tensors
        return (
            None if grad_states is None else grad_states * grad_total.to(grad_states.dtype),
            None if grad_weight is None else (grad_weight * grad_total).to(ctx.weight_dtype),
            None,
        )
