"""Saves appear whole or not at all, and only whole ones are gone on from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastmtp.config import TrainConfig
from fastmtp.errors import InputError
from fastmtp.protocol import Measurement
from fastmtp.training.saves import STATE, Estimate, Saves, State, claim, held, read_tensors
from fastmtp.training.world import World


def state(step: int, best_step: int = 0) -> State:
    found = Measurement(acceptance=[0.5], mean_acceptance_length=1.5, drafts=7)
    return State(step=step, steps=10, best_step=best_step, estimates=[Estimate(step=0, found=found)])


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    claim(tmp_path / "saves", "one")
    return Saves(tmp_path / "saves", World(TrainConfig(device="cpu")))


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"head/a": torch.full((3, 2), value), "optimizer/a/step": torch.tensor(value)}


def test_the_newest_save_is_read_back_and_the_one_before_is_gone(saves: Saves) -> None:
    assert saves.last() is None
    for step in (3, 4):
        saves.save("last", state(step), tensors(step))
    found = saves.last()
    assert found is not None
    path, last = found
    assert last == state(4)
    read = read_tensors(path)
    assert read.keys() == tensors(4).keys()
    assert all(read[key].equal(value) and read[key].shape == value.shape for key, value in tensors(4).items())
    assert [path.name for path in saves.root.glob("last-*")] == ["last-00000004"]


def half_written(path: Path) -> None:
    (path / STATE).unlink()


def torn_state(path: Path) -> None:
    (path / STATE).write_bytes((path / STATE).read_bytes()[:40])


def truncated(path: Path) -> None:
    part = path / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])


def garbage(path: Path) -> None:
    part = path / "part-00000.safetensors"
    part.write_bytes(b"\xff" * part.stat().st_size)


def missing(path: Path) -> None:
    (path / "part-00000.safetensors").unlink()


@pytest.mark.parametrize("damage", [half_written, torn_state, truncated, garbage, missing])
def test_a_save_that_is_not_whole_is_ignored(saves: Saves, damage: Callable[[Path], None]) -> None:
    """Case T9: the one before it is used where it is still there."""
    saves.save("last", state(3), tensors(3))
    kept = saves.root / "last-00000003"
    kept.rename(saves.root / "kept")
    saves.save("last", state(4), tensors(4))
    damage(saves.root / "last-00000004")
    assert saves.last() is None
    (saves.root / "kept").rename(kept)
    found = saves.last()
    assert found is not None and found[1].step == 3


def test_a_save_whose_best_head_is_gone_is_ignored(saves: Saves) -> None:
    saves.save("best", state(2), tensors(2))
    saves.save("last", state(3, best_step=2), tensors(3))
    assert saves.last() is not None
    truncated(saves.best(2))
    assert saves.last() is None


def test_the_best_head_stays_until_another_is_recorded(saves: Saves) -> None:
    saves.save("best", state(2), tensors(2))
    saves.save("last", state(4, best_step=2), tensors(4))
    saves.save("best", state(4), tensors(4))
    assert saves.best(2).is_dir() and saves.best(4).is_dir()
    saves.update(state(4, best_step=4))
    assert not saves.best(2).exists()
    found = saves.last()
    assert found is not None and found[1].best_step == 4


def test_saves_of_another_run_are_removed(saves: Saves) -> None:
    saves.save("last", state(3), tensors(3))
    claim(saves.root, "one")
    assert saves.last() is not None
    claim(saves.root, "two")
    assert saves.last() is None


def test_a_run_waits_for_one_that_is_about_to_end_and_not_for_ever(
    saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
import fcntl, time
file = open({str(saves.root / ".lock")!r}, "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(1.0)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with monkeypatch.context() as patch, pytest.raises(InputError, match="still training"):
            patch.setattr("fastmtp.training.saves.LOCK_SECONDS", 0.1)
            with held(saves.root):
                pass
        with held(saves.root):
            assert other.wait(timeout=5) == 0


def test_nothing_is_pickled(saves: Saves) -> None:
    saves.save("last", state(3), tensors(3))
    files = [path for path in saves.root.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_bytes())


def test_a_kill_while_saving_leaves_the_save_before(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    saves.save("last", state(3), tensors(3))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("fastmtp.training.saves.save_file", full)
        saves.save("last", state(4), tensors(4))
    found = saves.last()
    assert found is not None and found[1].step == 3
    saves.save("last", state(4), tensors(4))
    assert [path.name for path in saves.root.iterdir() if path.is_dir()] == ["last-00000004"]
