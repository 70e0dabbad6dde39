"""Tells Prefect what the service decided: takes rows of the outbox, makes the call, and takes the row away with the
answer.

A row is claimed before its call, so that two services do not make the same one at once; every call is idempotent all
the same, because an answer may be lost. While Prefect does not answer, a row is tried again with growing waits, for
ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from api import jobs
from api.db import Attempt, Database, Job, Outbox, Schedule, lock_job
from api.orchestrator import Orchestrator, Refused, Unavailable

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 30.0


class Dispatcher:
    """Works through the outbox. `now` can be given another clock."""

    def __init__(self, db: Database, orchestrator: Orchestrator, *, now: Callable[[], float] = time.time) -> None:
        self._db = db
        self._orchestrator = orchestrator
        self._now = now
        self._calls: dict[str, Callable[[str], Awaitable[bool]]] = {
            jobs.CREATE_RUN: self._create_run,
            jobs.CANCEL_RUN: self._cancel_run,
            jobs.CREATE_SCHEDULE: self._create_schedule,
            jobs.DELETE_SCHEDULE: self._delete_schedule,
        }

    async def dispatch_due(self) -> tuple[int, float | None]:
        """Try every row that is due. Returns how many are done, and seconds until the next one is due, if any is."""
        done = 0
        while row := await self._claim():
            done += await self._dispatch(row)
        async with self._db.read() as session:
            due = await session.scalar(select(func.min(Outbox.due_at)))
        return done, None if due is None else max(0.0, due - self._now())

    async def _claim(self) -> Outbox | None:
        async with self._db.write() as session:
            due = select(Outbox).where(Outbox.due_at <= self._now()).order_by(Outbox.created_at).limit(1)
            row = await session.scalar(due.with_for_update(skip_locked=True))
            if row:
                row.tries += 1
                row.due_at = self._now() + LEASE_SECONDS
            return row

    async def _dispatch(self, row: Outbox) -> bool:
        try:
            done = await self._calls[row.kind](row.subject)
            error = "waits for its run to be created"
        except Unavailable as unavailable:
            done, error = False, str(unavailable)
            log.warning("%s of %s waits: %s", row.kind, row.subject, error)
        if not done:
            await self._postpone(row, error)
        return done

    async def _postpone(self, row: Outbox, error: str) -> None:
        async with self._db.write() as session:
            mine = await _take(session, row.kind, row.subject)
            if mine:
                mine.due_at = self._now() + min(LONGEST_WAIT_SECONDS, 2.0 ** min(mine.tries - 1, 10))
                mine.last_error = error
            if row.kind == jobs.CREATE_RUN:
                job = await lock_job(session, row.subject.rpartition(":")[0])
                if job and job.status == "queued" and job.status_detail != error:
                    job.status_detail = error
                    jobs.record(session, job, f"Not handed to Prefect yet: {error}", now=self._now(), level="warn")

    async def _create_run(self, subject: str) -> bool:
        job_id = subject.rpartition(":")[0]
        async with self._db.read() as session:
            job = await session.get_one(Job, job_id)
        run_id, refusal = None, None
        if job.status == "cancelling":
            run_id = await self._orchestrator.find_run(subject)
        else:
            try:
                run_id = await self._orchestrator.create_run(job_id=job_id, spec=job.spec, key=subject)
            except Refused as error:
                refusal = str(error)
        async with self._db.write() as session:
            locked, attempt = await _locked(session, subject)
            row = await _take(session, jobs.CREATE_RUN, subject)
            if row:
                await session.delete(row)
            if run_id:
                attempt.flow_run_id = run_id
                locked.status_detail = None
                jobs.record(session, locked, f"Attempt {attempt.number} handed to Prefect", now=self._now())
            elif refusal:
                await self._drop_cancel(session, subject)
                jobs.end(session, locked, attempt, "failed", refusal, now=self._now(), code="orchestrator_refused")
            else:
                await self._drop_cancel(session, subject)
                message = "Cancelled before it reached Prefect."
                jobs.end(session, locked, attempt, "cancelled", message, now=self._now())
        return True

    async def _cancel_run(self, subject: str) -> bool:
        async with self._db.read() as session:
            attempt = await _attempt(session, subject)
        if attempt.flow_run_id is None and attempt.finished_at is None:
            return False
        if attempt.flow_run_id and attempt.finished_at is None:
            try:
                await self._orchestrator.cancel_run(attempt.flow_run_id)
            except Refused as error:
                raise Unavailable(str(error)) from error
        await self._done(jobs.CANCEL_RUN, subject)
        return True

    async def _create_schedule(self, subject: str) -> bool:
        async with self._db.read() as session:
            schedule = await session.get_one(Schedule, subject)
        prefect_id, refusal = None, None
        if schedule.deleted_at is None:
            try:
                prefect_id = await self._orchestrator.create_schedule(
                    schedule.id, schedule.cron, schedule.timezone, schedule.spec
                )
            except Refused as error:
                refusal = str(error)
        async with self._db.write() as session:
            locked = await session.get_one(Schedule, subject, with_for_update=True)
            locked.prefect_id, locked.status_detail = prefect_id, refusal
            row = await _take(session, jobs.CREATE_SCHEDULE, subject)
            if row:
                await session.delete(row)
        return True

    async def _delete_schedule(self, subject: str) -> bool:
        await self._orchestrator.delete_schedule(subject)
        await self._done(jobs.DELETE_SCHEDULE, subject)
        return True

    async def _done(self, kind: str, subject: str) -> None:
        async with self._db.write() as session:
            row = await _take(session, kind, subject)
            if row:
                await session.delete(row)

    @staticmethod
    async def _drop_cancel(session: AsyncSession, subject: str) -> None:
        row = await _take(session, jobs.CANCEL_RUN, subject)
        if row:
            await session.delete(row)


async def _take(session: AsyncSession, kind: str, subject: str) -> Outbox | None:
    return await session.get(Outbox, (kind, subject), with_for_update=True, populate_existing=True)


async def _attempt(session: AsyncSession, subject: str) -> Attempt:
    job_id, _, number = subject.rpartition(":")
    return await session.get_one(Attempt, (job_id, int(number)))


async def _locked(session: AsyncSession, subject: str) -> tuple[Job, Attempt]:
    """The job, locked, and the attempt that a row is about. Rows are only written with both."""
    job = await lock_job(session, subject.rpartition(":")[0])
    assert job is not None, "an outbox row of a run names a job that exists"
    return job, await _attempt(session, subject)
