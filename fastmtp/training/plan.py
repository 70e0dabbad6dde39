"""What will be trained on, in which order, before anything is: rows of every optimizer step, and how they are dealt.

A step's rows depend on the seed and the token budget alone. Processes share them out among themselves, so a run gives
the same losses, up to the order of sums, with any number of processes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fastmtp.config import TrainConfig
from fastmtp.data.store import RowEntry
from fastmtp.errors import DataError

Group = list[RowEntry]


@dataclass(frozen=True)
class Plan:
    """The rows of every optimizer step in order, and after which steps the head is tried on held-out rows."""

    steps: tuple[Group, ...]
    validate_at: frozenset[int]
    rows: int
    tokens: int
    supervised: int
    held_out: int

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step."""
        return max(map(tokens_of, self.steps))


def make_plan(rows: Sequence[RowEntry], held_out: Sequence[RowEntry], config: TrainConfig) -> Plan:
    """The plan for these rows. Raises DataError when no token is supervised."""
    supervised = sum(entry.length - entry.prompt_length for entry in rows)
    if supervised == 0:
        raise DataError("No token is supervised: there is nothing to train on.", mend="Prepare more prompts.")
    steps: list[Group] = []
    ends = set()
    for epoch in range(config.epochs):
        order = list(rows)
        random.Random(f"{config.seed}:{epoch}").shuffle(order)  # noqa: S311
        steps += fill(order, config.batch_tokens)
        ends.add(len(steps))
    steps = steps[: config.max_steps]
    if config.validate_every:
        ends |= set(range(config.validate_every, len(steps), config.validate_every))
    return Plan(
        steps=tuple(steps),
        validate_at=frozenset(end for end in ends if end < len(steps)) | {len(steps)},
        rows=len(rows),
        tokens=sum(map(tokens_of, steps)),
        supervised=supervised,
        held_out=len(held_out),
    )


def fill(entries: Sequence[RowEntry], budget: int) -> list[Group]:
    """Consecutive rows in groups of up to `budget` tokens; a longer row stands alone."""
    groups: list[Group] = []
    tokens = budget
    for entry in entries:
        if tokens + entry.length > budget:
            groups.append([])
            tokens = 0
        groups[-1].append(entry)
        tokens += entry.length
    return groups


def deal(entries: Sequence[RowEntry], processes: int) -> list[Group]:
    """Share rows out among processes, about equally by tokens: longest first, each to whoever has least. Order is kept
    within a share."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for place in sorted(range(len(entries)), key=lambda place: (-entries[place].length, place)):
        least = loads.index(min(loads))
        shares[least].append(place)
        loads[least] += entries[place].length
    return [[entries[place] for place in sorted(share)] for share in shares]


def micro_batches(entries: Sequence[RowEntry], processes: int, budget: int) -> list[list[Group]]:
    """Per process, the groups it runs through the head one after the other: as many for each, empty ones at the end."""
    shares = [fill(share, budget) for share in deal(entries, processes)]
    rounds = max(map(len, shares))
    return [share + [[] for _ in range(rounds - len(share))] for share in shares]


def tokens_of(entries: Sequence[RowEntry]) -> int:
    """Tokens of some rows."""
    return sum(entry.length for entry in entries)
