"""Intervals of acceptance figures, by bootstrap over prompts.

Drafts of one answer are alike, so prompts and not drafts are drawn. Heads that are compared are drawn in pairs: every
replicate takes the same prompts for both, which removes what easy and hard prompts have in common. Bounds are
percentiles (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, ch. 13) of replicates that are stretched by
sqrt(n / (n - 1)) around the figure, without which few prompts give bounds that are too tight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastmtp.evaluation.report import Estimate

REPLICATES = 4000
_BLOCK = 500  # replicates whose weights are held at once

Histograms = NDArray[np.int64]  # [n, K + 1]: how many drafts of each answer had 0, 1, ... K tokens accepted
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """Mean acceptance length, and the rate of each position, with their bounds."""

    length: Estimate
    rates: list[Estimate]


def figures(counts: NDArray[np.int64] | Floats) -> Floats:
    """[..., K + 1] counts of drafts by accepted tokens -> [..., K + 1]: mean acceptance length, then the K rates.

    rate_i = drafts of which more than i tokens were accepted / drafts. Where there is no draft, length 1 and rates 0.
    """
    drafts = counts.sum(-1, keepdims=True)
    # At least so many accepted: sums from the end. The first is all drafts.
    reached = np.flip(np.cumsum(np.flip(counts, -1), -1), -1)[..., 1:]
    rates = reached / np.maximum(drafts, 1)
    return np.concatenate([1.0 + rates.sum(-1, keepdims=True), rates], -1)


def interval(histograms: Histograms, confidence: float, seed: int = 0) -> Interval:
    """Figures of one head with two-sided bounds."""
    found = figures(histograms.sum(0))
    return _interval(found, _replicates([histograms], seed)[0], len(histograms), confidence)


def paired(after: Histograms, before: Histograms, confidence: float, seed: int = 0) -> Interval:
    """Figures of `after` less those of `before`, of the same prompts in the same order, with two-sided bounds."""
    if len(after) != len(before):
        raise ValueError(f"{len(after)} and {len(before)} answers are no pairs")
    found = figures(after.sum(0)) - figures(before.sum(0))
    one, other = _replicates([after, before], seed)
    return _interval(found, one - other, len(after), confidence)


def _replicates(several: Sequence[Histograms], seed: int) -> list[Floats]:
    """Of each head [replicates, K + 1]; a replicate draws the same prompts for all of them."""
    count = len(several[0])
    random = np.random.default_rng(seed)
    found: list[list[Floats]] = [[] for _ in several]
    for _ in range(REPLICATES // _BLOCK):
        times = random.multinomial(count, np.full(count, 1.0 / count), size=_BLOCK).astype(np.float64)
        for histograms, parts in zip(several, found, strict=True):
            parts.append(figures(times @ histograms.astype(np.float64)))
    return [np.concatenate(parts) for parts in found]


def _interval(found: Floats, replicates: Floats, count: int, confidence: float) -> Interval:
    """Bounds of each column; none where there is only one prompt to draw."""
    if count < 2:
        estimates = [Estimate(value=float(value)) for value in found]
    else:
        stretched = found + (replicates - found) * np.sqrt(count / (count - 1))
        tail = (1.0 - confidence) / 2
        low, high = np.quantile(stretched, [tail, 1.0 - tail], axis=0)
        estimates = [
            Estimate(value=float(value), low=float(below), high=float(above))
            for value, below, above in zip(found, low, high, strict=True)
        ]
    return Interval(estimates[0], estimates[1:])
