"""What will be trained on, in which order, before anything is: rows of every optimizer step, and how they are dealt.

A step's rows depend on the seed and the token budget alone (`fastmtp.data.packing`). Processes share them out among
themselves, so a run gives the same losses, up to the order of sums, with any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastmtp.config import TrainConfig
from fastmtp.data.masks import require_supervision
from fastmtp.data.packing import fill_rate, pack, pack_epoch
from fastmtp.data.store import RowEntry

Group = list[RowEntry]


@dataclass(frozen=True)
class Plan:
    """The rows of every optimizer step in order, and after which steps the head is tried on held-out rows.

    `fill` is how full the steps of an epoch are, tokens over budget.
    """

    steps: tuple[Group, ...]
    validate_at: frozenset[int]
    rows: int
    tokens: int
    supervised: int
    held_out: int
    fill: float

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step."""
        return max(map(tokens_of, self.steps))


def make_plan(rows: Sequence[RowEntry], held_out: Sequence[RowEntry], config: TrainConfig) -> Plan:
    """The plan for these rows. Raises DataError when no token is supervised, or every one."""
    require_supervision(rows)
    lengths = [entry.length for entry in rows]
    steps: list[Group] = []
    ends = set()
    for epoch in range(config.epochs):
        packed = pack_epoch(lengths, config.batch_tokens, config.seed, epoch)
        fill = fill_rate(lengths, packed, config.batch_tokens)
        steps += [[rows[place] for place in batch] for batch in packed]
        ends.add(len(steps))
    steps = steps[: config.max_steps]
    if config.validate_every:
        ends |= set(range(config.validate_every, len(steps), config.validate_every))
    return Plan(
        steps=tuple(steps),
        validate_at=frozenset(end for end in ends if end < len(steps)) | {len(steps)},
        rows=len(rows),
        tokens=sum(map(tokens_of, steps)),
        supervised=sum(entry.supervised for entry in rows),
        held_out=len(held_out),
        fill=fill,
    )


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
    shares = [
        [[share[place] for place in group] for group in pack([entry.length for entry in share], budget)]
        for share in deal(entries, processes)
    ]
    rounds = max(map(len, shares))
    return [share + [[] for _ in range(rounds - len(share))] for share in shares]


def tokens_of(entries: Sequence[RowEntry]) -> int:
    """Tokens of some rows."""
    return sum(entry.length for entry in entries)
