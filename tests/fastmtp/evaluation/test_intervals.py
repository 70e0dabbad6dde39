"""Intervals: figures by hand, what pairing takes away, and how often the bounds hold in simulation."""

from __future__ import annotations

import numpy as np
import pytest

from fastmtp.evaluation.intervals import Histograms, figures, interval, paired


def test_figures_are_vllms_definition() -> None:
    # 10 drafts: 2 with nothing accepted, 2 with one, 2 with two, 4 with three.
    assert figures(np.array([2, 2, 2, 4])) == pytest.approx([2.8, 0.8, 0.6, 0.4])
    assert figures(np.array([[0, 0, 0], [1, 0, 1]])).tolist() == [[1.0, 0.0, 0.0], [2.0, 0.5, 0.5]]


def answers(random: np.random.Generator, count: int, shift: float = 0.0) -> Histograms:
    """Answers whose prompts are easy or hard, which is what makes drafts of one answer alike."""
    ease = random.beta(6, 2, size=count)
    rows = []
    for probability in np.clip(ease + shift, 0, 1):
        drafts = int(random.integers(10, 40))
        runs = np.minimum(random.geometric(1 - min(float(probability), 0.999), size=drafts) - 1, 3)
        rows.append(np.bincount(runs, minlength=4))
    return np.array(rows, dtype=np.int64)


def test_bounds_hold_as_often_as_they_say() -> None:
    """Coverage of 95 % intervals of one head, over 300 simulated evaluations of 30 prompts."""
    random = np.random.default_rng(0)
    truth = float(figures(answers(random, 60_000).sum(0))[0])
    found = [interval(answers(random, 30), 0.95, seed=run).length for run in range(300)]
    covered = np.mean([one.low <= truth <= one.high for one in found if one.low is not None and one.high is not None])
    # Three standard errors of the share are 0.038; a bootstrap of a ratio over 30 prompts is a little short.
    assert 0.91 <= covered <= 0.985


def test_pairs_share_easy_and_hard_prompts() -> None:
    """A second head that accepts a little more of the same drafts: the paired interval sees what two alone do not."""
    before = answers(np.random.default_rng(1), 60)
    after = before.copy()
    moved = after[:, 0] // 10
    after[:, 0] -= moved
    after[:, 1] += moved
    both = paired(after, before, 0.95)
    assert both.length.low is not None and both.length.low > 0
    one, other = interval(before, 0.95).length, interval(after, 0.95).length
    assert one.high is not None and other.low is not None and one.high > other.low
    assert both.length.value == pytest.approx(other.value - one.value)


def test_a_head_against_itself_is_exactly_nothing() -> None:
    same = answers(np.random.default_rng(2), 20)
    found = paired(same, same, 0.95)
    assert [(one.value, one.low, one.high) for one in (found.length, *found.rates)] == [(0.0, 0.0, 0.0)] * 4


def test_one_prompt_has_no_interval() -> None:
    found = interval(answers(np.random.default_rng(3), 1), 0.95)
    assert found.length.low is None and all(rate.high is None for rate in found.rates)


def test_heads_with_other_prompts_are_no_pair() -> None:
    some = answers(np.random.default_rng(4), 5)
    with pytest.raises(ValueError, match="no pairs"):
        paired(some, some[:4], 0.95)


def test_the_same_seed_gives_the_same_bounds() -> None:
    some = answers(np.random.default_rng(5), 12)
    assert interval(some, 0.9, seed=3) == interval(some, 0.9, seed=3)
