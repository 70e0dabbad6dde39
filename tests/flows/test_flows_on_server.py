"""The flow on a real Prefect server, with the stub in the place of the stages: what the server then knows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact, State, StateType

from fastmtp.protocol import EVENT_PROGRESS, STAGES, Report, resource_id, result_key, scheduled_job_id
from flows.finetune import finetune
from flows.retrain import retrain

pytestmark = pytest.mark.prefect


@pytest.fixture(autouse=True)
def _stubbed(prefect_server, stub_env):
    """Every flow run here talks to the real server and runs the stub."""


def run(job: Any, job_id: str) -> State[Any]:
    return finetune(job, job_id, return_state=True)


def artifacts_of(state: State[Any]) -> dict[str, Artifact]:
    flow_run_id = state.state_details.flow_run_id
    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        return {str(one.type): one for one in client.read_artifacts(artifact_filter=chosen)}


def report_of(state: State[Any], job_id: str) -> Report:
    artifact = artifacts_of(state)["result"]
    assert artifact.key == result_key(job_id)
    return Report.model_validate_json(str(artifact.data))


def events_of(api_url: str, job_id: str) -> list[dict[str, Any]]:
    """The job's stored events, oldest first, once the server has written the last of them."""
    wanted = {"resource": {"id": [resource_id(job_id)]}, "event": {"name": [EVENT_PROGRESS]}, "order": "ASC"}
    deadline = time.monotonic() + 20
    while True:
        found = httpx.post(f"{api_url}/events/filter", json={"filter": wanted, "limit": 50}).json()["events"]
        ended = [one["payload"]["stage"] for one in found if one["payload"]["status"] == "finished"]
        if STAGES[-1] in ended or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def test_a_job_that_succeeds(prefect_server, make_job: Callable[[str], Any]):
    state = run(make_job("ok"), "ftjob-Happy1")
    assert state.is_completed()
    report = report_of(state, "ftjob-Happy1")
    assert report.status == "succeeded"
    assert report.tuned is not None and report.tuned.mean_acceptance_length == 2.9
    assert set(report.seconds) == set(STAGES) - {"preflight"}
    assert report.published is not None and report.published in str(state.message)
    artifacts = artifacts_of(state)
    assert float(str(artifacts["progress"].data)) == 100
    assert [row["loss"] for row in json.loads(str(artifacts["table"].data))] == [3.0, 1.5, 1.0, 0.75, 0.6]
    assert "| gain | +0.050 | +0.200 | +0.250 | +0.500 |" in str(artifacts["markdown"].data)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(_flow_run_id(state)).name == "ftjob-Happy1"

    events = events_of(prefect_server.api_url, "ftjob-Happy1")
    stages = [one["payload"]["stage"] for one in events if one["payload"]["status"] == "finished"]
    assert stages == list(STAGES)
    related = {one["prefect.resource.id"] for one in events[0]["related"]}
    assert f"prefect.flow-run.{_flow_run_id(state)}" in related
    assert "prefect.tag.job:ftjob-Happy1" in related


def test_a_job_that_the_gate_rejects_completes_and_publishes_nothing(make_job, tmp_path):
    state = run(make_job("reject"), "ftjob-reject")
    assert state.is_completed()
    report = report_of(state, "ftjob-reject")
    assert (report.status, report.published, report.artifacts) == ("rejected", None, [])
    assert "publish" not in report.seconds
    assert "no gain over the base" in str(state.message)


def test_a_stage_that_refuses_fails_the_job_and_says_why(make_job):
    state = run(make_job("bad-extract"), "ftjob-bad")
    assert state.is_failed()
    assert state.message == "extract: shard 2 is missing. Copy it again."
    report = report_of(state, "ftjob-bad")
    assert report.status == "failed"
    assert report.error == {
        "code": "invalid_checkpoint",
        "message": "shard 2 is missing. Copy it again.",
        "stage": "extract",
    }


def test_a_worker_that_cannot_write_leaves_a_report_too(make_job, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("FASTMTP_WORK_DIR", str(tmp_path / "file"))
    state = run(make_job("ok"), "ftjob-nodisk")
    assert state.is_failed()
    report = report_of(state, "ftjob-nodisk")
    assert report.error is not None and "file" in report.error["message"]


def test_a_firing_that_comes_too_late_runs_nothing_and_says_so(make_job, monkeypatch, tmp_path):
    monkeypatch.setattr("flows.retrain.missed_by_too_much", lambda *_: "Skipped: the slot was missed by 700 s.")
    state = retrain(make_job("ok"), "sched-1", return_state=True)
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(_flow_run_id(state))
    assert (run.state_type, run.state_name) == (StateType.CANCELLED, "Skipped")
    assert run.state is not None and run.state.message == "Skipped: the slot was missed by 700 s."
    assert run.name == scheduled_job_id(run.id)
    assert not (tmp_path / "jobs").exists()


def _flow_run_id(state: State[Any]) -> UUID:
    flow_run_id = state.state_details.flow_run_id
    assert flow_run_id is not None
    return flow_run_id
