"""Which rows make which step, and who takes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmtp.config import TrainConfig
from fastmtp.data.store import RowEntry
from fastmtp.errors import DataError
from fastmtp.training.plan import deal, make_plan, micro_batches, tokens_of


def entries(lengths: list[int], prompt: int = 1) -> list[RowEntry]:
    return [RowEntry(f"row-{place}", "train", length, prompt, "stop") for place, length in enumerate(lengths)]


@given(st.lists(st.integers(2, 50), min_size=1, max_size=40), st.integers(1, 9), st.integers(8, 100))
def test_every_row_is_dealt_once_and_everyone_makes_as_many_passes(
    lengths: list[int], processes: int, budget: int
) -> None:
    rows = entries(lengths)
    batches = micro_batches(rows, processes, budget)
    assert len(batches) == processes
    assert len({len(share) for share in batches}) == 1
    dealt = [entry for share in batches for group in share for entry in group]
    assert sorted(dealt, key=lambda entry: entry.key) == sorted(rows, key=lambda entry: entry.key)
    assert all(len(group) == 1 or tokens_of(group) <= budget for share in batches for group in share)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=40), st.integers(1, 9))
def test_shares_are_about_equal(lengths: list[int], processes: int) -> None:
    loads = [tokens_of(share) for share in deal(entries(lengths), processes)]
    assert max(loads) - min(loads) <= max(lengths)


def test_steps_fill_the_budget_and_each_epoch_has_its_own_order() -> None:
    rows = entries([10] * 12)
    plan = make_plan(rows, rows[:2], TrainConfig(epochs=2, batch_tokens=40))
    assert [tokens_of(step) for step in plan.steps] == [40] * 6
    assert plan.validate_at == {3, 6}
    first, second = ([entry.key for step in part for entry in step] for part in (plan.steps[:3], plan.steps[3:]))
    assert sorted(first) == sorted(second) == sorted(entry.key for entry in rows)
    assert first != second
    assert (plan.tokens, plan.rows, plan.held_out) == (240, 12, 2)


def test_the_order_depends_on_nothing_but_the_seed() -> None:
    rows, config = entries(list(range(5, 25))), {"batch_tokens": 64}
    plans = [make_plan(rows, [], TrainConfig(**config, processes=count, micro_tokens=64)) for count in (1, 4)]
    assert plans[0] == plans[1]
    assert make_plan(rows, [], TrainConfig(**config, seed=1)).steps != plans[0].steps


def test_a_cut_plan_ends_with_an_estimate() -> None:
    plan = make_plan(entries([10] * 12), [], TrainConfig(epochs=2, batch_tokens=40, max_steps=4, validate_every=2))
    assert (len(plan.steps), plan.validate_at) == (4, {2, 3, 4})


def test_rows_without_an_answer_are_refused() -> None:
    with pytest.raises(DataError, match="nothing to train on"):
        make_plan(entries([10, 10], prompt=10), [], TrainConfig())


def test_rows_that_are_all_answer_are_refused() -> None:
    """Case D1: masks of ones over the whole set are no masks."""
    with pytest.raises(DataError, match="All 20 tokens are supervised"):
        make_plan(entries([10, 10], prompt=0), [], TrainConfig())
