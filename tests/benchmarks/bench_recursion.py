"""A training step by the serving recursion against one by FastMTP's plain recursion: same head, rows and loss.

Half of the tokens are supervised. Plain recursion must run every position at every step; serving runs supervised
origins alone, and takes keys and values from the rest. The vocabulary is small, so that the head counts.
"""

from __future__ import annotations

from functools import partial

from tests.benchmarks.measure import Metric, median_seconds, metric
from tests.benchmarks.steps import Sizes, make, train_step

SIZES = Sizes(tokens=2048, vocabulary=8192, hidden=256, rows=8)


def run() -> dict[str, Metric]:
    seconds = median_seconds(
        {"serving": partial(train_step, make(SIZES)), "plain": partial(train_step, make(SIZES, "plain"))}
    )
    return {"step_seconds": metric(seconds["serving"], "s", peer=seconds["plain"], goal=1.0)}
