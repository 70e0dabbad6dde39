"""Rows read ahead: the same batches, in the step that they belong to, and time that is accounted for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from fastmtp.acceptance import Walk
from fastmtp.config import TrainConfig
from fastmtp.data.rows import PackedRows
from fastmtp.data.store import Row, RowEntry
from fastmtp.errors import IntegrityError
from fastmtp.training.engine import Engine
from fastmtp.training.loading import Loader
from fastmtp.training.objective import Objective
from fastmtp.training.stopping import StopSignals
from fastmtp.training.world import World
from tests.fastmtp.fixtures import SIZES, random_head

STEPS = [[RowEntry(f"{step}-{row}", "train", 4 + row, 2, "stop") for row in range(5)] for step in range(4)]


class SlowRows:
    """Rows that take 0.2 s a time, and say in which thread."""

    def __init__(self, *, ahead: bool, broken: str = "") -> None:
        self.entries = [entry for step in STEPS for entry in step]
        self.ahead, self._broken = ahead, broken
        self.threads: list[str] = []
        self.read = threading.Semaphore(0)

    def split(self, name: str) -> list[RowEntry]:
        return [entry for entry in self.entries if entry.split == name]

    def rows(self, entries: Sequence[RowEntry]) -> list[Row]:
        self.threads.append(threading.current_thread().name)
        time.sleep(0.2)
        self.read.release()
        if any(entry.key == self._broken for entry in entries):
            raise IntegrityError(f"{self._broken} is broken")
        return [self.row(entry) for entry in entries]

    def row(self, entry: RowEntry) -> Row:
        step, row = (int(part) for part in entry.key.split("-"))
        return (
            torch.full((entry.length,), 10 * step + row),
            torch.zeros(entry.length, 3),
            torch.ones(entry.length).bool(),
        )

    def answer_ids(self, entry: RowEntry) -> list[int]:
        return []


def loader(rows: SlowRows) -> Loader:
    return Loader(rows, STEPS, World(TrainConfig(device="cpu")), budget=100)


def first(batches: list[PackedRows | None]) -> list[int]:
    (rows,) = batches
    assert rows
    return sorted(set(rows.input_ids.tolist()))


def test_the_next_step_is_read_while_this_one_is_computed() -> None:
    rows = SlowRows(ahead=True)
    with loader(rows) as made:
        for step in range(4):
            waited = made.waited
            assert first(made.take(step)) == [10 * step + row for row in range(5)]
            assert (made.waited - waited < 0.1) is (step > 0)
            for _ in range(2 if step == 0 else step < 3):  # as long as it takes to compute
                rows.read.acquire()
    assert [name.startswith("rows") for name in rows.threads] == [False, True, True, True]


def test_a_run_that_goes_on_elsewhere_gets_that_steps_rows() -> None:
    with loader(SlowRows(ahead=True)) as made:
        for step in (2, 0, 3, 3):
            assert first(made.take(step)) == [10 * step + row for row in range(5)]


def test_rows_whose_states_are_computed_are_not_read_ahead() -> None:
    rows = SlowRows(ahead=False)
    with loader(rows) as made:
        for step in range(2):
            made.take(step)
        assert made.waited > 0.39
    assert rows.threads == [threading.current_thread().name] * 2


def test_a_row_that_does_not_read_stops_the_step_that_it_belongs_to() -> None:
    with loader(SlowRows(ahead=True, broken="1-2")) as made:
        made.take(0)
        with pytest.raises(IntegrityError, match="1-2 is broken"):
            made.take(1)


def test_an_estimate_walks_every_answer_of_a_row() -> None:
    """Two answers in one row: decoding begins anew before each, and ends with it."""
    entry = RowEntry("0-0", "holdout", 16, 3, "stop", spans=((3, 8), (11, 16)))
    ids, mask = torch.arange(16) % 5, torch.tensor([3 <= place < 8 or place >= 11 for place in range(16)])

    class OneRow(SlowRows):
        def row(self, entry: RowEntry) -> Row:
            return ids, states, mask

    head = random_head("qwen3.5")
    states, embedding, output = (torch.randn(count, SIZES["hidden_size"]) for count in (16, 5, 5))
    config, world = TrainConfig(device="cpu"), World(TrainConfig(device="cpu"))
    objective = Objective(head, embedding, output, config)
    with Loader(OneRow(ahead=False), [], world, budget=100) as made:
        found = Engine(objective, made, config, world, StopSignals()).estimate([entry])
        _, hits = objective(made.pack([entry]))
    walk = Walk(config.num_steps)
    for begin, end in entry.answers:
        walk.add(hits.tolist(), begin - 1, end)
    assert found == walk.measurement() and found.drafts >= 4
