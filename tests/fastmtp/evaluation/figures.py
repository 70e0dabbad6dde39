"""Figures for tests, as an evaluation would have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastmtp.evaluation.report import Acceptance, Estimate, Gain, Head

TAKEN: dict[str, Any] = {
    "set": "prompts", "temperature": 0.0, "num_speculative_tokens": 2, "draft_sampling": "greedy", "max_tokens": 96,
    "concurrency": 64, "dtype": "bfloat16", "prefix_caching": False, "vllm": "0.32.0", "digest": "d", "answers": 10,
    "answer_tokens": 1000, "seconds": 10.0, "per_request": True, "server": 0,
}  # fmt: skip


def acceptance(head: Head, rates: Sequence[float], drafts: int = 5000, **other: object) -> Acceptance:
    """Figures with these rates."""
    return Acceptance(
        head=head, drafts=drafts, accepted=[round(rate * drafts) for rate in rates],
        rates=[Estimate(value=rate) for rate in rates],
        mean_acceptance_length=Estimate(value=1 + sum(rates)), **{**TAKEN, **other},
    )  # fmt: skip


def gain(
    length: float, low: float | None, rates: Sequence[float] = (0.1, 0.1), over: Head = "base", name: str = "prompts"
) -> Gain:
    """A gain with a lower bound; the interval is symmetric."""
    high = None if low is None else 2 * length - low
    return Gain(
        head="tuned", over=over, set=name, temperature=0.0, num_speculative_tokens=2,
        mean_acceptance_length=Estimate(value=length, low=low, high=high),
        rates=[Estimate(value=rate) for rate in rates], paired=64,
    )  # fmt: skip
