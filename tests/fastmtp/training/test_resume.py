"""A run that was killed anywhere ends as one that was not: the same weights, rates and records, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fastmtp.errors import Interrupted, TrainingError
from fastmtp.extract import HEAD_FILE
from fastmtp.protocol import Measurement
from fastmtp.stage import sha256_file
from fastmtp.train import METRICS, saves_of
from fastmtp.training.engine import Engine
from fastmtp.training.loop import Run
from fastmtp.training.metrics import TIMES, Story
from fastmtp.training.saves import Saves, read_tensors
from tests.fastmtp.training.small import Job

# Two epochs of two steps; a save after each.
SHORT = {"epochs": 2, "batch_tokens": 240, "micro_tokens": 240, "save_every": 1}


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the curves takes longer than these runs."""
    monkeypatch.setattr("fastmtp.training.loop.plot_curves", lambda metrics, target, best_step: target.write_bytes(b""))


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


@pytest.fixture(scope="module")
def straight(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("straight") / "tuned"
    job.train(target, **SHORT)
    return target


def records(directory: Path) -> list[dict[str, float]]:
    """Figures of each step, without those of time."""
    lines = (directory / METRICS).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def require_same(found: Path, wanted: Path) -> None:
    assert sha256_file(found / HEAD_FILE) == sha256_file(wanted / HEAD_FILE)
    assert records(found) == records(wanted)
    assert not saves_of(found).exists()


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> Callable[[], int]:
    """Die at the start of the n-th call, from 0, that does work or writes. Returns how many calls there were."""
    calls = 0

    def wrap(owner: type, name: str) -> None:
        true = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls - 1 == moment:
                raise Killed
            return true(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (Engine, "step"), (Engine, "estimate"), (Saves, "save"), (Saves, "update"), (Story, "add"), (Story, "sync"),
    ):  # fmt: skip
        wrap(owner, name)
    return lambda: calls


def test_a_kill_at_any_moment_changes_nothing(
    job: Job, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case T9, also exactly at an epoch's end: before, between and after its save, its estimate and its record."""
    with monkeypatch.context() as patch:
        count = kill_at(patch, -1)
        job.train(tmp_path / "counted", **SHORT)
        moments = count()
    assert moments > 20
    for moment in range(moments):
        target = tmp_path / f"killed-{moment}"
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, moment)
            job.train(target, **SHORT)
        assert not target.exists()
        assert job.train(target, **SHORT).summary["steps"] == 4
        require_same(target, straight)


@pytest.mark.parametrize("changes", [{"optimizer": "muon"}, {"dtype": "bfloat16", "loss": {"ce": 0.5, "tv": 0.5}}])
def test_every_kind_of_run_resumes(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    job.train(tmp_path / "straight", max_steps=4, **changes)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 11)
        job.train(tmp_path / "killed", max_steps=4, save_every=1, **changes)
    assert list(saves_of(tmp_path / "killed").glob("last-*"))
    job.train(tmp_path / "killed", max_steps=4, **changes)
    require_same(tmp_path / "killed", tmp_path / "straight")


def command(job: Job, directory: Path, target: Path, **changes: Any) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "fastmtp", *job.command(directory, target, **changes)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def wait_for_steps(target: Path, count: int, child: subprocess.Popen[bytes]) -> None:
    """Until the child has written records of so many steps."""
    metrics = saves_of(target) / METRICS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") <= count:
        assert child.poll() is None, "ended before it could be stopped"
        time.sleep(0.005)


@pytest.fixture
def long(job: Job, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Enough steps that a signal finds the run under way."""
    yield {"epochs": 10, "save_every": 3}


def test_kill_9_and_sigterm_in_a_real_process(job: Job, tmp_path: Path, long: dict[str, Any]) -> None:
    """Three processes for one run: killed, stopped, finished; the step at which each ends is random."""
    job.train(tmp_path / "straight", **long)
    target = tmp_path / "tuned"
    stops = sorted(random.sample(range(1, 30), 2))
    child = command(job, tmp_path, target, **long)
    wait_for_steps(target, stops[0], child)
    child.kill()
    child.communicate()
    assert not target.exists()

    child = command(job, tmp_path, target, **long)
    wait_for_steps(target, stops[1], child)
    begun = time.monotonic()
    child.terminate()
    out, _ = child.communicate(timeout=30)
    assert time.monotonic() - begun < 10
    assert child.returncode == 128 + signal.SIGTERM
    error = json.loads(out)["error"]
    assert error["code"] == "interrupted" and "Stopped by SIGTERM after step" in error["message"], stops
    assert not target.exists()

    summary = job.train(target, **long).summary
    assert summary["steps"] == 40
    require_same(target, tmp_path / "straight")


def test_a_signal_breaks_off_a_long_pass_and_keeps_what_was_done(
    job: Job, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass of the second step never ends by itself; the first step is saved all the same."""
    target, before = tmp_path / "tuned", signal.getsignal(signal.SIGTERM)
    passes = 0
    true = Engine._place

    def endless(self: Engine, rows: Any) -> Any:
        nonlocal passes
        passes += self._optimizers.state() != {}
        if passes:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return true(self, rows)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="Stopped by SIGTERM after step 1 of 4"):
        patch.setattr(Engine, "_place", endless)
        job.train(target, **SHORT)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [path.name for path in saves_of(target).glob("last-*")] == ["last-00000001"]
    job.train(target, **SHORT)
    require_same(target, straight)


def scripted(monkeypatch: pytest.MonkeyPatch, lengths: list[float]) -> None:
    """Let the held-out estimates be these, one after the other."""
    found = iter(lengths)

    def estimate(self: Engine, entries: object) -> Measurement:
        length = next(found)
        return Measurement(acceptance=[length - 1, 0.0, 0.0], mean_acceptance_length=length, drafts=10)

    monkeypatch.setattr(Engine, "estimate", estimate)


def test_the_best_head_and_its_baseline_are_remembered(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case T9: after a resume, a worse head than the best before it does not become the best."""
    target = tmp_path / "tuned"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        scripted(patch, [1.4, 1.8, 1.6])
        kill_in_third_epoch(patch)
        job.train(target)
    (best,) = saves_of(target).glob("best-*")
    assert best.name == "best-00000004"
    weights = read_tensors(best)
    scripted(monkeypatch, [1.7])
    summary = job.train(target).summary
    assert [estimate["mean_acceptance_length"] for estimate in summary["estimates"]] == [1.4, 1.8, 1.6, 1.7]
    assert (summary["best_step"], summary["best"]["mean_acceptance_length"]) == (4, 1.8)
    stored = load_file(target / HEAD_FILE)["mtp.fc.weight"]
    assert stored.equal(weights["head/fc.weight"].to(stored.dtype))


def kill_in_third_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Engine.step

    def step(self: Engine, entries: Any, number: int, total: int) -> Any:
        if number == 9:
            raise Killed
        return true(self, entries, number, total)

    monkeypatch.setattr(Engine, "step", step)


def test_a_head_that_only_gets_worse_comes_out_as_it_went_in(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [1.9, 1.1, 1.2, 1.3])
    summary = job.train(tmp_path / "tuned").summary
    assert (summary["best_step"], summary["tensors_changed_as_stored"]) == (0, 0)
    assert summary["tensors_moved"] == summary["tensors"] > 0
    assert sha256_file(tmp_path / "tuned" / HEAD_FILE) == sha256_file(job.head / HEAD_FILE)


def test_a_run_that_is_not_through_never_ends_as_finished(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case T9: whatever makes the loop end early, there is no result."""
    monkeypatch.setattr(Run, "_go", lambda self: None)
    with pytest.raises(TrainingError, match="Only 0 of 4 steps were done"):
        job.train(tmp_path / "tuned", **SHORT)
    assert not (tmp_path / "tuned").exists()


def test_another_configuration_starts_anew(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: Path
) -> None:
    target = tmp_path / "tuned"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_in_third_epoch(patch)
        job.train(target, lr=5e-3)
    assert list(saves_of(target).glob("last-*"))
    job.train(target, **SHORT)
    require_same(target, straight)
