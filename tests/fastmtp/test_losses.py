"""Losses tile by tile equal the naive ones: values, gradient and hits, whatever the tile, chunk and mixture."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastmtp import sweeps
from fastmtp.losses import token_losses

MIXTURES = [
    {"ce": 1.0},
    {"ce": 0.25},
    {"kl": 1.0},
    {"tv": 1.0},
    {"tv": 0.5, "ce": 0.5},
    {"ce": 0.2, "kl": 0.5, "tv": 0.3},
]


def naive(states: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor) -> dict[str, Tensor]:
    """Each kind per token, by the book."""
    p, q = ((x @ weight.T).log_softmax(-1) for x in (states, teacher))
    return {
        "ce": F.nll_loss(p, targets, reduction="none"),
        "kl": F.kl_div(p, q, log_target=True, reduction="none").sum(-1),
        "tv": (p.exp() - q.exp()).abs().sum(-1) / 2,
    }


def inputs(count: int, vocabulary: int, hidden: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    states, teacher = torch.randn(2, count, hidden, generator=generator)
    weight = torch.randn(vocabulary, hidden, generator=generator) * 0.5
    targets = torch.randint(vocabulary, (count,), generator=generator)
    targets[::3] = (states @ weight.T).argmax(-1)[::3]  # some hits
    return states.requires_grad_(), weight, targets, teacher


def compare(
    mixture: Mapping[str, float], made: tuple[Tensor, Tensor, Tensor, Tensor], chunk_bytes: int, factor: float = 0.37
) -> None:
    states, weight, targets, teacher = made
    scale = torch.rand(len(targets), generator=torch.Generator().manual_seed(1)) / len(targets)
    found = token_losses(
        states, weight, targets, mixture=mixture, teacher=teacher, scale=scale, chunk_bytes=chunk_bytes
    )
    (slope,) = torch.autograd.grad(found.total * factor, states)
    exact = states.detach().double().requires_grad_()
    each = naive(exact, weight.double(), targets, teacher.double())
    total = (torch.stack([share * each[kind] for kind, share in mixture.items()]).sum(0) * scale).sum()
    (expected,) = torch.autograd.grad(total * factor, exact)
    torch.testing.assert_close(found.total.double(), total, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(slope.double(), expected, atol=1e-6, rtol=1e-5)
    assert set(found.each) == {"ce", *mixture}
    for kind, values in found.each.items():
        torch.testing.assert_close(values.double(), each[kind], atol=4e-6, rtol=1e-6)
        assert not values.requires_grad
    assert torch.equal(found.hits, (states @ weight.T).argmax(-1) == targets)
    assert 0 < found.hits.sum() < len(targets)


@pytest.mark.parametrize("chunk_bytes", [1, 5000, 10**9])
@pytest.mark.parametrize("tile", [(1, 1000), (7, 13), (512, 1024)])
@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: "+".join(mixture))
def test_equals_the_naive_form(
    mixture: dict[str, float], tile: tuple[int, int], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "_CPU_TILE", tile)
    compare(mixture, inputs(20, 97), chunk_bytes)


@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: "+".join(mixture))
def test_equals_the_naive_form_over_a_larger_vocabulary(mixture: dict[str, float]) -> None:
    """Case T8: V=1000, T=64, for three recursive steps laid end to end."""
    compare(mixture, inputs(3 * 64, 1000), 100_000)


@pytest.mark.parametrize("shift", [0.0, 300.0, -300.0])
def test_far_logits_do_not_overflow(shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of one sweep is raised when a later tile is far above it, and any common shift is harmless."""
    monkeypatch.setattr(sweeps, "_CPU_TILE", (4, 8))
    vocabulary, hidden = 32, 2
    weight = torch.stack([torch.linspace(-1, 1, vocabulary) * 100, torch.full((vocabulary,), shift)], dim=1)
    states = torch.ones(5, hidden, requires_grad=True)
    targets = torch.tensor([0, 5, 16, 30, 31])
    found = token_losses(states, weight, targets)
    (slope,) = torch.autograd.grad(found.total, states)
    exact = states.detach().double().requires_grad_()
    each = F.cross_entropy(exact @ weight.double().T, targets, reduction="none")
    torch.testing.assert_close(found.each["ce"].double(), each.detach(), atol=1e-4, rtol=1e-6)
    (expected,) = torch.autograd.grad(each.sum(), exact)
    torch.testing.assert_close(slope.double(), expected, atol=1e-4, rtol=1e-5)
    assert found.hits.tolist() == [False, False, False, False, True]


