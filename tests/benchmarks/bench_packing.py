"""Steps packed from rows as long as GSM8K's against their room, and the time a step waits for rows against its own.

Lengths are log-normal about 200 tokens, between 60 and 600. Rows lie in a store of H=512 on disk, whose pages are
dropped before each round; a step of 2,048 tokens trains a Qwen3-Next head with 8 experts and V=4,096, K=3. Beside it
is what the same steps wait when nothing is read ahead, and what writing and reading rows takes against plain writing
and reading of as many bytes.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fastmtp.config import TrainConfig
from fastmtp.data.packing import fill_rate, pack_epoch
from fastmtp.data.rows import PackedRows
from fastmtp.data.shards import Verifier
from fastmtp.data.store import RowEntry, RowStore, RowWriter
from fastmtp.stage import fsync_path
from fastmtp.training.loading import Loader
from fastmtp.training.plan import make_plan
from fastmtp.training.world import World
from tests.benchmarks.measure import Metric, median_seconds, metric
from tests.benchmarks.steps import Made, Sizes, make, train_step

SIZES = Sizes(2048, 4096)
VERIFIER = Verifier("bench", layers=2, hidden_size=SIZES.hidden)
ROWS, STEPS = 400, 6


def lengths(count: int) -> list[int]:
    chance = random.Random(0)
    return [min(600, max(60, round(chance.lognormvariate(5.25, 0.35)))) for _ in range(count)]


def make_rows() -> list[tuple[RowEntry, list[int]]]:
    chance = random.Random(1)
    return [
        (
            RowEntry(str(row), "train", length, length // 2, "stop"),
            [chance.randrange(SIZES.vocabulary) for _ in range(length)],
        )
        for row, length in enumerate(lengths(ROWS))
    ]


def write_rows(directory: Path, rows: list[tuple[RowEntry, list[int]]], states: torch.Tensor) -> None:
    """A store of rows whose states are these [longest row, H]."""
    with RowWriter(directory, VERIFIER, rows) as writer:
        for row, (_, ids) in enumerate(rows):
            writer.put(row, ids, states[: len(ids)])
        writer.close()


def drop_pages(directory: Path) -> None:
    """So that the next reading is from the disk."""
    for path in directory.iterdir():
        fsync_path(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def waiting(made: Made, directory: Path, *, ahead: bool) -> tuple[float, float]:
    """Seconds waited for rows and seconds in all, of STEPS steps."""
    store = RowStore(directory, VERIFIER)
    store.ahead = ahead
    plan = make_plan(store.split("train"), [], TrainConfig(epochs=1, batch_tokens=SIZES.tokens, max_steps=STEPS))
    drop_pages(directory)
    with Loader(store, plan.steps, World(TrainConfig(device="cpu")), SIZES.tokens) as loader:
        begun = time.monotonic()
        for step in range(STEPS):
            for rows in loader.take(step):
                assert rows
                train_step(Made(made.objective, rows.to(torch.device("cpu"), torch.float32)))
        return loader.waited, time.monotonic() - begun


def disk(
    directory: Path, made: list[tuple[RowEntry, list[int]]], states: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Rows read in a shuffled order, and the same bytes read end to end, both from the disk; likewise written."""
    data = os.urandom(sum(entry.length for entry, _ in made) * SIZES.hidden * 2)

    def rows() -> None:
        drop_pages(directory)
        store = RowStore(directory, VERIFIER)
        for batch in pack_epoch([entry.length for entry in store.entries], SIZES.tokens, 0, 0):
            PackedRows.pack(store.rows([store.entries[place] for place in batch]))

    def whole() -> None:
        drop_pages(directory)
        for path in directory.glob("*.safetensors"):
            path.read_bytes()

    def write() -> None:
        with tempfile.TemporaryDirectory(dir=directory.parent) as place:
            (Path(place) / "plain").write_bytes(data)
            fsync_path(Path(place) / "plain")

    def write_store() -> None:
        with tempfile.TemporaryDirectory(dir=directory.parent) as place:
            write_rows(Path(place), made, states)

    return {"rows": rows, "whole": whole, "write_store": write_store, "write": write}


def run() -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for budget in (2048, 4096, 16384):
        real = lengths(7473)
        empty = 1.0 - fill_rate(real, pack_epoch(real, budget, 0, 0), budget)
        found[f"room_left_empty_of_{budget}"] = metric(empty, "share", limit=0.05, goal=1.0)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "rows"
        directory.mkdir()
        rows, states = make_rows(), torch.randn(600, SIZES.hidden).bfloat16()
        write_rows(directory, rows, states)
        made = make(SIZES)
        waiting(made, directory, ahead=True)  # a warm-up
        for name, ahead in (("", True), ("_without_reading_ahead", False)):
            waited, seconds = waiting(made, directory, ahead=ahead)
            found[f"waiting_for_rows{name}"] = metric(
                waited / seconds, "share", limit=0.05, goal=1.0 if ahead else None
            )
        times = median_seconds(disk(directory, rows, states), repeats=3)
        found["reading_rows_over_plain_reading"] = metric(times["rows"], "s", peer=times["whole"])
        found["writing_rows_over_plain_writing"] = metric(times["write_store"], "s", peer=times["write"])
    return found
