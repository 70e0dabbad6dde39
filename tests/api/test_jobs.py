"""The state machine on its own rows: what comes twice, late or out of order, and cancel racing with start and end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import select

from api import jobs, migrate
from api.db import Attempt, Database, Event, Job, Outbox, attempts_of, lock_job
from api.orchestrator import LOST, ProgressSeen, RunState
from api.outcome import outcome_of
from api.schemas import JobCreate
from api.translate import to_spec
from fastmtp.protocol import Progress
from tests.api.fakes import body, report

NOW = 1_000_000.0


class Rows:
    """One job in a database, and the calls that change it."""

    def __init__(self, db: Database) -> None:
        self.db = db

    async def add(self) -> None:
        spec, kept = to_spec(JobCreate.model_validate(body()))
        async with self.db.write() as session:
            _, attempt = await jobs.add_job(session, "ftjob-1", spec, kept, now=NOW)
            jobs.enqueue(session, jobs.CREATE_RUN, jobs.subject_of(attempt), now=NOW)

    async def claim(self) -> None:
        async with self.db.write() as session:
            (await session.get_one(Outbox, (jobs.CREATE_RUN, "ftjob-1:1"))).tries = 1

    async def state(self, type_: str, at: float, id_: str = "", ended: Any = None, message: str = "") -> bool:
        state = RunState(id_ or f"{type_}-{at}", type_, type_.title(), NOW + at, message)
        async with self.db.write() as session:
            job, attempt = await self._locked(session)
            return jobs.apply_state(session, job, attempt, state, ended, now=NOW + at)

    async def progress(self, id_: str, at: float, stage: str = "train", **fields: Any) -> bool:
        record = Progress.model_validate({"time": NOW + at, "stage": stage, "status": "running", **fields})
        async with self.db.write() as session:
            job, attempt = await self._locked(session)
            seen = ProgressSeen(id_, "ftjob-1", "run", record)
            return await jobs.apply_progress(session, job, attempt, seen, now=NOW + at)

    async def cancel(self) -> None:
        async with self.db.write() as session:
            job, attempt = await self._locked(session)
            await jobs.request_cancel(session, job, attempt, now=NOW)

    async def job(self) -> Job:
        async with self.db.read() as session:
            return await session.get_one(Job, "ftjob-1")

    async def events(self) -> list[Event]:
        async with self.db.read() as session:
            return list((await session.scalars(select(Event).order_by(Event.seq))).all())

    async def outbox(self) -> list[str]:
        async with self.db.read() as session:
            return sorted((await session.scalars(select(Outbox.kind))).all())

    @staticmethod
    async def _locked(session: Any) -> tuple[Job, Attempt]:
        job = await lock_job(session, "ftjob-1")
        assert job is not None
        return job, (await attempts_of(session, ["ftjob-1"]))[0]


@pytest.fixture
async def rows(database_url: str) -> AsyncIterator[Rows]:
    db = Database(database_url)
    await migrate.upgrade(db)
    rows = Rows(db)
    await rows.add()
    yield rows
    await db.close()


async def test_a_run_takes_its_job_to_the_end(rows: Rows):
    for at, type_ in enumerate(("SCHEDULED", "PENDING", "RUNNING")):
        assert await rows.state(type_, at)
    job = await rows.job()
    assert (job.status, job.started_at) == ("running", NOW + 2)
    assert await rows.state("COMPLETED", 9, ended=report("ftjob-1"))
    job = await rows.job()
    assert (job.status, job.finished_at, job.progress) == ("succeeded", NOW + 9, 1.0)
    events = await rows.events()
    assert [event.seq for event in events] == list(range(1, job.revision + 1))
    assert events[-1].message.startswith("Job succeeded: mean acceptance length 2.500 -> 3.100, published at s3://")


async def test_the_same_state_counts_once(rows: Rows):
    assert await rows.state("RUNNING", 1, id_="a")
    assert not await rows.state("RUNNING", 1, id_="a")
    assert len(await rows.events()) == 1


async def test_a_state_older_than_the_known_one_is_passed_over(rows: Rows):
    await rows.state("RUNNING", 5)
    assert not await rows.state("PENDING", 4)
    assert (await rows.job()).status == "running"


async def test_an_end_counts_even_when_another_clock_dates_it_back(rows: Rows):
    await rows.state("RUNNING", 5)
    assert await rows.state("CRASHED", 4, message=f"{LOST} for 90 s")
    job = await rows.job()
    assert (job.status, job.error_code) == ("failed", "lost")


@pytest.mark.parametrize("end", ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"])
async def test_an_end_is_final(rows: Rows, end: str):
    await rows.state("RUNNING", 1)
    await rows.state(end, 2, message="first")
    before = await rows.job()
    for at, type_ in enumerate(("RUNNING", "COMPLETED", "CANCELLED", "FAILED"), 3):
        assert not await rows.state(type_, at, ended=report("ftjob-1"))
    await rows.cancel()
    after = await rows.job()
    assert (after.status, after.revision, after.report) == (before.status, before.revision, before.report)
    assert await rows.outbox() == ["create_run"]


async def test_cancel_before_anybody_told_prefect_needs_no_prefect(rows: Rows):
    await rows.cancel()
    assert ((await rows.job()).status, await rows.outbox()) == ("cancelled", [])


async def test_cancel_while_the_run_may_just_be_made_waits_for_it(rows: Rows):
    await rows.claim()
    await rows.cancel()
    await rows.cancel()
    assert ((await rows.job()).status, await rows.outbox()) == ("cancelling", ["cancel_run", "create_run"])
    assert [event.message for event in await rows.events()] == ["Cancellation requested"]


async def test_cancelling_holds_until_the_run_is_gone(rows: Rows):
    await rows.claim()
    await rows.state("PENDING", 1)
    await rows.cancel()
    for at, type_ in enumerate(("RUNNING", "CANCELLING"), 2):
        await rows.state(type_, at)
        assert (await rows.job()).status == "cancelling"
    await rows.state("CANCELLED", 5)
    assert (await rows.job()).status == "cancelled"


async def test_a_run_that_ends_before_the_cancel_reaches_it_has_succeeded(rows: Rows):
    await rows.claim()
    await rows.state("RUNNING", 1)
    await rows.cancel()
    await rows.state("COMPLETED", 2, ended=report("ftjob-1"))
    assert (await rows.job()).status == "succeeded"


async def test_a_cancellation_that_timed_out_warns_of_what_may_still_run(rows: Rows):
    await rows.state("RUNNING", 1)
    await rows.state("CANCELLED", 2, message="The cancellation timed out.")
    warnings = [event.message for event in await rows.events() if event.level == "warn"]
    assert warnings == ["Prefect gave up waiting for the worker; work on its host may still be alive."]


OUTCOMES = [
    ("COMPLETED", "Completed", "succeeded", ("succeeded", None)),
    ("CRASHED", "Crashed", "succeeded", ("succeeded", None)),
    ("COMPLETED", "Completed", "rejected", ("failed", "gate_rejected")),
    ("FAILED", "Failed", "failed", ("failed", "invalid_data")),
    ("CANCELLED", "Cancelled", "failed", ("cancelled", None)),
    ("CANCELLED", "Skipped", None, ("cancelled", None)),
    ("COMPLETED", "Completed", None, ("failed", "result_missing")),
    ("FAILED", "Failed", None, ("failed", "pipeline_error")),
    ("FAILED", "TimedOut", None, ("failed", "timeout")),
    ("CRASHED", "Crashed", None, ("failed", "infrastructure_error")),
]


@pytest.mark.parametrize(("type_", "name", "stored", "expected"), OUTCOMES)
def test_how_a_run_and_its_report_end_a_job(
    type_: str, name: str, stored: str | None, expected: tuple[str, str | None]
):
    error = {"code": "invalid_data", "message": "no row", "stage": "prepare"} if stored == "failed" else None
    found = report("ftjob-1", stored, error=error) if stored else None
    outcome = outcome_of(RunState("a", type_, name, 0.0, "why"), found)
    assert (outcome.status, outcome.code) == expected
    assert outcome.message


async def test_progress_counts_once_and_never_falls_back(rows: Rows):
    await rows.state("RUNNING", 0)
    await rows.progress("p1", 1, status="started")
    assert await rows.progress("p2", 2, done=50, total=100, unit="steps", metrics={"loss": 1.5})
    halfway = (await rows.job()).progress
    assert not await rows.progress("p2", 2, done=50, total=100, unit="steps", metrics={"loss": 1.5})
    await rows.progress("p3", 3, done=1, total=100)
    job = await rows.job()
    assert job.progress == halfway == pytest.approx(0.28 + 0.35 / 2)
    assert (job.stage, job.stages["train"]["done"], job.stages["train"]["started_at"]) == ("train", 1, NOW + 1)
    assert [event.message for event in await rows.events()][1:] == ["train: started", "train 50/100 steps: loss=1.5"]


PHRASES = [
    (
        {"status": "finished", "done": 1650688, "total": 1650688, "unit": "bytes"},
        "train 1,650,688/1,650,688 bytes: finished",
    ),
    ({"metrics": {"loss": 1.39411}, "message": "loss 1.394  3472 tokens/s"}, "train: loss 1.394  3472 tokens/s"),
    ({"status": "failed", "message": "no row"}, "train: failed: no row"),
]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("fields", "message"), PHRASES)
async def test_progress_reads_like_a_sentence(rows: Rows, fields: dict[str, Any], message: str):
    await rows.progress("p1", 1, **fields)
    assert (await rows.events())[-1].message == message


async def test_a_late_record_fills_its_stage_but_does_not_turn_the_job_back(rows: Rows):
    await rows.state("RUNNING", 0)
    await rows.progress("p2", 9, stage="stitch", status="started")
    assert await rows.progress("p1", 5, stage="train", status="finished", done=10, total=10)
    job = await rows.job()
    assert (job.stage, job.stages["train"]["finished_at"]) == ("stitch", NOW + 5)


async def test_after_the_end_only_the_series_of_numbers_grows(rows: Rows):
    await rows.state("RUNNING", 0)
    await rows.state("FAILED", 9)
    assert not await rows.progress("p1", 8, status="finished")
    assert await rows.progress("p2", 8, metrics={"loss": float("nan")})
    job, events = await rows.job(), await rows.events()
    assert (job.status, job.stage) == ("failed", None)
    assert (events[-1].type, events[-1].data["loss"]) == ("metrics", "nan")


async def test_a_sign_of_life_from_a_clock_ahead_is_not_believed(rows: Rows):
    await rows.state("RUNNING", 0)
    await rows.progress("p1", 10)
    async with rows.db.write() as session:
        attempt = (await attempts_of(session, ["ftjob-1"]))[0]
        record = Progress.model_validate({"time": time.time() + 9e9, "stage": "train", "status": "running"})
        job = await session.get_one(Job, "ftjob-1")
        await jobs.apply_progress(session, job, attempt, ProgressSeen("p2", "ftjob-1", "run", record), now=NOW + 20)
        assert attempt.seen_at == NOW + 20
