"""The chunked loss equals the naive one, in value and both gradients, whatever the chunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastmtp import losses


@pytest.mark.parametrize("chunk", [1, 7 * 50, 10**9])
def test_equals_naive_cross_entropy(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    states, weight = torch.randn(33, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (33,))
    total, hits = losses.chunked_cross_entropy(states, weight, targets)
    (total * 0.37).backward()
    naive_states, naive_weight = (x.detach().clone().requires_grad_() for x in (states, weight))
    logits = naive_states @ naive_weight.T
    naive = F.cross_entropy(logits, targets, reduction="sum")
    (naive * 0.37).backward()
    torch.testing.assert_close(total, naive, atol=1e-4, rtol=1e-6)
    torch.testing.assert_close(states.grad, naive_states.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weight.grad, naive_weight.grad, atol=1e-5, rtol=1e-5)
    assert torch.equal(hits, logits.argmax(-1) == targets)


def test_frozen_output_head_gets_no_gradient() -> None:
    states, weight = torch.randn(4, 8, requires_grad=True), torch.randn(10, 8)
    total, _ = losses.chunked_cross_entropy(states, weight, torch.zeros(4, dtype=torch.int64))
    total.backward()
    assert weight.grad is None
    assert states.grad is not None


def test_no_target_is_no_loss() -> None:
    empty = torch.zeros(0, 8, requires_grad=True)
    total, hits = losses.chunked_cross_entropy(empty, torch.randn(10, 8), torch.zeros(0, dtype=torch.int64))
    assert float(total.detach()) == 0.0
    assert len(hits) == 0
