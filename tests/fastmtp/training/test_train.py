"""What the stage promises: a head that learned, the verifier as it was, a story of it, a plan before it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastmtp.config import TrainConfig
from fastmtp.errors import ConfigError, DataError
from fastmtp.extract import HEAD_FILE
from fastmtp.stage import sha256_file
from fastmtp.train import METRICS, saves_of
from fastmtp.training.engine import Engine
from fastmtp.training.metrics import TIMES, MetricsLog, duration, note
from tests.fastmtp.fixtures import write_checkpoint
from tests.fastmtp.training.small import Job


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_learns_the_verifiers_tokens(job: Job, tmp_path: Path) -> None:
    files = [path for path in job.model.iterdir() if path.is_file()]
    model_before = {path: sha256_file(path) for path in files}
    summary = job.train(tmp_path / "t", epochs=6).summary
    assert summary["tensors_moved"] == summary["tensors"] == 15
    assert summary["tensors_changed_as_stored"] == 15 and summary["max_change"] > 0.1
    records = lines(tmp_path / "t" / METRICS)
    assert [record["step"] for record in records] == list(range(summary["steps"] + 1))
    assert records[-1]["loss"] < 0.5 * records[1]["loss"]
    assert records[1]["loss"] == pytest.approx(
        sum(w * records[1][f"loss_{k}"] for k, w in enumerate((0.5102, 0.3061, 0.1837))), abs=1e-3
    )
    assert summary["best"]["mean_acceptance_length"] == max(e["mean_acceptance_length"] for e in summary["estimates"])
    assert summary["best"]["mean_acceptance_length"] > summary["estimates"][0]["mean_acceptance_length"] + 0.5
    assert (tmp_path / "t" / "curves.png").read_bytes().startswith(b"\x89PNG")
    before, after = load_file(job.head / HEAD_FILE), load_file(tmp_path / "t" / HEAD_FILE)
    assert {k: (v.dtype, v.shape) for k, v in before.items()} == {k: (v.dtype, v.shape) for k, v in after.items()}
    assert {path: sha256_file(path) for path in files} == model_before
    assert not saves_of(tmp_path / "t").exists()


def test_training_repeats_exactly(job: Job, tmp_path: Path) -> None:
    first, second = (job.train(tmp_path / name, epochs=1) for name in "ab")
    assert first.files[HEAD_FILE] == second.files[HEAD_FILE]
    other = job.train(tmp_path / "c", epochs=1, recursion="plain")
    assert other.files[HEAD_FILE] != first.files[HEAD_FILE]
    assert job.train(tmp_path / "a", epochs=1) == first, "a finished result is not made again"


def first_step(job: Job, target: Path, **changes: Any) -> dict[str, float]:
    job.train(target, max_steps=1, **changes)
    return {k: v for k, v in lines(target / METRICS)[1].items() if k not in TIMES}


def test_micro_batches_and_recomputation_do_not_change_a_step(job: Job, tmp_path: Path) -> None:
    whole = first_step(job, tmp_path / "a", micro_tokens=120)
    for name, changes in (("b", {"micro_tokens": 20}), ("c", {"micro_tokens": 120, "recompute": True})):
        assert first_step(job, tmp_path / name, **changes) == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("loss", ["kl", "tv", {"ce": 0.3, "kl": 0.3, "tv": 0.4}])
def test_every_loss_trains(job: Job, tmp_path: Path, loss: Any) -> None:
    job.train(tmp_path / "t", epochs=4, loss=loss)
    records = lines(tmp_path / "t" / METRICS)
    assert records[-1]["loss"] < records[1]["loss"]


def test_a_mixture_is_the_sum_of_its_parts(job: Job, tmp_path: Path) -> None:
    parts = {kind: first_step(job, tmp_path / kind, loss=kind) for kind in ("ce", "kl", "tv")}
    mixed = first_step(job, tmp_path / "m", loss={"ce": 0.5, "tv": 2.0, "kl": 0.25})
    for key in ("loss", "loss_0", "loss_2"):
        wanted = 0.5 * parts["ce"][key] + 2.0 * parts["tv"][key] + 0.25 * parts["kl"][key]
        assert mixed[key] == pytest.approx(wanted, rel=1e-5)


def test_a_mixture_names_losses_that_exist() -> None:
    for loss in ({}, {"mse": 1.0}, {"ce": 0.0}, "mse"):
        with pytest.raises(ValueError):
            TrainConfig.model_validate({"loss": loss})


def test_bf16_compute_keeps_fp32_masters_and_state(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case T5, in the loop; and T8: the verifier's matrices are none of the optimizer's."""
    seen: dict[str, torch.Tensor] = {}
    true = Engine.state

    def state(self: Engine) -> dict[str, torch.Tensor]:
        seen.update(true(self))
        return true(self)

    monkeypatch.setattr(Engine, "state", state)
    summary = job.train(tmp_path / "t", dtype="bfloat16", epochs=4).summary
    assert {value.dtype for value in seen.values()} == {torch.float32}
    assert not [name for name in seen if "embed_tokens" in name or "lm_head" in name or "verifier" in name]
    assert summary["best"]["mean_acceptance_length"] > summary["estimates"][0]["mean_acceptance_length"]