def test_a_sure_hit_keeps_its_small_gradient() -> None:
    """1 - p of a target that is nearly certain is not lost in rounding p to 1."""
    weight = torch.eye(3)
    states = torch.tensor([[20.0, 0.0, 0.0]], requires_grad=True)
    found = token_losses(states, weight, torch.tensor([0]))
    (slope,) = torch.autograd.grad(found.total, states)
    small = 2 * torch.exp(torch.tensor(-20.0))
    torch.testing.assert_close(found.total.detach(), small, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(slope, torch.stack([-small, small / 2, small / 2])[None], rtol=1e-5, atol=0.0)


def test_a_head_that_is_its_teacher_has_no_loss_to_it() -> None:
    states, weight, targets, _ = inputs(8, 50)
    found = token_losses(states, weight, targets, mixture={"kl": 0.5, "tv": 0.5}, teacher=states.detach())
    (slope,) = torch.autograd.grad(found.total, states)
    assert found.each["tv"].abs().max() == 0.0
    assert found.each["kl"].abs().max() < 1e-6
    assert slope.abs().max() < 1e-6


def test_memory_is_bounded_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor as large as tokens by vocabulary is made; with a teacher, two that fill the chunk."""
    made: list[int] = []
    real = torch.empty

    def spy(*sizes: object, **options: object) -> Tensor:
        tensor: Tensor = real(*sizes, **options)  # type: ignore[call-overload]
        made.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", spy)
    states, weight, targets, teacher = inputs(200, 3000)
    token_losses(states, weight, targets, mixture={"tv": 1.0}, teacher=teacher, chunk_bytes=240_000)
    assert max(made) == 240_000
    made.clear()
    token_losses(states, weight, targets, chunk_bytes=100_000)
    assert max(made) <= 100_000


def test_low_precision_output_head_is_multiplied_in_fp32_on_a_cpu() -> None:
    states, weight, targets, teacher = inputs(12, 40)
    low = weight.bfloat16()
    for mixture in ({"ce": 1.0}, {"kl": 1.0}):
        found, expected = (
            token_losses(states, head, targets, mixture=mixture, teacher=teacher) for head in (low, low.float())
        )
        assert found.total == expected.total
        slopes = [torch.autograd.grad(output.total, states)[0] for output in (found, expected)]
        torch.testing.assert_close(*slopes)
    with torch.autocast("cpu", torch.bfloat16):
        again = token_losses(states, low, targets, mixture={"kl": 1.0}, teacher=teacher)
    assert again.total == expected.total


def test_gradients_come_in_the_type_of_the_states() -> None:
    states, weight, targets, _ = inputs(12, 40)
    low = states.detach().bfloat16().requires_grad_()
    token_losses(low, weight, targets).total.backward()
    assert low.grad is not None
    assert low.grad.dtype == torch.bfloat16


def test_no_gradient_is_made_where_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight, targets, teacher = inputs(12, 40)
    monkeypatch.setattr(sweeps, "_add_product", lambda *_: pytest.fail("a product for a gradient"))
    for mixture in ({"ce": 1.0}, {"tv": 1.0}):
        found = token_losses(states.detach(), weight, targets, mixture=mixture, teacher=teacher)
        assert not found.total.requires_grad


def test_no_target_is_no_loss() -> None:
    empty = torch.zeros(0, 8, requires_grad=True)
    for mixture in ({"ce": 1.0}, {"kl": 1.0}):
        found = token_losses(
            empty, torch.randn(10, 8), torch.zeros(0, dtype=torch.int64), mixture=mixture, teacher=empty.detach()
        )
        found.total.backward()
        assert found.total == 0.0
        assert len(found.hits) == 0
