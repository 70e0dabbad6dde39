"""Which acceptance figures may be compared at all.

The rate of the first position falls when K grows, a greedy drafter looks worse at temperature 1, other prompts, lengths
and versions of vLLM give other figures: what differs in more than the head says nothing about the head.
"""

from __future__ import annotations

from fastmtp.errors import InputError
from fastmtp.evaluation.report import Acceptance

# Field -> what people call it.
MUST_AGREE = {
    "set": "prompt set",
    "digest": "prompts",
    "num_speculative_tokens": "num_speculative_tokens",
    "temperature": "temperature",
    "draft_sampling": "draft sampling",
    "max_tokens": "max_tokens",
    "dtype": "dtype",
    "prefix_caching": "prefix caching",
    "vllm": "vLLM's version",
}


def differences(one: Acceptance, other: Acceptance) -> list[str]:
    """What keeps two figures from being compared: a phrase for each field in which they were taken differently."""
    return [
        f"{name} ({getattr(one, field)} against {getattr(other, field)})"
        for field, name in MUST_AGREE.items()
        if getattr(one, field) != getattr(other, field)
    ]


def require_comparable(one: Acceptance, other: Acceptance) -> None:
    """Raise InputError, naming the fields, where two figures were taken differently."""
    found = differences(one, other)
    if found:
        raise InputError(
            f"Acceptance of {one.head} and {other.head} cannot be compared: they differ in {', '.join(found)}.",
            mend="Measure both in one evaluation.",
        )