def test_tiny_steps_still_move_every_master_weight(job: Job, tmp_path: Path) -> None:
    """Case T5: stored in bf16 the head may look untouched; the masters moved, and both are said."""
    summary = job.train(tmp_path / "t", lr=1e-7, max_steps=2).summary
    assert summary["tensors_moved"] == summary["tensors"]
    assert summary["max_change"] < 1e-6
    assert summary["tensors_changed_as_stored"] < summary["tensors"]


def test_states_of_another_verifier_are_refused(job: Job, tmp_path: Path) -> None:
    """Case T2."""
    other = write_checkpoint(tmp_path / "other", "qwen3.5", seed=1)
    with pytest.raises(DataError, match="another verifier"):
        Job(other, job.head, job.data).train(tmp_path / "t")


def test_tensorboard_says_what_to_install(job: Job, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'fastmtp\[tensorboard\]'") as caught:
        job.train(tmp_path / "t", tensorboard=True)
    assert caught.value.pointer == "/train/tensorboard"


def test_a_dry_run_plans_and_does_nothing(job: Job, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    argv = job.command(tmp_path, tmp_path / "t", processes=2)
    done = subprocess.run(
        [sys.executable, "-m", "fastmtp", *argv, "--dry-run"], capture_output=True, text=True, check=True
    )
    plan = json.loads(done.stdout)
    assert (plan["rows"], plan["rows_held_out"], plan["steps"], plan["processes"]) == (24, 6, 12, 2)
    assert plan["validations"] == 3
    assert plan["memory_bytes"] > 16 * plan["parameters"] and plan["disk_bytes"] > 0
    assert "12 steps of up to 120 tokens" in plan["text"]
    assert "2 processes" in plan["text"] and "of disk" in plan["text"]
    assert sorted(tmp_path.iterdir()) == [*before, tmp_path / "job.yaml"]


def test_metrics_go_on_after_a_torn_line_without_repeating_a_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, tensorboard=False)
    for step in range(5):
        log.add(step, {"loss": float(step)})
    log.close()
    path = tmp_path / METRICS
    path.write_bytes(path.read_bytes() + b'{"step": 5, "lo')
    log = MetricsLog(tmp_path, 3, tensorboard=False)
    for step in range(2, 6):
        log.add(step, {"loss": step + 0.5})
    log.close()
    assert [(line["step"], line["loss"]) for line in lines(path)] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5),
    ]  # fmt: skip


def test_what_a_person_reads() -> None:
    record = {"loss": 1.25, "loss_0": 1.0, "loss_1": 1.5, "tokens_per_second": 12345.6}
    latest = {"acceptance_0": 0.8, "acceptance_1": 0.6, "mean_acceptance_length": 2.4}
    assert note(record, latest, 754) == (
        "loss 1.250 (1.00 1.50)  12,346 tokens/s  held-out 0.80 0.60 length 2.400  13 min left"
    )
    assert [duration(seconds) for seconds in (40, 754, 11100)] == ["40 s", "13 min", "3 h 05 min"]
