"""The parts of the demo, without the ten minutes that the whole takes; `make demo` is the test of the whole."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from rich.console import Console

from api.schemas import JobCreate
from api.translate import to_spec
from deploy import demo, verdict
from deploy.follow import follow, post_job
from fastmtp.config import JobSpec

BASE = {"acceptance": [0.8, 0.4, 0.2], "mean_acceptance_length": 2.4, "drafts": 1200}
TUNED = {"acceptance": [0.8, 0.6, 0.4], "mean_acceptance_length": 2.8, "drafts": 1100}


def answered(**changes: Any) -> dict[str, Any]:
    """A finished job as the service answers it."""
    job = {
        "id": "ftjob-1", "status": "succeeded", "status_detail": None, "stage": "publish", "progress": 1.0,
        "acceptance": {"base": BASE, "tuned": TUNED, "incumbent": None}, "greedy_identical": [96, 96],
        "gate": {"passed": True, "reason": "better"}, "fine_tuned_model": None, "artifacts": [],
        "stages": [{"stage": "train", "seconds": 61.5, "done": 3, "total": 4, "unit": "steps"}], "error": None,
    }  # fmt: skip
    return job | changes


def test_the_posted_job_is_the_job_file_with_absolute_paths():
    spec, _ = to_spec(JobCreate.model_validate(demo.request_body()))
    written = JobSpec.from_yaml(demo.JOB)
    assert Path(spec.model).is_absolute() and Path(spec.data.prompts).is_absolute()
    assert (spec.train, spec.gate, spec.publish) == (written.train, written.gate, written.publish)
    assert spec.data.model_copy(update={"prompts": written.data.prompts}) == written.data
    assert spec.evaluate.model_copy(update={"prompts": written.evaluate.prompts}) == written.evaluate


def test_reports_say_how_the_job_ended():
    assert verdict.report_of(answered()).seconds == {"train": 61.5}
    rejected = verdict.report_of(answered(status="failed", error={"code": "gate_rejected", "message": "no better"}))
    assert (rejected.status, rejected.error) == ("rejected", None)
    failed = verdict.report_of(answered(status="failed", stage="train", error={"code": "lost", "message": "silent"}))
    assert failed.error == {"code": "lost", "message": "silent", "stage": "train"}
    cancelled = verdict.report_of(answered(status="cancelled", status_detail="by hand"))
    assert cancelled.error == {"code": "cancelled", "message": "by hand", "stage": "publish"}


@pytest.fixture
def published(s3_server, tmp_path) -> dict[str, Any]:
    """A succeeded job whose two files lie in a real S3 endpoint under a prefix of this test."""
    uri = f"s3://models/{tmp_path.name}/v1"
    files = {"model.safetensors": b"weights" * 1000, "config.json": b"{}"}
    artifacts = [
        {"uri": f"{uri}/{name}", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    ]
    put(s3_server, f"{uri}/manifest.json", json.dumps({"files": artifacts}).encode())
    for name, data in files.items():
        put(s3_server, f"{uri}/{name}", data)
    return answered(fine_tuned_model=uri, artifacts=artifacts)


def put(s3_server: Any, uri: str, data: bytes) -> None:
    env = s3_server.env
    client = boto3.client(
        "s3", endpoint_url=s3_server.url, aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"], region_name="us-east-1",
    )  # fmt: skip
    bucket, key = uri.removeprefix("s3://").split("/", 1)
    client.put_object(Bucket=bucket, Key=key, Body=data)


def test_a_job_that_is_better_and_lies_in_s3_holds(published, s3_server):
    assert verdict.faults_of(verdict.report_of(published), s3_server.env) == []


def test_a_changed_object_is_found(published, s3_server):
    changed = published["artifacts"][0]["uri"]
    put(s3_server, changed, b"WEIGHTS" * 1000)
    assert verdict.faults_of(verdict.report_of(published), s3_server.env) == [
        f"{changed} is not what its manifest says"
    ]


def test_a_missing_version_is_found(published, s3_server):
    elsewhere = published | {"fine_tuned_model": published["fine_tuned_model"] + "-gone"}
    (fault,) = verdict.faults_of(verdict.report_of(elsewhere), s3_server.env)
    assert "cannot be read back" in fault


def test_files_beside_the_manifest_are_found(published, s3_server):
    fewer = published | {"artifacts": published["artifacts"][:1]}
    (fault,) = verdict.faults_of(verdict.report_of(fewer), s3_server.env)
    assert "lists other files" in fault


def test_a_head_that_is_no_better_does_not_hold(published, s3_server):
    equal = published | {"acceptance": {"base": BASE, "tuned": BASE, "incumbent": None}}
    assert verdict.faults_of(verdict.report_of(equal), s3_server.env) == [
        "the tuned head does not beat the base in mean acceptance length"
    ]


class Service:
    """The service's answers over a job's life, one after the other."""

    def __init__(self, *jobs: dict[str, Any], events: list[dict[str, Any]] | None = None) -> None:
        self._jobs = list(jobs)
        self._events = events or []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/events"):
            seen = request.url.params.get("after")
            begin = next((i + 1 for i, event in enumerate(self._events) if event["id"] == seen), 0)
            page = self._events[begin : begin + 2]
            more = begin + 2 < len(self._events)
            return httpx.Response(
                200, json={"data": page, "has_more": more, "last_id": page[-1]["id"] if page else None}
            )
        job = self._jobs.pop(0) if len(self._jobs) > 1 else self._jobs[0]
        return httpx.Response(200, json=job)


def client_of(handler: Any) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(handler), base_url="http://api")


def test_following_shows_every_event_once_and_returns_the_ended_job():
    events = [
        {"id": f"e{place}", "type": "message", "level": "info", "message": f"event {place}", "data": {}}
        for place in range(5)
    ]
    out = io.StringIO()
    service = Service(answered(status="running", progress=0.2), answered(), events=events)
    job = follow(client_of(service), "ftjob-1", Console(file=out), lambda: None)
    assert job["status"] == "succeeded"
    assert [line.split("s  ")[1] for line in out.getvalue().splitlines()] == [f"event {place}" for place in range(5)]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"stage": "train", "step": 5.0, "loss": 1.39411, "tokens_per_second": 3472.3},
            "step 5, loss 1.394, 3472 tokens/s",
        ),
        ({"stage": "train", "step": 6.0, "loss": "nan"}, "step 6, loss nan"),
        (
            {
                "stage": "evaluate",
                "acceptance_0": 0.68902,
                "acceptance_1": 0.5,
                "mean_acceptance_length": 2.4,
                "drafts": 37,
            },
            "acceptance 0.689 0.500, mean length 2.400, 37 drafts",
        ),
    ],
)
def test_numbers_are_shown_in_few_words(data, line):
    out = io.StringIO()
    event = {"id": "e1", "type": "metrics", "level": "info", "message": "all of them", "data": data}
    follow(client_of(Service(answered(), events=[event])), "ftjob-1", Console(file=out, soft_wrap=True), lambda: None)
    assert out.getvalue().strip().endswith(f"{data['stage']}: {line}")


def test_a_silent_stage_is_shown_with_what_it_says_of_itself(monkeypatch):
    monkeypatch.setattr("deploy.follow.SILENCE_SECONDS", -1.0)
    out = io.StringIO()
    running = answered(status="running", stage="train", status_detail="tuned: vLLM starts " + "x" * 100)
    follow(client_of(Service(running, answered())), "ftjob-1", Console(file=out, soft_wrap=True), lambda: None)
    line, *_ = out.getvalue().splitlines()
    assert line.endswith("s  train 3/4 steps: tuned: vLLM starts [...]")


def test_following_ends_when_a_process_has_died():
    def died() -> None:
        raise RuntimeError("worker ended with status 1")

    with pytest.raises(RuntimeError, match="worker ended"):
        follow(client_of(Service(answered(status="running"))), "ftjob-1", Console(file=io.StringIO()), died)


def test_a_refused_job_says_what_the_service_said():
    def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(
            422, json={"detail": "no head here"}, headers={"content-type": "application/problem+json"}
        )

    with pytest.raises(RuntimeError, match="no head here"):
        post_job(client_of(refuse), {})


def test_clearing_removes_what_a_run_left_and_nothing_else(tmp_path):
    (tmp_path / "jobs" / "ftjob-1").mkdir(parents=True)
    (tmp_path / "fastmtp.db-wal").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    demo._clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_demos_do_not_share_a_directory(tmp_path):
    with demo._locked(tmp_path), pytest.raises(RuntimeError, match="Another demo"), demo._locked(tmp_path):
        pass


def test_the_secret_is_for_its_owner_only(tmp_path):
    demo._write_env(tmp_path, {"AWS_SECRET_ACCESS_KEY": "s"})
    assert (tmp_path / "env").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "env").read_text() == "export AWS_SECRET_ACCESS_KEY=s\n"
