"""Rows of the steps to come, read while the present step is computed, so that training does not wait for the disk.

A step's rows are a function of its number, so reading ahead changes nothing but time. One step is read ahead, by one
thread; where the rows' states are computed rather than read (`Rows.ahead`), nothing is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from fastmtp.data.rows import PackedRows
from fastmtp.data.store import RowEntry, Rows
from fastmtp.training.plan import micro_batches
from fastmtp.training.world import World

Batches = list[PackedRows | None]


class Loader:
    """This process's share of every step, packed.

    Args:
        steps: the entries of every step of the run.
        budget: tokens of a batch that runs through the head at once.

    Attributes:
        waited: seconds that `take` took so far.
    """

    def __init__(self, rows: Rows, steps: Sequence[Sequence[RowEntry]], world: World, budget: int) -> None:
        self._rows, self._steps, self._budget = rows, steps, budget
        self._rank, self._processes = world.rank, world.size
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rows") if rows.ahead else None
        self._ahead: tuple[int, Future[Batches]] | None = None
        self.waited = 0.0

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads:
            self._threads.shutdown(cancel_futures=True)

    def take(self, step: int) -> Batches:
        """The batches of a step, from 0; as many in every process, None where this one has no rows left."""
        begun = time.monotonic()
        ahead = self._ahead
        found = ahead[1].result() if ahead and ahead[0] == step else self._load(step)
        self._ahead = None
        if self._threads and step + 1 < len(self._steps):
            self._ahead = step + 1, self._threads.submit(self._load, step + 1)
        self.waited += time.monotonic() - begun
        return found

    def pack(self, entries: Sequence[RowEntry]) -> PackedRows | None:
        """Any rows, read now."""
        return PackedRows.pack(self._rows.rows(entries)) if entries else None

    def share(self, entries: Sequence[RowEntry]) -> list[list[RowEntry]]:
        """This process's share of any rows, in groups that run through the head at once."""
        return micro_batches(entries, self._processes, self._budget)[self._rank]

    def _load(self, step: int) -> Batches:
        return [self.pack(part) for part in self.share(self._steps[step])]
