"""The real Orchestrator against a real Prefect server, without a worker: runs stay where these tests put them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.events import Event
from prefect.events.clients import PrefectEventsClient
from prefect.states import Completed, Failed, Pending, Running

from api.orchestrator import Heartbeat, ProgressSeen, Refused, StateSeen, Unavailable
from api.prefect_orchestrator import PrefectOrchestrator, check_cron
from fastmtp import procs
from fastmtp.config import JobSpec
from fastmtp.protocol import EVENT_PROGRESS, Progress, resource_id, result_key
from tests.api.fakes import report

pytestmark = pytest.mark.prefect

SPEC = JobSpec.parse({"model": "m", "data": {"prompts": "a"}, "evaluate": {"prompts": "b"}}).model_dump(mode="json")


@pytest.fixture(scope="module")
def deployed(prefect_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The server with both deployments. What was put on it goes again: another module's worker would take it up."""
    log = tmp_path_factory.mktemp("deployed") / "deployments.log"
    assert procs.run([sys.executable, "-m", "flows.deployments"], log=log, env=prefect_server.env) == 0, procs.tail(log)
    yield prefect_server
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs():
            client.delete_flow_run(run.id)


@pytest.fixture
async def prefect(deployed: Any) -> AsyncIterator[PrefectOrchestrator]:
    async with PrefectOrchestrator(deployed.api_url) as orchestrator:
        yield orchestrator


def new_job() -> str:
    return f"ftjob-{uuid4().hex}"


async def create(prefect: PrefectOrchestrator, job_id: str) -> str:
    return await prefect.create_run(job_id=job_id, spec=SPEC, key=f"{job_id}:1")


async def put(run_id: str, state: Any) -> None:
    async with get_client() as client:
        await client.set_flow_run_state(UUID(run_id), state, force=True)


async def test_one_key_makes_one_run_that_carries_the_job(prefect: PrefectOrchestrator):
    job_id = new_job()
    assert await prefect.find_run(f"{job_id}:1") is None
    run_id = await create(prefect, job_id)
    assert await create(prefect, job_id) == run_id == await prefect.find_run(f"{job_id}:1")
    run = (await prefect.read_runs([run_id, str(uuid4())]))[run_id]
    assert run.parameters == {"job": SPEC, "job_id": job_id} and run.state.type == "SCHEDULED"
    async with get_client() as client:
        stored = await client.read_flow_run(UUID(run_id))
    assert stored.name == job_id and {"fastmtp", f"job:{job_id}"} <= set(stored.tags)


async def test_a_job_that_does_not_fit_the_flow_is_refused(prefect: PrefectOrchestrator):
    with pytest.raises(Refused, match="create a run"):
        await prefect.create_run(job_id=new_job(), spec={"model": 3}, key=uuid4().hex)


async def test_a_run_that_has_not_begun_is_cancelled_at_once_and_an_ended_one_is_left(prefect: PrefectOrchestrator):
    waiting, done = await create(prefect, new_job()), await create(prefect, new_job())
    await put(done, Completed())
    for run_id in (waiting, done, str(uuid4())):
        await prefect.cancel_run(run_id)
    runs = await prefect.read_runs([waiting, done])
    assert (runs[waiting].state.type, runs[done].state.type) == ("CANCELLED", "COMPLETED")


async def test_a_running_run_is_asked_to_end(prefect: PrefectOrchestrator):
    run_id = await create(prefect, new_job())
    await put(run_id, Running())
    await prefect.cancel_run(run_id)
    assert (await prefect.read_runs([run_id]))[run_id].state.type == "CANCELLING"


async def test_a_run_is_given_up_unless_it_has_ended(prefect: PrefectOrchestrator):
    silent, done = await create(prefect, new_job()), await create(prefect, new_job())
    await put(silent, Running())
    await put(done, Failed(message="why"))
    for run_id in (silent, done, str(uuid4())):
        await prefect.crash_run(run_id, "No sign of life for 90 s.")
    runs = await prefect.read_runs([silent, done])
    assert (runs[silent].state.type, runs[silent].state.message) == ("CRASHED", "No sign of life for 90 s.")
    assert (runs[done].state.type, runs[done].state.message) == ("FAILED", "why")


async def test_the_report_of_a_run_is_read_back(prefect: PrefectOrchestrator):
    job_id = new_job()
    run_id = await create(prefect, job_id)
    assert await prefect.read_result(job_id, run_id) is None
    stored = report(job_id)
    async with get_client() as client:
        data = stored.model_dump_json()
        artifact = ArtifactCreate(type="result", key=result_key(job_id), flow_run_id=UUID(run_id), data=data)
        await client.create_artifact(artifact)
    assert await prefect.read_result(job_id, run_id) == stored
    assert await prefect.read_result(job_id, str(uuid4())) is None


