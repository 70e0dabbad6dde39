"""Grouped experts equal transformers' own loop over them: results and every gradient, whatever the routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts

from fastmtp.experts import grouped_experts

COUNT, HIDDEN, INNER, TOP = 6, 16, 24, 2


def experts() -> nn.Module:
    config = AutoConfig.for_model(
        "qwen3_next", hidden_size=HIDDEN, num_experts=COUNT, num_experts_per_tok=TOP, moe_intermediate_size=INNER
    )
    config._experts_implementation = "eager"
    made: nn.Module = Qwen3NextExperts(config)
    torch.manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize(
    "chosen",
    [
        torch.tensor([[0, 5], [3, 1], [5, 0], [2, 4], [1, 3]]),
        torch.tensor([[4, 2]] * 7),  # most experts asked by nobody
        torch.tensor([[1, 0]]),
    ],
    ids=["all", "two", "one token"],
)
def test_equals_the_loop(chosen: Tensor) -> None:
    module = experts()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(chosen), HIDDEN, generator=generator, requires_grad=True)
    shares = torch.rand(len(chosen), TOP, generator=generator, requires_grad=True)
    pull = torch.randn(len(chosen), HIDDEN, generator=generator)
    leaves = [hidden, shares, *module.parameters()]
    results = [grouped_experts(module, hidden, chosen, shares), module(hidden, chosen, shares)]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad((found * pull).sum(), leaves, allow_unused=True) for found in results)
    for one, other, leaf in zip(ours, theirs, leaves, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(leaf) if other is None else other, atol=1e-5, rtol=1e-4)


def test_autocast_is_followed() -> None:
    module, hidden = experts(), torch.randn(8, HIDDEN)
    chosen, shares = torch.randint(COUNT, (8, TOP)), torch.full((8, TOP), 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        low = grouped_experts(module, hidden, chosen, shares)
    exact = grouped_experts(module, hidden, chosen, shares)
    assert low.dtype == exact.dtype == torch.float32
    assert 0 < (low - exact).abs().max() < 0.1 * exact.abs().max()
