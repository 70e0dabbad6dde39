"""Routed experts as grouped matrix products, in place of transformers' loop over experts.

The loop's backward pass fills a gradient of the whole stack of experts for each expert it calls, which costs the square
of their number: with Qwen3-Next's 512, by far the most of a step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def grouped_experts(module: nn.Module, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Gated MLPs, each on the tokens routed to it; transformers' experts interface.

    Args:
        module: holds `gate_up_proj` [E, 2 * inner, H], `down_proj` [E, H, inner] and `act_fn`.
        hidden: [N, H].
        chosen: [N, top] int64, experts of each token.
        shares: [N, top], their weights.

    Returns:
        [N, H], in `hidden`'s type. Computed in autocast's type where autocast is on, which grouped products ignore.
    """
    device = hidden.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    gate_up, down = (module.get_parameter(name).to(compute).transpose(1, 2) for name in ("gate_up_proj", "down_proj"))
    order = chosen.flatten().argsort(stable=True)
    bounds = torch.bincount(chosen.flatten(), minlength=len(gate_up)).cumsum(0).to(torch.int32)
    tokens = hidden.to(compute)[order // chosen.shape[1]]
    gate, up = F.grouped_mm(tokens, gate_up, offs=bounds).chunk(2, dim=-1)
    found = F.grouped_mm(module.get_submodule("act_fn")(gate) * up, down, offs=bounds)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    spread: Tensor = found[back].unflatten(0, chosen.shape)
    return (spread * shares[..., None].to(compute)).sum(1).to(hidden.dtype)
