"""Database and Prefect in step: through outages on either side, lost answers, lost events, lost runs, and schedules."""

from __future__ import annotations

import asyncio
import time

import pytest
from sqlalchemy import select

from api.db import Outbox
from api.orchestrator import Heartbeat, Refused
from api.schemas import JobCreate
from api.settings import Settings
from api.translate import to_spec
from fastmtp.protocol import scheduled_job_id
from tests.api.conftest import Api, eventually, running
from tests.api.fakes import FakeOrchestrator, body, report


def has_run(job: dict) -> bool:
    return job["attempts"][0]["flow_run_id"] is not None


def ended(job: dict) -> bool:
    return job["status"] in ("succeeded", "failed", "cancelled")


async def test_a_job_shows_what_its_run_does(api: Api):
    job_id, run_id = await api.started(body())
    api.prefect.make_progress(job_id, run_id, "train", done=5, total=10, unit="steps", message="warming up")
    job = await api.until(job_id, lambda job: job["stage"] == "train")
    assert (job["status_detail"], job["stages"][0]["done"]) == ("warming up", 5)
    assert job["attempts"][0]["url"].endswith(f"/runs/flow-run/{run_id}")
    api.prefect.results[job_id] = report(job_id)
    api.prefect.set_state(run_id, "COMPLETED")
    job = await api.until(job_id, ended)
    assert (job["status"], job["progress"], job["status_detail"]) == ("succeeded", 1.0, job["status_detail"])
    assert job["acceptance"]["base"]["mean_acceptance_length"] == 2.5
    assert job["acceptance"]["tuned"]["acceptance"] == [0.9, 0.7, 0.5]
    assert (job["greedy_identical"], job["gate"]["passed"]) == ([40, 40], True)
    assert job["fine_tuned_model"] == "s3://models/tiny/v1"
    assert job["result_files"] == ["s3://models/tiny/v1/model.safetensors"]


async def test_a_rejected_result_has_failed_and_shows_its_figures(api: Api):
    job_id, run_id = await api.started(body())
    api.prefect.results[job_id] = report(job_id, "rejected")
    api.prefect.set_state(run_id, "COMPLETED")
    job = await api.until(job_id, ended)
    assert (job["status"], job["error"]["code"]) == ("failed", "gate_rejected")
    assert job["acceptance"]["tuned"]["drafts"] == 1300 and job["fine_tuned_model"] is None


async def test_while_prefect_is_down_jobs_wait_and_nothing_is_lost(api: Api):
    api.prefect.up = False
    job_id = (await api.post_job(body()))["id"]
    job = await api.until(job_id, lambda job: job["status_detail"] is not None)
    assert (job["status"], job["status_detail"]) == ("queued", "Prefect does not answer.")
    assert (await api.client.get("/readyz")).status_code == 503
    api.prefect.up = True
    await api.until(job_id, has_run)
    assert len(api.prefect.runs) == 1


async def test_an_answer_that_was_lost_makes_no_second_run(api: Api):
    api.prefect.answers_lost = 1
    job_id = (await api.post_job(body()))["id"]
    job = await api.until(job_id, has_run)
    assert list(api.prefect.runs) == [job["attempts"][0]["flow_run_id"]]
    assert api.prefect.calls.count("create_run") == 2


async def test_a_job_that_prefect_refuses_has_failed(api: Api):
    api.prefect.refusal = Refused("Prefect answered 409: the parameters do not fit.")
    job_id = (await api.post_job(body()))["id"]
    job = await api.until(job_id, ended)
    assert (job["status"], job["error"]["code"]) == ("failed", "orchestrator_refused")
    assert "the parameters do not fit" in job["error"]["message"]


async def test_cancel_while_prefect_is_down_makes_no_run_when_it_is_back(api: Api):
    api.prefect.up = False
    job_id = (await api.post_job(body()))["id"]
    await api.until(job_id, lambda job: job["status_detail"] is not None)
    answer = await api.client.post(f"/v1/fine_tuning/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelling")
    api.prefect.up = True
    assert (await api.until(job_id, ended))["status"] == "cancelled"
    assert api.prefect.runs == {}
    await eventually(lambda: outbox(api), lambda rows: rows == [])


