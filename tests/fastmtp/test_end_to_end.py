"""The whole chain under a real vLLM: a job that gains is published; the same job again gains nothing over that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from fastmtp import storage
from fastmtp.acceptance import measurement
from fastmtp.checkpoint import INDEX
from fastmtp.config import EvaluateConfig, JobSpec
from fastmtp.errors import ServingError
from fastmtp.evaluate import evaluate
from fastmtp.extract import extract
from fastmtp.inspection import inspect
from fastmtp.progress import Reporter
from fastmtp.protocol import Measurement, Report
from fastmtp.serving import serve
from fastmtp.stage import read_manifest
from fastmtp.stitch import stitch
from fastmtp.tiny import Recipe, build

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half trained: enough that its head drafts something, quick enough for a test."""
    target = tmp_path_factory.mktemp("tiny") / "verifier"
    build(target, Recipe(verifier_steps=110, head_steps=50, problems=1500), Reporter("preflight", quiet=True))
    return target


@pytest.fixture(scope="module")
def place(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a job file."""
    root = tmp_path_factory.mktemp("job")
    job = {
        "model": str(verifier),
        "data": {
            "prompts": f"{verifier}/prompts-train.jsonl",
            "max_samples": 160,
            "max_new_tokens": 96,
            "holdout": 0.2,
        },
        "train": {"lr": 1e-3, "epochs": 3, "batch_tokens": 2048},
        "evaluate": {"prompts": f"{verifier}/prompts-test.jsonl", "num_prompts": 32, "max_tokens": 96},
        "gate": {"min_gain": 0.02, "min_drafts": 300},
        "publish": {"uri": f"file://{root}/published/"},
    }
    (root / "job.yaml").write_text(yaml.safe_dump(job))
    return root


def fastmtp_run(place: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastmtp", "run", "job.yaml", "--workdir", "work", "--json"]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, env={**os.environ})


@pytest.fixture(scope="module")
def first(place: Path) -> Report:
    done = fastmtp_run(place)
    assert done.returncode == 0, done.stderr[-3000:]
    report = Report.model_validate_json(done.stdout)
    assert json.loads((place / "work" / "report.json").read_text()) == json.loads(done.stdout)
    return report


def test_a_job_that_gains_is_published(first: Report, place: Path) -> None:
    assert first.status == "succeeded" and first.base and first.tuned
    assert first.tuned.mean_acceptance_length > first.base.mean_acceptance_length + 0.02
    assert min(first.base.drafts, first.tuned.drafts) >= 300
    for found in (first.base, first.tuned):
        assert found.acceptance == sorted(found.acceptance, reverse=True)
        assert found.mean_acceptance_length == pytest.approx(1 + sum(found.acceptance))
    assert first.greedy_identical == (32, 32)
    assert set(first.seconds) == {"extract", "prepare", "train", "stitch", "evaluate", "publish"}
    uri = f"file://{place}/published/"
    manifest = storage.latest(uri)
    assert manifest and first.published == uri + manifest["version"]
    assert storage.verify(uri, manifest) == len(first.artifacts) > 5
    for name in ("evaluation/acceptance.png", "evaluation/acceptance.md", "evaluation-logs/vllm-tuned.log"):
        assert (place / "work" / name).stat().st_size > 0


def test_the_held_out_walk_foretells_vllm(first: Report, place: Path) -> None:
    """The estimate before training, on held-out rows, against vLLM's counters on other prompts of the same kind."""
    estimate = read_manifest(place / "work" / "tuned").summary["estimates"][0]
    assert first.base
    for position, rate in enumerate(first.base.acceptance):
        assert estimate[f"acceptance_{position}"] == pytest.approx(rate, abs=0.12)


def test_the_same_job_again_publishes_nothing(first: Report, place: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (place / "published").rglob("*")}
    done = fastmtp_run(place)
    assert done.returncode == 3, done.stderr[-3000:]
    report = Report.model_validate_json(done.stdout)
    assert report.status == "rejected" and report.published is None
    assert report.incumbent and "what is published" in report.gate["reason"]
    assert {path: path.stat().st_mtime_ns for path in (place / "published").rglob("*")} == before
    assert done.stderr.count("finished before, used as it is") == 4  # extract, prepare, train, stitch


def test_a_head_put_back_unchanged_is_served_as_before(verifier: Path, place: Path, tmp_path: Path) -> None:
    """From a copy whose head lies in a file that the index does not list: mended, vLLM drafts as from the original."""
    hidden = Path(shutil.copytree(verifier, tmp_path / "hidden"))
    index = json.loads((hidden / INDEX).read_text())
    tensors = {name: load_file(hidden / name) for name in set(index["weight_map"].values())}
    head = {key: value for found in tensors.values() for key, value in found.items() if key.startswith("mtp.")}
    for name, found in tensors.items():
        save_file({key: value for key, value in found.items() if key not in head}, hidden / name, {"format": "pt"})
    save_file(head, hidden / "mtp.safetensors", metadata={"format": "pt"})
    index["weight_map"] = {key: name for key, name in index["weight_map"].items() if key not in head}
    (hidden / INDEX).write_text(json.dumps(index))
    assert [fault.code for fault in inspect(hidden).faults if fault.level == "serving"] == ["head_unlisted"]
    quiet = Reporter("stitch", quiet=True)
    extract(hidden, tmp_path / "head", quiet)
    stitch(hidden, tmp_path / "head", tmp_path / "mended", quiet, mend=True)
    spec = JobSpec.from_yaml(place / "job.yaml")
    heads = {"base": verifier, "tuned": tmp_path / "mended"}
    summary = evaluate(heads, spec.evaluate, spec.gate, tmp_path / "evaluation", quiet).summary
    base, same = (Measurement.model_validate(summary[name]) for name in heads)
    assert base.mean_acceptance_length > 1.2
    # Two runs of vLLM may count a few drafts differently.
    assert same.drafts == pytest.approx(base.drafts, rel=0.01)
    assert same.acceptance == pytest.approx(base.acceptance, abs=0.01)
    assert tuple(summary["greedy_identical"]) == (32, 32)


def test_a_server_that_cannot_start_says_why(verifier: Path, tmp_path: Path) -> None:
    """Bad flag for this model: the cause is in the error within seconds of vLLM's own death, nothing stays behind."""
    config = EvaluateConfig(prompts="x", server_args=("--max-num-batched-tokens", "1"))
    with (
        pytest.raises(ServingError, match=r"vLLM ended with status") as caught,
        serve(verifier, config, max_model_len=64, log=tmp_path / "log"),
    ):
        pass
    assert "max_num_batched_tokens" in str(caught.value) or "max-num-batched-tokens" in str(caught.value)


def test_measurement_is_vllms_definition() -> None:
    found = measurement(100, [80, 60, 40])
    assert found.acceptance == [0.8, 0.6, 0.4] and found.mean_acceptance_length == pytest.approx(2.8)
