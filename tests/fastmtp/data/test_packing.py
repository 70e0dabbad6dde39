"""Batches of whole rows: how full, whose order, and that they can be made again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmtp.data.packing import fill_rate, pack, pack_epoch

LENGTHS = st.lists(st.integers(1, 60), max_size=60)


@given(LENGTHS, st.integers(1, 100), st.integers(0, 9), st.integers(0, 9))
def test_every_row_is_in_one_batch_of_an_epoch(lengths: list[int], budget: int, seed: int, epoch: int) -> None:
    batches = pack_epoch(lengths, budget, seed, epoch)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    assert all(batch for batch in batches)
    assert all(len(batch) == 1 or sum(lengths[place] for place in batch) <= budget for batch in batches)
    assert batches == pack_epoch(lengths, budget, seed, epoch)


@given(LENGTHS, st.integers(1, 100))
def test_no_two_batches_would_fit_into_one(lengths: list[int], budget: int) -> None:
    """So at least half of the room is used, whatever the lengths."""
    loads = sorted(sum(lengths[place] for place in batch) for batch in pack(lengths, budget))
    assert len(loads) < 2 or loads[0] + loads[1] > budget


def test_an_epoch_has_an_order_of_its_own() -> None:
    lengths = [5 + number % 7 for number in range(100)]
    made = [pack_epoch(lengths, 40, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len({str(batches) for batches in made}) == 3


@pytest.mark.parametrize("budget", [2048, 4096, 16384])
def test_lengths_of_word_problems_fill_their_batches(budget: int) -> None:
    """Lengths like those of GSM8K: log-normal about 200 tokens, 60 to 600."""
    chance = random.Random(0)
    lengths = [min(600, max(60, round(chance.lognormvariate(5.25, 0.35)))) for _ in range(7000)]
    assert fill_rate(lengths, pack_epoch(lengths, budget, 0, 0), budget) > 0.97


def test_fill_is_tokens_over_room() -> None:
    assert fill_rate([5, 3, 20], [[0, 1], [2]], 10) == (8 + 10) / 20
    assert fill_rate([], [], 10) == 0.0


def test_many_rows_are_packed_in_no_time() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(50, 800) for _ in range(50_000)]
    assert fill_rate(lengths, pack_epoch(lengths, 16384, 0, 0), 16384) > 0.99
