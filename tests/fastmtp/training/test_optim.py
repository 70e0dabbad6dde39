"""Learning rates, and why master weights are fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastmtp.config import TrainConfig
from fastmtp.training.optim import FLOOR, Optimizers, rate


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_rises_then_falls_to_a_tenth(schedule: str) -> None:
    config = TrainConfig.model_validate({"lr": 1e-3, "warmup_ratio": 0.1, "schedule": schedule})
    rates = [rate(step, 100, config) for step in range(101)]
    assert rates[:10] == pytest.approx([1e-4 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(1e-3)
    assert all(later < earlier for earlier, later in zip(rates[10:], rates[11:], strict=False))
    assert rates[100] == pytest.approx(FLOOR * 1e-3)
    assert rates[55] == pytest.approx(0.55e-3)


class Two(nn.Module):
    """A matrix, three stacked ones and a norm of gain 1."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = nn.Parameter((torch.randn(64, 64) * 0.05).to(dtype))
        self.stack = nn.Parameter(torch.randn(3, 8, 8).to(dtype))
        self.norm = nn.Parameter(torch.ones(64, dtype=dtype))


def moved(dtype: torch.dtype) -> dict[str, float]:
    """Share of each tensor's weights that 100 steps of rate 5e-5 under a constant gradient move."""
    module = Two(dtype)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizers = Optimizers(module, TrainConfig())
    for _ in range(100):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizers.step(5e-5)
    return {name: float((p != before[name]).double().mean()) for name, p in module.named_parameters()}


def test_bf16_weights_would_stand_still_where_fp32_ones_move() -> None:
    """Case T5: a step of 5e-5 is less than half of bf16's spacing at 1."""
    assert set(moved(torch.float32).values()) == {1.0}
    in_bf16 = moved(torch.bfloat16)
    assert in_bf16["norm"] == 0.0
    assert in_bf16["matrix"] < 0.5


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    module = Two(torch.float32)
    optimizers = Optimizers(module, TrainConfig(optimizer="muon"))
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers.step(1e-3)
    assert set(optimizers.state()) == {
        "matrix/momentum_buffer", *(f"{n}/{s}" for n in ("stack", "norm") for s in ("step", "exp_avg", "exp_avg_sq")),
    }  # fmt: skip
    assert all(parameter.grad is None for parameter in module.parameters())


def test_weight_decay_leaves_norms_alone() -> None:
    module = Two(torch.float32)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = module.matrix.detach().clone()
    Optimizers(module, TrainConfig(weight_decay=0.5)).step(1e-2)
    torch.testing.assert_close(module.matrix.detach(), before * (1 - 0.5 * 1e-2))
    assert (module.norm == 1).all()
