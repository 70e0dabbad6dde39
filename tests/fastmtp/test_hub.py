"""The hub: read in ranges, replaced by its cache where it does not answer, and clear about what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fastmtp import pipeline
from fastmtp.checkpoint import CONFIG, open_checkpoint
from fastmtp.config import JobSpec
from fastmtp.errors import CheckpointError, UnreachableError, UnreadableError
from fastmtp.files import open_files
from fastmtp.inspection import inspect
from fastmtp.native import find_head
from fastmtp.pipeline import Workdir, resolve_model
from fastmtp.preflight import Policy, check_job
from tests.fastmtp.hub import COMMIT, Hub
from tests.fastmtp.test_cli import fastmtp
from tests.fastmtp.test_files import extracted, headers_at_most


def test_the_hub_sends_what_is_read_and_the_token_stays(hub: Hub, wide: Path, tmp_path: Path) -> None:
    inspect("org/model")
    limit = headers_at_most(wide)
    assert 0 < hub.sent.total() <= limit
    hub.sent.clear()
    extracted(f"hf://org/model@{COMMIT}", tmp_path / "head")
    head = find_head(open_checkpoint(wide))
    norms = sum(entry.nbytes for key, entry in head.tensors.items() if key.endswith("norm.weight"))
    assert head.nbytes < hub.sent.total() <= limit + head.nbytes + norms + (wide / CONFIG).stat().st_size
    assert not hub.tokens
    assert hub.seen[0] == "GET /api/models/org/model/revision/main" and all(COMMIT in s for s in hub.seen if "res" in s)


def test_a_hub_without_ranges_sends_no_whole_shard(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    assert inspect("org/model").usable
    with pytest.raises(UnreadableError, match="sends all of it"):
        extracted("org/model", tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_an_answer_that_breaks_off_is_an_error(hub: Hub, tmp_path: Path) -> None:
    checkpoint = open_checkpoint("org/model")
    hub.cut = 100
    for call in (lambda: open_checkpoint("org/model"), lambda: extracted("org/model", tmp_path / "head")):
        with pytest.raises(UnreachableError, match="org/model"):
            call()
    with pytest.raises(UnreachableError):
        checkpoint.read(checkpoint.tensors["lm_head.weight"])
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("refusal", "kind", "match", "mend"),
    [
        ((404, "RepoNotFound"), UnreadableError, "not on the hub, or is private", "HF_TOKEN"),
        ((404, "RevisionNotFound"), UnreadableError, "Revision Not Found", "revision"),
        ((401, ""), UnreadableError, "not on the hub, or is private", "HF_TOKEN"),
        ((401, "GatedRepo"), UnreadableError, "is gated", "Accept its terms"),
        ((403, "GatedRepo"), UnreadableError, "is gated", "Accept its terms"),
        ((403, ""), UnreadableError, "refuses", "HF_TOKEN"),
        ((200, ""), UnreadableError, "cannot be read from the hub", "Check the id"),
        ((500, ""), UnreachableError, "does not answer", "Check the network"),
        ((429, ""), UnreachableError, "does not answer", "Check the network"),
    ],
)
def test_what_the_hub_refuses(
    refusal: tuple[int, str], kind: type[CheckpointError], match: str, mend: str, hub: Hub
) -> None:
    hub.refusal = refusal
    begun = time.monotonic()
    with pytest.raises(kind, match=match) as caught:
        open_files("org/model")
    assert time.monotonic() - begun < 5
    assert mend in caught.value.mend and caught.value.pointer == "/model"
    assert "org/model" in str(caught.value) and "hf_secret" not in str(caught.value)


def test_a_hub_that_fails_later_is_tried_for_seconds_only(hub: Hub) -> None:
    files = open_files("org/model")
    hub.refusal = (503, "")
    begun = time.monotonic()
    with pytest.raises(UnreachableError):
        files.read(CONFIG, 0, 8)
    assert time.monotonic() - begun < 10
    assert len([path for path in hub.seen if "resolve" in path]) == 3


def test_no_hub_and_no_cache(no_hub: None) -> None:
    begun = time.monotonic()
    for call in (open_files, inspect, resolve_model):
        with pytest.raises(UnreachableError, match="org/model") as caught:
            call("org/model")
        assert caught.value.code == "unreachable" and "name a local directory" in caught.value.mend
    assert time.monotonic() - begun < 10


def test_the_command_and_the_hub(hub: Hub, free_port: int, tmp_path: Path) -> None:
    """As a child process: from the hub, without it, and without it but with its cache."""
    env = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
    done = fastmtp("inspect", "org/model", "--json", **env)
    assert done.returncode == 0 and json.loads(done.stdout)["usable"], done.stderr
    away = env | {"HF_ENDPOINT": f"http://127.0.0.1:{free_port}"}
    done = fastmtp("inspect", "org/model", "--json", **away)
    assert done.returncode == 2 and json.loads(done.stdout)["error"]["code"] == "unreachable"
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    program = "import sys; from fastmtp.pipeline import resolve_model; print(resolve_model(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, "org/model"], env={**os.environ, **env}, check=True)
    for changes in (away, env | {"HF_HUB_OFFLINE": "1"}):
        done = fastmtp("inspect", "org/model", "--json", **changes)
        assert done.returncode == 0 and "snapshots" in json.loads(done.stdout)["model"], done.stderr


def test_no_hub_but_its_cache(hub: Hub, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was downloaded once is used; half of it is not."""
    expected = extracted("org/model", tmp_path / "before")
    snapshot = resolve_model("org/model")
    assert {path.name for path in snapshot.iterdir()} == {path.name for path in wide.iterdir()}
    monkeypatch.setattr(hub, "refusal", (503, ""))
    found = open_files("org/model")
    assert found.root == snapshot
    assert inspect("org/model").usable
    assert extracted("org/model@main", tmp_path / "after") == expected
    assert resolve_model("org/model") == snapshot
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UnreachableError):
        open_files("org/model")
    hub.refusal = (404, "RepoNotFound")
    with pytest.raises(UnreadableError, match="not on the hub"):
        open_files("org/model")