async def test_cancel_reaches_a_run_whose_creation_was_never_answered(api: Api):
    api.prefect.answers_lost = 1
    job_id = (await api.post_job(body()))["id"]
    await api.until(job_id, lambda job: job["status_detail"] is not None)
    await api.client.post(f"/v1/fine_tuning/jobs/{job_id}/cancel")
    assert (await api.until(job_id, ended))["status"] == "cancelled"
    assert [run.state.type for run in api.prefect.runs.values()] == ["CANCELLED"]


async def test_a_running_job_is_cancelled_when_its_run_is_gone_and_not_before(api: Api):
    job_id, run_id = await api.started(body())
    path = f"/v1/fine_tuning/jobs/{job_id}/cancel"
    answers = await asyncio.gather(*(api.client.post(path) for _ in range(5)))
    assert {(answer.status_code, answer.json()["status"]) for answer in answers} == {(202, "cancelling")}
    await eventually(lambda: outbox(api), lambda rows: rows == [])
    assert (await api.job(job_id))["status"] == "cancelling"
    assert api.prefect.calls.count("cancel_run") == 1
    api.prefect.set_state(run_id, "CANCELLED")
    await api.until(job_id, ended)
    again = await api.client.post(path)
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


async def test_cancelling_a_job_that_ended_changes_nothing(api: Api):
    job_id, run_id = await api.started(body())
    api.prefect.results[job_id] = report(job_id)
    api.prefect.set_state(run_id, "COMPLETED")
    before = await api.until(job_id, ended)
    answer = await api.client.post(f"/v1/fine_tuning/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json()["revision"]) == (200, before["revision"])


async def test_the_poll_alone_is_enough(api: Api):
    api.prefect.heard = False
    job_id, run_id = await api.started(body())
    api.prefect.make_progress(job_id, run_id, "train", metrics={"loss": 1.0})
    api.prefect.results[job_id] = report(job_id)
    api.prefect.set_state(run_id, "COMPLETED")
    assert (await api.until(job_id, ended))["status"] == "succeeded"
    metrics = (await api.client.get(f"/v1/fine_tuning/jobs/{job_id}/metrics")).json()
    assert [point["values"] for point in metrics["data"]] == [{"loss": 1.0}]


async def test_a_new_stream_makes_up_for_what_the_old_one_missed(api: Api):
    job_id, run_id = await api.started(body())
    api.prefect.heard = False
    api.prefect.make_progress(job_id, run_id, "train", metrics={"loss": 1.0})
    api.prefect.heard = True
    await asyncio.sleep(0.5)
    assert (await api.job(job_id))["stage"] is None
    api.prefect.close_streams()
    await api.until(job_id, lambda job: job["stage"] == "train")


async def test_hearing_everything_again_changes_nothing(settings: Settings):
    prefect = FakeOrchestrator()
    async with running(settings.model_copy(update={"lost_after_seconds": 60.0}), prefect) as api:
        job_id, run_id = await api.started(body())
        seen = prefect.make_progress(job_id, run_id, "train", metrics={"loss": 1.0})
        await api.until(job_id, lambda job: job["stage"] == "train")
        events = await api.events(job_id)
        for _ in range(3):
            prefect.tell(seen)
        prefect.close_streams()
        await asyncio.sleep(1.2)
        assert await api.events(job_id) == events


async def test_a_service_started_again_finds_what_happened_meanwhile(settings: Settings):
    prefect = FakeOrchestrator()
    async with running(settings, prefect) as api:
        job_id, run_id = await api.started(body())
        prefect.up = False
        waiting = (await api.post_job(body()))["id"]
    prefect.up = True
    prefect.make_progress(job_id, run_id, "train", metrics={"loss": 1.0})
    prefect.results[job_id] = report(job_id)
    prefect.set_state(run_id, "COMPLETED")
    async with running(settings, prefect) as api:
        assert (await api.until(job_id, ended))["status"] == "succeeded"
        await api.until(waiting, has_run)
        messages = [event["message"] for event in await api.events(job_id)]
    assert "train: loss=1" in messages and len(prefect.runs) == 2


async def test_two_services_on_one_database_repeat_nothing(settings: Settings):
    prefect = FakeOrchestrator()
    async with running(settings, prefect) as one, running(settings, prefect):
        ids = [(await one.post_job(body()))["id"] for _ in range(5)]
        for job_id in ids:
            job = await one.until(job_id, has_run)
            prefect.set_state(job["attempts"][0]["flow_run_id"], "RUNNING")
            await one.until(job_id, lambda job: job["status"] == "running")
        await asyncio.sleep(0.5)
        for job_id in ids:
            messages = [event["message"] for event in await one.events(job_id)]
            assert len(messages) == len(set(messages))
    assert len(prefect.runs) == 5


async def test_a_run_that_waits_for_a_worker_says_so(api: Api):
    job_id = (await api.post_job(body()))["id"]
    run_id = (await api.until(job_id, has_run))["attempts"][0]["flow_run_id"]
    api.prefect.set_state(run_id, "SCHEDULED", "Late")
    job = await api.until(job_id, lambda job: (job["status_detail"] or "").startswith("Late"))
    assert job["status"] == "queued" and "prefect worker start --pool fastmtp" in job["status_detail"]


async def test_a_silent_run_is_given_up(api: Api):
    job_id, run_id = await api.started(body())
    job = await api.until(job_id, ended)
    assert (job["status"], job["error"]["code"]) == ("failed", "lost")
    assert api.prefect.runs[run_id].state.type == "CRASHED"


async def test_a_silent_run_that_left_a_report_keeps_its_result(api: Api):
    job_id, _ = await api.started(body())
    api.prefect.results[job_id] = report(job_id)
    assert (await api.until(job_id, ended))["status"] == "succeeded"


async def test_a_run_whose_heart_beats_is_not_given_up(api: Api):
    job_id, run_id = await api.started(body())
    for _ in range(10):
        api.prefect.tell(Heartbeat(run_id, time.time()))
        await asyncio.sleep(0.2)
    assert (await api.job(job_id))["status"] == "running"
    assert "crash_run" not in api.prefect.calls


async def test_signs_of_life_that_the_stream_lost_count_too(api: Api):
    job_id, run_id = await api.started(body())
    for _ in range(10):
        api.prefect.signs[run_id] = time.time()
        await asyncio.sleep(0.2)
    assert (await api.job(job_id))["status"] == "running"


async def test_silence_while_prefect_was_down_means_nothing(api: Api):
    job_id, run_id = await api.started(body())
    api.prefect.up = False
    await asyncio.sleep(2.0)
    api.prefect.up = True
    await eventually(lambda: _last_call(api), lambda call: call == "read_fired_runs")
    api.prefect.tell(Heartbeat(run_id, time.time()))
    await asyncio.sleep(0.5)
    assert (await api.job(job_id))["status"] == "running"


async def test_a_run_that_was_deleted_is_lost(api: Api):
    job_id, run_id = await api.started(body())
    del api.prefect.runs[run_id]
    job = await api.until(job_id, ended)
    assert (job["error"]["code"], "deleted" in job["error"]["message"]) == ("lost", True)


async def test_a_firing_becomes_a_job_once(api: Api):
    schedule = (await api.client.post("/v1/schedules", json={"cron": "0 3 * * *", "job": body(seed=1)})).json()
    spec, _ = to_spec(JobCreate.model_validate(body(seed=1)))
    run_id = api.prefect.fire(schedule["id"], spec.model_dump(mode="json"))
    stranger = api.prefect.fire("ftsched-unknown", spec.model_dump(mode="json"))
    job_id = scheduled_job_id(run_id)
    listed = await eventually(lambda: _listed(api, schedule["id"]), lambda jobs: bool(jobs))
    assert [job["id"] for job in listed] == [job_id]
    api.prefect.set_state(run_id, "RUNNING")
    api.prefect.set_state(stranger, "RUNNING")
    await api.until(job_id, lambda job: job["status"] == "running")
    api.prefect.set_state(run_id, "CANCELLED", "Skipped", "Skipped: the slot was missed by 90 s.")
    job = await api.until(job_id, ended)
    assert (job["status"], job["status_detail"]) == ("cancelled", "Skipped: the slot was missed by 90 s.")
    assert len(await _listed(api, None)) == 1
    found = (await api.client.get(f"/v1/schedules/{schedule['id']}")).json()
    assert found["last_job_id"] == job_id


async def test_a_firing_is_seen_at_once_by_the_stream(settings: Settings):
    prefect = FakeOrchestrator()
    async with running(settings.model_copy(update={"poll_seconds": 60.0}), prefect) as api:
        schedule = (await api.client.post("/v1/schedules", json={"cron": "0 3 * * *", "job": body()})).json()
        await eventually(lambda: outbox(api), lambda rows: rows == [])
        await asyncio.sleep(0.3)
        spec, _ = to_spec(JobCreate.model_validate(body()))
        run_id = prefect.fire(schedule["id"], spec.model_dump(mode="json"))
        prefect.set_state(run_id, "RUNNING")
        jobs = await eventually(lambda: _listed(api, schedule["id"]), lambda jobs: bool(jobs))
        assert jobs[0]["id"] == scheduled_job_id(run_id)
        await api.until(jobs[0]["id"], lambda job: job["status"] == "running")


async def test_a_schedule_is_told_to_prefect_and_taken_back(api: Api):
    wanted = {"cron": "0 3 * * 1", "timezone": "Europe/Berlin", "job": body()}
    answer = await api.client.post("/v1/schedules", json=wanted, headers={"Idempotency-Key": "s"})
    again = await api.client.post("/v1/schedules", json=wanted, headers={"Idempotency-Key": "s"})
    assert (answer.status_code, answer.json()["state"]) == (201, "pending")
    assert again.json()["id"] == answer.json()["id"]
    path = answer.headers["location"]
    await eventually(lambda: _state(api, path), lambda state: state == "active")
    assert list(api.prefect.schedules.values()) == [("0 3 * * 1", "Europe/Berlin")]
    triggered = await api.client.post(f"{path}/trigger", headers={"Idempotency-Key": "now"})
    again = await api.client.post(f"{path}/trigger", headers={"Idempotency-Key": "now"})
    assert again.json()["id"] == triggered.json()["id"] != (await api.client.post(f"{path}/trigger")).json()["id"]
    assert (triggered.status_code, triggered.json()["schedule_id"]) == (202, answer.json()["id"])
    assert (await api.client.delete(path)).status_code == 204
    await eventually(lambda: outbox(api), lambda rows: rows == [])
    assert api.prefect.schedules == {}
    assert (await api.client.get(path)).status_code == (await api.client.delete(path)).status_code == 404
    assert (await api.client.get("/v1/schedules")).json()["data"] == []
    assert (await api.job(triggered.json()["id"]))["schedule_id"] == answer.json()["id"]


async def test_a_schedule_deleted_while_prefect_is_down_never_starts(api: Api):
    api.prefect.up = False
    answer = await api.client.post("/v1/schedules", json={"cron": "0 3 * * 1", "job": body()})
    await api.client.delete(answer.headers["location"])
    api.prefect.up = True
    await eventually(lambda: outbox(api), lambda rows: rows == [])
    assert api.prefect.schedules == {}


async def test_a_schedule_that_prefect_refuses_says_why(api: Api):
    api.prefect.refusal = Refused("Prefect answered 422: no.")
    answer = await api.client.post("/v1/schedules", json={"cron": "0 3 * * 1", "job": body()})
    path = answer.headers["location"]
    await eventually(lambda: _state(api, path), lambda state: state == "failed")
    assert (await api.client.get(path)).json()["status_detail"] == "Prefect answered 422: no."


SCHEDULE_FAULTS = [
    ({"cron": "every day"}, "/cron"),
    ({"timezone": "Mars/Olympus"}, "/cron"),
    ({"job": body(seed=-1)}, "/job/seed"),
    ({"job": body(method={"mtp": {"train": {"lr": 7}}})}, "/job/method/mtp/train/lr"),
]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("change", "pointer"), SCHEDULE_FAULTS)
async def test_a_schedule_with_a_fault_is_refused(api: Api, change: dict, pointer: str):
    answer = await api.client.post("/v1/schedules", json={"cron": "0 3 * * 1", "job": body(), **change})
    assert (answer.status_code, answer.json()["param"]) == (422, pointer)
    assert (await api.client.get("/v1/schedules")).json()["data"] == []


async def outbox(api: Api) -> list[str]:
    async with api.db.read() as session:
        return list((await session.scalars(select(Outbox.kind))).all())


async def _listed(api: Api, schedule_id: str | None) -> list[dict]:
    params = {"schedule_id": schedule_id} if schedule_id else {}
    return list((await api.client.get("/v1/fine_tuning/jobs", params=params)).json()["data"])


async def _state(api: Api, path: str) -> str:
    return str((await api.client.get(path)).json()["state"])


async def _last_call(api: Api) -> str:
    return api.prefect.calls[-1]
