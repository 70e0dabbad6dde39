"""Several processes under torchrun give what one gives, stop together, and may take over from each other."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fastmtp.config import TrainConfig
from fastmtp.errors import ConfigError, TrainingError
from fastmtp.extract import HEAD_FILE
from fastmtp.train import METRICS, saves_of
from fastmtp.training.engine import Engine
from fastmtp.training.metrics import TIMES
from fastmtp.training.world import count_processes, pick_device
from tests.fastmtp.training.small import SMALL, Job

RUN = {"epochs": 8, "save_every": 3}


@pytest.fixture(scope="module")
def one(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("one") / "tuned"
    job.train(target, **RUN)
    return target


def require_close(found: Path, wanted: Path) -> None:
    """The same steps, each with losses, gradient norms and rates within 1e-5, and estimates that agree exactly."""
    first, second = (
        [json.loads(line) for line in (path / METRICS).read_text().splitlines()] for path in (found, wanted)
    )
    assert [record["step"] for record in first] == [record["step"] for record in second]
    for mine, other in zip(first, second, strict=True):
        assert mine.keys() == other.keys()
        for key in mine.keys() - TIMES:
            assert mine[key] == pytest.approx(other[key], abs=1e-5), (mine["step"], key)
    for key, value in load_file(wanted / HEAD_FILE).items():
        assert (load_file(found / HEAD_FILE)[key].float() - value.float()).abs().max() < 0.01


def test_two_processes_are_stopped_and_one_goes_on(job: Job, one: Path, tmp_path: Path) -> None:
    """DDP over gloo; SIGTERM to the command reaches every process, which save together."""
    target = tmp_path / "tuned"
    argv = [sys.executable, "-m", "fastmtp", *job.command(tmp_path, target, **RUN, processes=2)]
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = saves_of(target) / METRICS
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert child.poll() is None, "ended before it could be stopped"
        time.sleep(0.01)
    begun = time.monotonic()
    child.terminate()
    child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - begun < 12
    outcomes = [json.loads(path.read_bytes()) for path in sorted(saves_of(target).glob("outcome-*.json"))]
    assert [outcome["code"] for outcome in outcomes] == ["interrupted"] * 2
    (last,) = saves_of(target).glob("last-*")
    done = int(last.name.removeprefix("last-"))
    assert f"Stopped by SIGTERM after step {done} of 32" in outcomes[0]["message"]
    assert not target.exists()
    assert job.train(target, **RUN).summary["processes"] == 1
    require_close(target, one)


@pytest.mark.parametrize(("last", "status"), [(True, 0), (False, -signal.SIGTERM)])
def test_one_of_several_still_says_how_it_ended_when_the_launcher_signals_again(last: bool, status: int) -> None:
    program = (
        "import os, signal\n"
        "from fastmtp.training.stopping import StopSignals\n"
        f"with StopSignals(last={last}) as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(stop.number)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "15\n" if last else "")


def test_two_processes_with_shards_take_over_from_one(
    job: Job, one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP: each process holds a part of weights, gradients and optimizer state."""
    true = Engine.step

    def stop(self: Engine, entries: Any, number: int, total: int) -> Any:
        if number == 16:
            raise KeyError("gone")
        return true(self, entries, number, total)

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(Engine, "step", stop)
        job.train(tmp_path / "tuned", **RUN)
    (last,) = saves_of(tmp_path / "tuned").glob("last-*")
    assert [path.name for path in last.glob("part-*")] == ["part-00000.safetensors"]
    summary = job.train(tmp_path / "tuned", **RUN, processes=2, shard=True).summary
    assert summary["processes"] == 2
    require_close(tmp_path / "tuned", one)


def test_what_stops_a_process_is_said_by_the_command(job: Job, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="mis-read") as caught:
        job.train(tmp_path / "t", processes=2, allow_untrained_head=False)
    assert caught.value.code == "training_failed" and caught.value.exit_code == 1
    assert not (tmp_path / "t").exists()


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device") as caught:
        pick_device(TrainConfig(device="cuda"))
    assert caught.value.pointer == "/train/device"
    assert count_processes(TrainConfig(device="auto")) == 1
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert count_processes(TrainConfig()) == 2
    assert count_processes(SMALL) == 1
    with pytest.raises(ConfigError, match="2 CUDA devices"):
        count_processes(TrainConfig(processes=4))


def test_muon_does_not_go_with_shards() -> None:
    with pytest.raises(ValueError, match="Muon needs whole matrices"):
        TrainConfig(optimizer="muon", shard=True)