def test_no_room_for_a_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(UnreadableError, match="No space left on device") as caught:
        resolve_model("org/model")
    assert "HF_HOME" in caught.value.mend


def _job(tmp_path: Path, **changes: object) -> JobSpec:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "one plus one?", "answer": "two"}\n')
    source = {"prompts": str(prompts)}
    return JobSpec.parse({"model": "org/model", "data": source, "evaluate": source} | changes)


def test_a_job_whose_hub_does_not_answer_here_is_taken(
    no_hub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may see a hub that the API does not. An S3 endpoint is no such thing, nor is a lost directory."""
    summary = check_job(_job(tmp_path), Policy())
    assert summary.keys() == {"model", "warnings"} and "org/model" in summary["warnings"][0]
    with pytest.raises(CheckpointError, match="does not exist"):
        check_job(_job(tmp_path, model=str(tmp_path / "absent")), Policy())
    monkeypatch.setattr("fastmtp.serving.vllm_python", lambda: Path("/python"))
    result = pipeline.run_one("preflight", Workdir(tmp_path), _job(tmp_path), quiet=True)
    assert result["summary"]["warnings"] == summary["warnings"]
    with pytest.raises(UnreachableError):
        pipeline.run_one("extract", Workdir(tmp_path), _job(tmp_path), quiet=True)


def test_a_job_whose_hub_refuses_is_refused(hub: Hub, tmp_path: Path) -> None:
    assert check_job(_job(tmp_path), Policy())["family"] == "qwen3.5-moe"
    hub.refusal = (401, "GatedRepo")
    with pytest.raises(CheckpointError, match="gated") as caught:
        check_job(_job(tmp_path), Policy())
    assert caught.value.pointer == "/model"
