"""Which K serves best: by a model of cost, and by speed where it was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastmtp.checkpoint import open_checkpoint
from fastmtp.evaluation.report import Acceptance
from fastmtp.evaluation.sweep import draft_cost, sweep
from tests.fastmtp.evaluation.figures import acceptance
from tests.fastmtp.synthetic import Plan, write
from tests.fastmtp.synthetic_models import small_config

RATES = [0.8, 0.6, 0.4, 0.1]


def swept() -> list[Acceptance]:
    """K = 1..4 with lengths 1.8, 2.4, 2.8, 2.9."""
    return [
        acceptance("tuned", RATES[:k], num_speculative_tokens=k, answer_tokens=1000, seconds=seconds)
        for k, seconds in ((3, 9.5), (1, 10.0), (2, 9.0), (4, 12.0))
    ]


@pytest.mark.parametrize(("cost", "best"), [(0.01, 4), (0.1, 3), (0.25, 2), (0.5, 1)])
def test_cheap_drafts_want_a_large_k(cost: float, best: int) -> None:
    """1.8/(1+c), 2.4/(1+2c), 2.8/(1+3c), 2.9/(1+4c)."""
    found = sweep(swept(), cost, measured=False)
    assert found.best == best
    assert found.lengths == pytest.approx({1: 1.8, 2: 2.4, 3: 2.8, 4: 2.9}) and list(found.lengths) == [1, 2, 3, 4]
    assert f"a draft token costing {cost:.3f} of a verification" in found.reason


def test_measured_speed_wins() -> None:
    found = sweep(swept(), 0.01, measured=True)
    assert found.best == 2
    assert found.reason == ("most output tokens per second with 64 requests in flight (1: 100, 2: 111, 3: 105, 4: 83)")


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_costs_its_share_of_the_bytes(tied: bool, tmp_path: Path) -> None:
    config = small_config("qwen3.5", tie_word_embeddings=tied)
    checkpoint = open_checkpoint(write(tmp_path / "m", family="qwen3.5", config=config, plan=Plan()))
    sizes = {key: entry.nbytes for key, entry in checkpoint.tensors.items()}
    assert any(key.endswith("lm_head.weight") for key in sizes) is not tied
    head = sum(size for key, size in sizes.items() if key.startswith("mtp."))
    embedding = next(size for key, size in sizes.items() if key.endswith("embed_tokens.weight"))
    read = sum(sizes.values()) - head - (0 if tied else embedding)
    assert draft_cost(checkpoint) == pytest.approx((head + embedding) / read)