async def test_the_stream_and_the_store_tell_the_same(prefect: PrefectOrchestrator, deployed: Any):
    job_id = new_job()
    run_id = await create(prefect, job_id)
    begun = time.time()
    async with prefect.stream() as stream:
        await put(run_id, Pending())
        await emit(deployed.api_url, job_id, run_id, 120)
        heard = await asyncio.wait_for(collect(stream, job_id, run_id, 120), 60)
    states = [seen.state for seen in heard if isinstance(seen, StateSeen)]
    assert [state.type for state in states][-1] == "PENDING"
    assert states[-1] == (await prefect.read_runs([run_id]))[run_id].state
    assert [seen.run_id for seen in heard if isinstance(seen, Heartbeat)] == [run_id]
    streamed = [seen for seen in heard if isinstance(seen, ProgressSeen)]
    assert [seen.record.done for seen in streamed] == list(range(120))
    stored: list[ProgressSeen] = []
    deadline = time.monotonic() + 30
    while len(stored) < 120 and time.monotonic() < deadline:
        stored = await prefect.read_progress(job_id, begun - 5)
        await asyncio.sleep(0.2)
    assert stored == streamed
    assert await prefect.alive_since(run_id, begun - 5)
    assert not await prefect.alive_since(run_id, time.time() + 5)
    assert not await prefect.alive_since(str(uuid4()), begun - 5)


async def emit(api_url: str, job_id: str, run_id: str, count: int) -> None:
    """Progress as the flow emits it, with one that does not read, and a heartbeat."""
    related = [{"prefect.resource.id": f"prefect.flow-run.{run_id}", "prefect.resource.role": "flow-run"}]
    resource = {"prefect.resource.id": resource_id(job_id)}
    async with PrefectEventsClient(api_url) as client:
        await client.emit(Event(event=EVENT_PROGRESS, resource=resource, related=related, payload={"stage": "x"}))
        for done in range(count):
            record = Progress(time=time.time(), stage="train", status="running", done=done)
            payload = record.model_dump(mode="json")
            await client.emit(Event(event=EVENT_PROGRESS, resource=resource, related=related, payload=payload))
        beat = {"prefect.resource.id": f"prefect.flow-run.{run_id}", "prefect.resource.name": "r"}
        await client.emit(Event(event="prefect.flow-run.heartbeat", resource=beat))


async def collect(stream: Any, job_id: str, run_id: str, count: int) -> list[Any]:
    """What is heard of this job until all its records and the heartbeat are."""
    heard: list[Any] = []
    async for seen in stream:
        if seen.run_id == run_id:
            heard.append(seen)
        numbers = [isinstance(one, ProgressSeen) for one in heard]
        if sum(numbers) == count and any(isinstance(one, Heartbeat) for one in heard):
            return heard
    return heard


async def test_a_schedule_is_made_once_and_taken_back(prefect: PrefectOrchestrator):
    schedule_id = f"ftsched-{uuid4().hex}"
    made = await prefect.create_schedule(schedule_id, "0 3 * * 1", "Europe/Berlin", SPEC)
    assert await prefect.create_schedule(schedule_id, "0 3 * * 1", "Europe/Berlin", SPEC) == made
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("retrain/scheduled")
        found = [one for one in deployment.schedules if one.slug == schedule_id]
        assert [one.parameters["schedule_id"] for one in found] == [schedule_id]
    await prefect.delete_schedule(schedule_id)
    await prefect.delete_schedule(schedule_id)
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("retrain/scheduled")
    assert [one for one in deployment.schedules if one.slug == schedule_id] == []


async def test_runs_that_no_longer_wait_for_their_time_are_found(prefect: PrefectOrchestrator):
    async with get_client() as client:
        deployment = await client.read_deployment_by_name("retrain/scheduled")
        parameters = {"job": SPEC, "schedule_id": "ftsched-x"}
        waiting = await client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        begun = await client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        await client.set_flow_run_state(begun.id, Running(), force=True)
    found = {run.id for run in await prefect.read_fired_runs(time.time() - 60)}
    assert str(begun.id) in found and str(waiting.id) not in found
    assert await prefect.read_fired_runs(time.time() + 60) == []


async def test_without_a_server_everything_says_unavailable(tmp_path: Path):
    nobody = f"http://127.0.0.1:{procs.free_port()}/api"
    async with PrefectOrchestrator(nobody, timeout=1.0) as prefect:
        for call in (prefect.ready(), prefect.find_run("a"), prefect.read_runs([str(uuid4())]), create(prefect, "a")):
            with pytest.raises(Unavailable, match="did not answer"):
                await call
        with pytest.raises(Unavailable, match="event stream"):
            async with prefect.stream():
                pass


@pytest.mark.parametrize(("cron", "timezone"), [("0 3 * *", "UTC"), ("x", "UTC"), ("0 3 * * 1", "Nowhere")])
def test_a_cron_that_prefect_would_not_take_is_found_without_it(cron: str, timezone: str):
    with pytest.raises(ValueError, match="such as"):
        check_cron(cron, timezone)
