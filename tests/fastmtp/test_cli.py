"""The command as a user meets it: what it teaches, how it refuses, and that nothing half-written stays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastmtp.config import JobSpec
from fastmtp.errors import ConfigError
from tests.fastmtp.fixtures import write_checkpoint
from tests.fastmtp.test_checkpoint import drop

VERBS = [
    "tiny-verifier", "inspect", "families", "extract", "prepare", "train", "stitch", "verify", "evaluate", "publish",
    "fetch", "versions", "run",
]  # fmt: skip


def fastmtp(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastmtp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **env})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def job(model: Path, tmp_path: Path) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "count to {n}"}}\n' for n in range(8)))
    (tmp_path / "test.jsonl").write_text('{"prompt": "count backwards"}\n')
    return {
        "model": str(model),
        "data": {"prompts": str(prompts), "max_new_tokens": 8, "holdout": 0.2},
        "train": {"epochs": 1, "batch_tokens": 64, "allow_untrained_head": True},
        "evaluate": {"prompts": str(tmp_path / "test.jsonl")},
        "publish": {"uri": f"file://{tmp_path}/published/"},
    }


def write(tmp_path: Path, job: dict[str, Any]) -> str:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return str(tmp_path / "job.yaml")


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(verb: str) -> None:
    done = fastmtp(verb, "--help", COLUMNS="200")
    assert done.returncode == 0
    assert f"fastmtp {verb}" in done.stdout.replace("Usage:", "") or "A job file" in done.stdout


def test_what_is_measured_on_leaves_nothing_to_train_on(job: dict[str, Any], tmp_path: Path) -> None:
    job["evaluate"] = {"prompts": job["data"]["prompts"]}
    done = fastmtp("prepare", write(tmp_path, job), "--out", "data", cwd=tmp_path)
    assert done.returncode == 2 and "8 in the evaluation set" in done.stderr
    assert "Name other prompts in data.prompts or evaluate.prompts." in done.stderr


def test_stages_one_by_one(job: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """The chain up to a stitched checkpoint, verb by verb; serving it is tested in test_end_to_end.py."""
    file = write(tmp_path, job)
    steps = [
        ["extract", str(model), "--out", "head"],
        ["prepare", file, "--out", "data"],
        ["train", file, "--head", "head", "--data", "data", "--out", "tuned"],
        ["stitch", str(model), "--head", "tuned", "--out", "checkpoint"],
        ["publish", "checkpoint", "--to", job["publish"]["uri"]],
    ]
    for step in steps:
        done = fastmtp(*step, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["stage"] == step[0]
    again = fastmtp(*steps[0], cwd=tmp_path)
    assert again.returncode == 0 and "finished before" in again.stderr
    version = next((tmp_path / "published").glob("v-*"))
    assert {path.name for path in version.iterdir()} >= {"manifest.json", "config.json"}
    assert (version / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_dry_run_does_nothing(job: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path, job)
    done = fastmtp("run", file, "--workdir", str(tmp_path / "w"), "--dry-run")
    assert done.returncode == 0
    assert "qwen3-next" in done.stdout and "preflight > extract" in done.stdout
    assert not (tmp_path / "w").exists()


def test_bad_input_is_one_line_exit_2_and_nothing_written(job: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """A lost head, a missing shard, an unwritable destination, prompts without a usable row, and typing errors."""
    lost = Path(shutil.copytree(model, tmp_path / "lost"))
    drop(lost, "mtp.")
    short = Path(shutil.copytree(model, tmp_path / "short"))
    sorted(short.glob("*.safetensors"))[-1].unlink()
    (tmp_path / "empty.jsonl").write_text('{"nothing": 1}\n')
    (tmp_path / "file").touch()
    cases = [
        ({"model": str(lost)}, "lost its MTP head", "/model"),
        ({"model": str(short)}, "lacks model-0000", "/model"),
        ({"publish": {"uri": f"file://{tmp_path}/file/x"}}, "cannot be written", "/publish/uri"),
        ({"data": {"prompts": str(tmp_path / "empty.jsonl")}}, "no usable row", "/data/prompts"),
        ({"train": {"learning_rate": 1}}, "/train/learning_rate", "/train/learning_rate"),
        (
            {"evaluate": {"prompts": "x", "server_args": ["--trust-remote-code"]}},
            "not allowed",
            "/evaluate/server_args",
        ),
    ]
    for change, message, pointer in cases:
        file = write(tmp_path, job | change)
        done = fastmtp("run", file, "--workdir", str(tmp_path / "w"), "--json")
        assert done.returncode == 2, done.stderr
        error = json.loads(done.stdout)["error"]
        assert message in error["message"] and error["pointer"] == pointer
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("fastmtp: ")
        results = {path.name for path in (tmp_path / "w").glob("*")} if (tmp_path / "w").exists() else set()
        assert results <= {"job.yaml", "progress.jsonl", "report.json"}
    assert not list((tmp_path / "published").glob("*")) if (tmp_path / "published").exists() else True


def test_a_job_without_vllm_stops_before_anything_costly(job: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path, job)
    done = fastmtp("run", file, "--workdir", str(tmp_path / "w"), FASTMTP_VLLM_PYTHON="/nowhere/python")
    assert done.returncode == 2
    assert "make setup" in done.stderr
    assert not (tmp_path / "w" / "head").exists()


def test_job_files_read_back_equal(job: dict[str, Any], tmp_path: Path) -> None:
    spec = JobSpec.parse(job)
    (tmp_path / "again.yaml").write_text(spec.to_yaml())
    assert JobSpec.from_yaml(tmp_path / "again.yaml") == spec
    for text, match in (("[1]", "a job is a mapping"), ("a: b: c", "not YAML"), ("{}", "/model")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=match):
            JobSpec.from_yaml(tmp_path / "bad.yaml")


@pytest.mark.parametrize("uri", ["http://x/", "s3://KEY:SECRET@bucket/x", "relative/path"])
def test_destinations_without_scheme_or_with_secrets(job: dict[str, Any], uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        JobSpec.parse(job | {"publish": {"uri": uri}})
    assert caught.value.pointer == "/publish/uri"


def test_publishing_without_a_destination_is_bad_input(job: dict[str, Any], tmp_path: Path) -> None:
    del job["publish"]
    done = fastmtp("run", write(tmp_path, job), "--workdir", str(tmp_path / "w"), "--only", "publish", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["pointer"] == "/publish"
    assert "Traceback" not in done.stderr
