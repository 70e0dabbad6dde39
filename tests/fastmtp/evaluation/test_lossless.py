"""Greedy answers with and without speculation: ties told from errors by the margin of the two tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fastmtp.evaluation.lossless import compare, describe, tie_margin
from fastmtp.evaluation.report import Losslessness

PROMPTS = [(1, 2), (3,), (4, 5), (6,)]
PLAIN = [(10, 11, 12), (10, 11), (10, 20, 30), (7, 8)]


class Asked:
    """A margin for each pair of tokens; remembers what was asked."""

    def __init__(self, margins: dict[tuple[int, int], float | None]) -> None:
        self.margins = margins
        self.calls: list[tuple[Sequence[int], int, int]] = []

    def __call__(self, prompt: Sequence[int], first: int, second: int) -> float | None:
        self.calls.append((list(prompt), first, second))
        return self.margins[first, second]


def compared(speculative: list[tuple[int, ...]], asked: Asked) -> Losslessness:
    return compare("tuned", "prompts", PROMPTS, PLAIN, speculative, asked, tie_margin("bfloat16"))


def test_identical() -> None:
    asked = Asked({})
    found = compared(PLAIN, asked)
    assert (found.identical, found.ties, found.errors, found.differences, asked.calls) == (4, 0, 0, [], [])
    assert describe(found) == "4 of 4 greedy answers of tuned on prompts are those of vLLM without speculation"


def test_the_first_difference_is_asked_for_and_a_tie_is_no_error() -> None:
    asked = Asked({(11, 99): 0.125})
    found = compared([PLAIN[0], (10, 99), PLAIN[2], PLAIN[3]], asked)
    assert asked.calls == [([3, 10], 11, 99)]
    assert (found.identical, found.ties, found.errors) == (3, 1, 0)
    assert found.differences[0].margin == 0.125 and found.differences[0].position == 1
    assert describe(found).endswith("1 part at a tie (at most 0.25 nats)")


def test_errors_come_before_ties_the_widest_first() -> None:
    asked = Asked({(12, 9): 0.01, (11, 99): 3.5, (20, 21): 8.0})
    found = compared([(10, 11, 9), (10, 99), (10, 21, 30), PLAIN[3]], asked)
    assert [(one.prompt, one.tie) for one in found.differences] == [(2, False), (1, False), (0, True)]
    assert found.errors == 2
    assert "2 part by more: answer 2, token 1: 20 without, 21 with speculation, 8.000 nats apart" in describe(found)


def test_an_answer_that_ends_early_is_an_error_with_nothing_to_ask() -> None:
    asked = Asked({})
    found = compared([(10, 11), *PLAIN[1:]], asked)
    assert asked.calls == [] and found.errors == 1
    first = found.differences[0]
    assert (first.plain, first.speculative, first.position, first.margin, first.tie) == (12, None, 2, None, False)


def test_a_margin_that_is_not_known_is_worse_than_any_other() -> None:
    found = compared([(10, 11, 9), (10, 99), PLAIN[2], PLAIN[3]], Asked({(12, 9): None, (11, 99): 5.0}))
    assert [one.prompt for one in found.differences] == [0, 1] and found.errors == 2


@pytest.mark.parametrize(
    ("dtype", "margin"), [("bfloat16", 0.25), ("float16", 0.03), ("float32", 1e-3), ("auto", 0.25)]
)
def test_the_tolerance_goes_by_the_dtype(dtype: str, margin: float) -> None:
    assert tie_margin(dtype) == margin
