"""What of an evaluation the gate decides on: the first temperature and the job's own K, of every set and head."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastmtp.config import EvaluateConfig, GateConfig
from fastmtp.evaluate import decide, gains_of
from fastmtp.evaluation.measure import Measured
from fastmtp.evaluation.report import Head
from fastmtp.evaluation.session import Session
from fastmtp.progress import Reporter
from tests.fastmtp.evaluation.figures import acceptance

GATE = GateConfig(min_drafts=10)
HEADS: dict[Head, Path] = {"base": Path("b"), "tuned": Path("t"), "incumbent": Path("i")}


def session() -> Session:
    config = EvaluateConfig(prompts="x", num_speculative_tokens=2, sweep=(1,), temperature=(0.0, 1.0), lossless=False)
    return Session(HEADS, {}, [], config, Path("logs"), 100, 0.95, Reporter("evaluate", quiet=True))


def add(into: Session, good: dict[Head, int], temperature: float = 0.0, k: int = 2) -> None:
    """Of each head ten answers with so many of eight drafts accepted to the end, the others not at all."""
    for head, count in good.items():
        row = np.zeros(k + 1, dtype=np.int64)
        row[0], row[k] = 8 - count, count
        taken = {"temperature": temperature, "num_speculative_tokens": k}
        figures = acceptance(head, [count / 8] * k, 80, **taken)
        into.found[head, "prompts", temperature, k] = Measured(figures, [], 1.0, np.tile(row, (10, 1)))


def test_other_temperatures_and_k_are_for_people() -> None:
    """Worse at temperature 1 and at K=1, better where it is asked for."""
    found = session()
    add(found, {"base": 4, "tuned": 6, "incumbent": 5})
    add(found, {"base": 6, "tuned": 2}, temperature=1.0)
    add(found, {"base": 6, "tuned": 2}, k=1)
    gains = gains_of(found, GATE)
    assert [(one.over, one.temperature, one.num_speculative_tokens) for one in gains] == [
        ("base", 0.0, 2), ("incumbent", 0.0, 2), ("base", 1.0, 2), ("base", 0.0, 1),
    ]  # fmt: skip
    assert [round(one.mean_acceptance_length.value, 3) for one in gains] == [0.5, 0.25, -1.0, -0.5]
    assert decide(found, gains, [], GATE).passed


def test_what_is_published_must_be_beaten_too() -> None:
    found = session()
    add(found, {"base": 4, "tuned": 6, "incumbent": 6})
    decision = decide(found, gains_of(found, GATE), [], GATE)
    assert decision.verdict == "no gain" and "what is published" in decision.reason


def test_greedy_answers_are_asked_for_where_they_are_compared() -> None:
    found = session()
    hot = found.config.model_copy(update={"temperature": 1.0, "lossless": True})
    found.config = hot
    assert found.temperatures() == [1.0, 0.0]
    found.config = hot.model_copy(update={"lossless": False})
    assert found.temperatures() == [1.0]
