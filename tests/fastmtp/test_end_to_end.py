"""The whole chain under a real vLLM: a job that gains is published in a real store; the same job again gains nothing
over that, which is fetched from there and served.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fastmtp import storage
from fastmtp.acceptance import measurement
from fastmtp.evaluation.report import EvaluationReport
from fastmtp.fetching import RECORD
from fastmtp.protocol import Report
from fastmtp.stage import read_manifest
from tests.conftest import S3Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


URI = "s3://models/end-to-end/"


@pytest.fixture(scope="module", autouse=True)
def store(s3_server: S3Server) -> Iterator[S3Server]:
    """The endpoint, in the environment of this module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_server.env.items():
            patch.setenv(name, value)
        yield s3_server


@pytest.fixture(scope="module")
def place(half_trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a job file."""
    root = tmp_path_factory.mktemp("job")
    job = {
        "model": str(half_trained),
        "data": {
            "prompts": f"{half_trained}/prompts-train.jsonl",
            "max_samples": 160,
            "max_new_tokens": 96,
            "holdout": 0.2,
        },
        "train": {"lr": 1e-3, "epochs": 3, "batch_tokens": 2048},
        "evaluate": {"prompts": f"{half_trained}/prompts-test.jsonl", "num_prompts": 32, "max_tokens": 96},
        "gate": {"min_gain": 0.02, "min_drafts": 300},
        "publish": {"uri": URI},
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
    found = EvaluationReport.model_validate_json((place / "work" / "evaluation" / "report.json").read_bytes())
    low = found.gains[0].mean_acceptance_length.low
    assert found.gate.passed and low is not None and low >= 0.02
    assert {(one.head, one.errors) for one in found.lossless} == {("base", 0), ("tuned", 0)}
    assert found.reference and not found.reference.alarm
    apart = [abs(difference) for walk in found.reference.walks for difference in walk.apart]
    assert len(apart) == 6 and max(apart) <= 0.02
    assert [run.method for run in found.servers] == ["mtp", "mtp", "none"]
    assert set(first.seconds) == {"extract", "prepare", "train", "stitch", "evaluate", "publish"}
    manifest = storage.latest(URI)
    assert manifest and first.published == URI + manifest["version"]
    assert storage.verify(URI, manifest) == len(first.artifacts) > 5
    for name in ("evaluation/acceptance.png", "evaluation/acceptance.md", "evaluation-logs/vllm-tuned.log"):
        assert (place / "work" / name).stat().st_size > 0


def test_the_held_out_walk_foretells_vllm(first: Report, place: Path) -> None:
    """The estimate before training, on held-out rows, against vLLM's counters on other prompts of the same kind."""
    estimate = read_manifest(place / "work" / "tuned").summary["estimates"][0]
    assert first.base
    for position, rate in enumerate(first.base.acceptance):
        assert estimate[f"acceptance_{position}"] == pytest.approx(rate, abs=0.12)


def test_the_same_job_again_publishes_nothing(first: Report, place: Path, store: S3Server) -> None:
    published = store.directory / "models" / "end-to-end"
    before = {path: path.stat().st_mtime_ns for path in published.rglob("*") if path.is_file()}
    done = fastmtp_run(place)
    assert done.returncode == 3, done.stderr[-3000:]
    report = Report.model_validate_json(done.stdout)
    assert report.status == "rejected" and report.published is None
    assert report.incumbent and "what is published" in report.gate["reason"]
    assert {path: path.stat().st_mtime_ns for path in published.rglob("*") if path.is_file()} == before
    # What was fetched serves as it is, and as what was published did.
    assert json.loads((place / "work" / "incumbent" / RECORD).read_bytes())["uri"] == first.published
    assert first.tuned and report.incumbent.acceptance == pytest.approx(first.tuned.acceptance, abs=0.02)
    assert done.stderr.count("finished before, used as it is") == 4  # extract, prepare, train, stitch


def test_measurement_is_vllms_definition() -> None:
    found = measurement(100, [80, 60, 40])
    assert found.acceptance == [0.8, 0.6, 0.4] and found.mean_acceptance_length == pytest.approx(2.8)
