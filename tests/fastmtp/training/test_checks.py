"""What stops a run: a head that was mis-read, a loss that is no number, a tensor that did not move."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastmtp.errors import InputError, TrainingError
from fastmtp.extract import HEAD_FILE
from fastmtp.train import saves_of
from fastmtp.training.checks import guess_cost, require_moved, require_well_read
from fastmtp.training.engine import Engine
from fastmtp.training.objective import Objective
from tests.fastmtp.training.small import Job, copy_head


@pytest.fixture(scope="module")
def tuned(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that predicts."""
    target = tmp_path_factory.mktemp("tuned") / "head"
    summary = job.train(target, epochs=8).summary
    assert summary["best"]["acceptance"][0] > 0.5
    return target


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A head with other tensors, as a tool that gets something wrong would leave it."""
    copy_head(source, target)
    tensors = load_file(source / HEAD_FILE)
    change(tensors)
    save_file(tensors, target / HEAD_FILE, metadata={"format": "pt"})
    return target


def swapped(tensors: dict[str, Tensor]) -> None:
    """The projection's halves, [hidden, embedding] for [embedding, hidden]."""
    tensors["mtp.fc.weight"] = torch.cat(tensors["mtp.fc.weight"].chunk(2, 1)[::-1], 1)


def plain_norms(tensors: dict[str, Tensor]) -> None:
    """Offsets from 1 taken for gains."""
    for key in tensors:
        if "norm" in key:
            tensors[key] -= 1


def not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors["mtp.norm.weight"][0] = float("nan")


def test_a_head_that_predicts_is_let_through(job: Job, tuned: Path, tmp_path: Path) -> None:
    summary = job.train(tmp_path / "t", head=tuned, allow_untrained_head=False, max_steps=1).summary
    assert summary["estimates"][0]["acceptance_0"] > 0.5


@pytest.mark.parametrize("change", [swapped, plain_norms, not_a_number])
def test_a_mis_read_head_stops_the_run(
    job: Job, tuned: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None]
) -> None:
    """Case T1: the untouched head must beat a guess by frequency on real rows."""
    head = changed(tuned, tmp_path / "head", change)
    with pytest.raises(TrainingError, match="mis-read.*fastmtp inspect.*allow_untrained_head"):
        job.train(tmp_path / "t", head=head, allow_untrained_head=False, max_steps=1)
    assert not (tmp_path / "t").exists()


def test_an_untrained_head_stops_the_run_unless_it_is_meant(job: Job, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="never trained"):
        job.train(tmp_path / "t", allow_untrained_head=False, max_steps=1)
    assert job.train(tmp_path / "t", max_steps=1).summary["steps"] == 1


def test_a_guess_by_frequency_costs_the_entropy_and_at_most_log_v() -> None:
    assert guess_cost([0] * 500 + [1] * 500, [0, 1], 4) == pytest.approx(math.log(2), rel=0.01)
    assert guess_cost([], [0, 1, 2], 1000) == pytest.approx(math.log(1000))
    assert guess_cost([5] * 10, [1, 2], 1000) == math.log(1000)


def test_the_ceiling_is_below_the_guess() -> None:
    require_well_read(2.6, 3.0, 0.1)
    for loss in (2.8, float("nan"), float("inf")):
        with pytest.raises(TrainingError, match="mis-read"):
            require_well_read(loss, 3.0, 0.1)


def test_a_loss_that_is_not_finite_stops_before_it_is_applied(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step: what was saved after the second is sound, and the reason names the step and the mend."""
    true = Objective.forward
    steps = 0

    def forward(self: Objective, rows: Any, totals: Any = None) -> Any:
        loss, sums = true(self, rows, totals)
        return (loss * float("nan"), sums) if steps == 3 else (loss, sums)

    step = Engine.step

    def counted(self: Engine, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(self, *args)

    monkeypatch.setattr(Objective, "forward", forward)
    monkeypatch.setattr(Engine, "step", counted)
    with pytest.raises(TrainingError, match=r"At step 3, with rate .* norm nan\. Lower train\.lr"):
        job.train(tmp_path / "t", save_every=1)
    assert not (tmp_path / "t").exists()
    (last,) = saves_of(tmp_path / "t").glob("last-*")
    assert last.name == "last-00000002"
    assert all(value.isfinite().all() for value in load_file(last / "part-00000.safetensors").values())


def test_a_tensor_that_did_not_move_stops_the_run(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case T5, in the loop: one tensor gets no gradient."""
    true = Engine._gradients

    def cut(self: Engine, entries: Any) -> Any:
        sums = true(self, entries)
        self._head.norm.weight.grad = None
        return sums

    monkeypatch.setattr(Engine, "_gradients", cut)
    with pytest.raises(TrainingError, match=r"1 of 15 tensors did not move in training, norm\.weight first"):
        job.train(tmp_path / "t", max_steps=2)
    assert not (tmp_path / "t").exists()


def test_how_far_tensors_moved_is_counted() -> None:
    before = {"a": torch.zeros(2), "b": torch.ones(2), "buffer": torch.ones(1)}
    after = {"a": torch.tensor([0.0, 0.5]), "b": torch.tensor([1.25, 1.0])}
    found = require_moved(before, after, ["a", "b"])
    assert found == {"tensors": 2, "tensors_moved": 2, "max_change": 0.5}


def test_too_little_memory_or_disk_is_said_before_the_start(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        available = 1000

    with monkeypatch.context() as patch, pytest.raises(InputError, match="before its first pass.*train.shard"):
        patch.setattr("fastmtp.training.memory.psutil.virtual_memory", Memory)
        job.train(tmp_path / "t")

    class Disk:
        free = 1000

    with monkeypatch.context() as patch, pytest.raises(InputError, match="saves of this run take.*Free space"):
        patch.setattr("fastmtp.training.memory.shutil.disk_usage", lambda path: Disk)
        job.train(tmp_path / "t")
    assert not (tmp_path / "t").exists()
