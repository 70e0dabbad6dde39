"""Rows put together up to a budget of tokens, whole rows only, with little of it left empty.

Best fit: each row goes where it leaves the least room, so with rows much shorter than the budget nearly all of it is
used. Nothing but lengths, budget, seed and epoch decides, so batch i of an epoch can be made again at any time: a run
that goes on where it was killed trains on the same batches. Loads no torch.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterable, Sequence


def pack(lengths: Sequence[int], budget: int, order: Iterable[int] | None = None) -> list[list[int]]:
    """Places of rows in groups of up to `budget` tokens; a row longer than that stands alone.

    Args:
        lengths: tokens of each row, at least 1.
        order: in which rows are put in; longest first when unset, which leaves least room.

    Returns:
        Groups in the order in which they were begun; within each, places in ascending order.
    """
    if order is None:
        order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    least = min(lengths, default=1)
    groups: list[list[int]] = []
    open_groups: list[tuple[int, int]] = []  # (room, group), ascending; those with no room for any row are left out
    for place in order:
        found = bisect.bisect_left(open_groups, (lengths[place], 0))
        if found < len(open_groups):
            room, group = open_groups.pop(found)
        else:
            room, group = budget, len(groups)
            groups.append([])
        groups[group].append(place)
        if room - lengths[place] >= least:
            bisect.insort(open_groups, (room - lengths[place], group))
    return [sorted(group) for group in groups]


def pack_epoch(lengths: Sequence[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch: rows are put in, and batches taken, in an order that is the epoch's own."""
    chance = random.Random(f"{seed}:{epoch}")  # noqa: S311
    order = list(range(len(lengths)))
    chance.shuffle(order)
    batches = pack(lengths, budget, order)
    chance.shuffle(batches)
    return batches


def fill_rate(lengths: Sequence[int], groups: Sequence[Sequence[int]], budget: int) -> float:
    """Tokens over the room of all groups; one that a longer row has to itself counts as full."""
    filled = [min(budget, sum(lengths[place] for place in group)) for group in groups]
    return sum(filled) / (budget * len(groups)) if groups else 0.0
