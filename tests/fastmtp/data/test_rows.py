"""Packed rows: which target each origin has at each step, and that none crosses a row."""

from __future__ import annotations

import pytest
import torch

from fastmtp.data.rows import PackedRows

STEPS = 3


def rows_of(mask: list[int], lengths: tuple[int, ...]) -> PackedRows:
    count = len(mask)
    return PackedRows(torch.arange(count), torch.zeros(count, 1), torch.tensor(mask, dtype=torch.bool), lengths)


def by_hand(mask: list[int], lengths: tuple[int, ...], step: int) -> list[int]:
    """Origins t whose target x_{t+step+2} lies in the same row and is the assistant's."""
    found, start = [], 0
    for length in lengths:
        for place in range(length):
            if place + step + 2 < length and mask[start + place + step + 2]:
                found.append(start + place)
        start += length
    return found


def test_targets_are_exactly_the_assistants_tokens() -> None:
    """Case T3: ids 0..9, answer 5..9: step k at t targets t+k+2 and counts iff that token is the assistant's."""
    rows = rows_of([0] * 5 + [1] * 5, (10,))
    for step in range(STEPS):
        origins = rows.counted(step).nonzero().squeeze(1)
        assert rows.input_ids[origins + step + 2].tolist() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        ([0] * 5 + [1] * 5, (10,)),
        ([0, 1, 1, 1, 1] + [1, 1, 1, 1], (5, 4)),
        ([1] * 7, (1, 2, 4)),
        ([0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1], (6, 5)),
        ([1], (1,)),
    ],
)
def test_counted_equals_a_loop(mask: list[int], lengths: tuple[int, ...]) -> None:
    """Cases T3 and T4: the last k+2 positions of a row have no target, whatever the next row begins with."""
    rows = rows_of(mask, lengths)
    for step in range(STEPS):
        assert rows.counted(step).nonzero().squeeze(1).tolist() == by_hand(mask, lengths, step)


def test_places_start_again_in_each_row() -> None:
    rows = PackedRows.pack([(torch.arange(n), torch.zeros(n, 2), torch.ones(n, dtype=torch.bool)) for n in (3, 1, 2)])
    assert rows.positions().tolist() == [0, 1, 2, 0, 0, 1]
    assert rows.remaining().tolist() == [2, 1, 0, 0, 1, 0]
    assert rows.row_of().tolist() == [0, 0, 0, 1, 2, 2]


def test_parts_must_agree() -> None:
    with pytest.raises(AssertionError):
        PackedRows(torch.arange(3), torch.zeros(3, 1), torch.zeros(3, dtype=torch.bool), (2,))
