"""Real deployments and a real process worker: what runs, what is cancelled, what is killed, and that nothing is left.

The stub's `hang-train` stands for a trainer that starts a process in a session of its own, as torchrun and vLLM do.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.states import Cancelling, Crashed

from deploy import services
from fastmtp.protocol import FINETUNE_DEPLOYMENT, RETRAIN_DEPLOYMENT, Report, scheduled_job_id
from flows.deployments import deploy

PLANTED = "planted-secret-7f3a"

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


@dataclass
class Worker:
    """A running worker and where its jobs work."""

    service: services.Service
    jobs: Path

    def pids(self, job_id: str) -> list[int]:
        """The hanging stage and its grandchild, once both run."""
        path = self.jobs / job_id / "pids.json"
        wait_for(lambda: path.exists() and path.read_text().endswith("]"), "the hanging stage", 60)
        return list(json.loads(path.read_text()))


@pytest.fixture
def worker(prefect_server: Any, stub_env: dict[str, str], tmp_path: Path) -> Iterator[Worker]:
    asyncio.run(deploy())
    env = {**prefect_server.env, **stub_env, "AWS_SECRET_ACCESS_KEY": PLANTED}
    with services.worker(tmp_path, env=env, name=tmp_path.name) as service:
        service.wait()
        yield Worker(service, Path(stub_env["FASTMTP_WORK_DIR"]))


def submit(job: Any, job_id: str) -> UUID:
    """Create the flow run as the service does."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(FINETUNE_DEPLOYMENT)
        run = client.create_flow_run_from_deployment(
            deployment.id,
            parameters={"job": job.model_dump(mode="json"), "job_id": job_id},
            tags=["fastmtp", f"job:{job_id}"],
            idempotency_key=f"{job_id}:1",
        )
        return run.id


def read(flow_run_id: UUID) -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_run(flow_run_id)


def wait_for(holds: Callable[[], bool], what: str, seconds: float) -> float:
    """Seconds until it held."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds, f"{what} did not happen within {seconds} s"
        time.sleep(0.2)
    return time.monotonic() - begun


def wait_for_state(flow_run_id: UUID, kind: StateType, seconds: float) -> FlowRun:
    wait_for(lambda: read(flow_run_id).state_type == kind, kind.value, seconds)
    return read(flow_run_id)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_a_cancelled_run_leaves_no_process(worker: Worker, make_job: Callable[[str], Any]):
    flow_run_id = submit(make_job("hang-train"), "ftjob-cancel")
    pids = worker.pids("ftjob-cancel")
    assert not gone(pids)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Cancelling())
    run = wait_for_state(flow_run_id, StateType.CANCELLED, 45)
    assert gone(pids), "Cancelled must mean that nothing runs any more"
    assert run.name == "ftjob-cancel"


def test_a_flow_process_that_is_killed_leaves_no_process_and_is_seen(worker: Worker, make_job: Callable[[str], Any]):
    flow_run_id = submit(make_job("hang-train"), "ftjob-kill")
    pids = worker.pids("ftjob-kill")
    psutil.Process(pids[0]).parent().kill()
    wait_for(lambda: gone(pids), "the end of its processes", 20)
    wait_for_state(flow_run_id, StateType.CRASHED, 30)


def test_a_worker_killed_with_its_flow_leaves_no_process(worker: Worker, make_job: Callable[[str], Any]):
    submit(make_job("hang-train"), "ftjob-both")
    pids = worker.pids("ftjob-both")
    flow = psutil.Process(pids[0]).parent()
    worker.service.child.kill()
    flow.kill()
    wait_for(lambda: gone(pids), "the end of its processes", 20)


def test_a_run_that_is_ended_while_its_worker_is_dead_ends_its_work(worker: Worker, make_job: Callable[[str], Any]):
    flow_run_id = submit(make_job("hang-train"), "ftjob-orphan")
    pids = worker.pids("ftjob-orphan")
    flow = psutil.Process(pids[0]).parent()
    worker.service.child.kill()
    assert flow.is_running() and not gone(pids), "a worker's death alone ends nothing"
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run_id, Crashed(message="no sign of life"), force=True)
    wait_for(lambda: gone([*pids, flow.pid]), "the end of its processes", 40)
    assert read(flow_run_id).state_type == StateType.CRASHED


def test_a_schedule_survives_redeployment_fires_and_runs_the_chain(
    worker: Worker, make_job: Callable[[str], Any], prefect_server: Any
):
    job = make_job("ok").model_dump(mode="json")
    deployment_id = asyncio.run(_schedule_in(seconds=15, parameters={"job": job, "schedule_id": "sched-1"}))
    asyncio.run(deploy())

    def fired() -> list[FlowRun]:
        ended = [run for run in _runs_of(deployment_id) if run.state_type == StateType.COMPLETED]
        return [run for run in ended if run.parameters["schedule_id"] == "sched-1"]

    wait_for(lambda: bool(fired()), "the firing", 60)
    run = fired()[0]
    assert run.name == scheduled_job_id(run.id)
    report = Report.model_validate_json((worker.jobs / run.name / "report.json").read_text())
    assert (report.job_id, report.status) == (run.name, "succeeded")
    written = [path for path in Path(prefect_server.env["PREFECT_HOME"]).rglob("*") if path.is_file()]
    written += [path for path in worker.jobs.rglob("*") if path.is_file()] + [worker.service.log]
    assert [path for path in written if PLANTED.encode() in path.read_bytes()] == [], "a secret was written down"


async def _schedule_in(*, seconds: float, parameters: dict[str, Any]) -> UUID:
    """A schedule of the retrain deployment whose next slot is `seconds` away."""
    first = datetime.now(UTC) + timedelta(seconds=seconds)
    schedule = IntervalSchedule(interval=timedelta(hours=1), anchor_date=first)
    async with get_client() as client:
        deployment = await client.read_deployment_by_name(RETRAIN_DEPLOYMENT)
        wanted = DeploymentScheduleCreate(schedule=schedule, active=True, parameters=parameters)
        await client.create_deployment_schedules(deployment.id, [wanted])
        return deployment.id


def _runs_of(deployment_id: UUID) -> list[FlowRun]:
    with get_client(sync_client=True) as client:
        chosen = DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id]))
        return client.read_flow_runs(deployment_filter=chosen)
