"""What the service does for its users: make, find and cancel jobs, keep schedules. Knows neither HTTP nor Prefect.

Each change is one transaction; what Prefect must learn of it goes into the outbox of the same transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from ulid import ULID

from api import idempotency, jobs, schemas, translate
from api.db import Database, IdempotencyKey, Job, Outbox, Schedule, attempts_of, lock_job
from api.http import Problem
from api.settings import Settings
from fastmtp.config import JobSpec
from fastmtp.errors import InputError

Preflight = Callable[[JobSpec], object]
JOBS_SCOPE = "POST /v1/fine_tuning/jobs"
SCHEDULES_SCOPE = "POST /v1/schedules"


@dataclass(frozen=True)
class Made:
    """What a POST made, or had made before (`replayed`): the body of its answer and where the thing is."""

    response: dict[str, Any]
    location: str
    replayed: bool = False


class Service:
    """Use cases over the database.

    Args:
        preflight: looks at what a job names; blocking, raises InputError.
        check_cron: raises ValueError when it is no cron, or no time zone.
        wake: called when there is something new in the outbox.
    """

    def __init__(
        self,
        settings: Settings,
        db: Database,
        *,
        preflight: Preflight,
        check_cron: Callable[[str, str], None],
        wake: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.db = db
        self._preflight = preflight
        self._check_cron = check_cron
        self._wake = wake

    async def create_job(self, request: schemas.JobCreate, key: str | None) -> Made:
        """Check a job and accept it. Raises Problem, and then nothing is stored."""
        body_hash = idempotency.hash_of(request.model_dump(mode="json", exclude_unset=True))
        before = await self._replayed(JOBS_SCOPE, key, body_hash)
        if before:
            return before
        spec, kept = translate.to_spec(request)
        await self._check(spec, request)

        async def make(session: AsyncSession) -> tuple[dict[str, Any], str]:
            return await self._make_job(session, spec, kept)

        return await self._made_once(JOBS_SCOPE, key, body_hash, make)

    async def trigger(self, schedule_id: str, key: str | None) -> Made:
        """Make a job from a schedule's template, now. Raises Problem 404."""
        scope, body_hash = f"{SCHEDULES_SCOPE}/{schedule_id}/trigger", idempotency.hash_of(None)
        before = await self._replayed(scope, key, body_hash)
        if before:
            return before

        async def make(session: AsyncSession) -> tuple[dict[str, Any], str]:
            schedule = await self._schedule(session, schedule_id)
            spec = JobSpec.model_validate(schedule.spec)
            return await self._make_job(session, spec, schedule.request, schedule_id=schedule_id)

        return await self._made_once(scope, key, body_hash, make)

    async def job(self, job_id: str) -> schemas.JobView:
        """One job. Raises Problem 404."""
        async with self.db.read() as session:
            row = await session.get(Job, job_id)
            if row is None:
                raise _no_such("job", job_id)
            return await self._view(session, row)

    async def cancel(self, job_id: str) -> tuple[schemas.JobView, bool]:
        """Ask a job to end. Returns it, and whether it had ended already; asking again changes nothing."""
        async with self.db.write() as session:
            row = await lock_job(session, job_id)
            if row is None:
                raise _no_such("job", job_id)
            ended = row.status in jobs.TERMINAL
            attempt = (await attempts_of(session, [job_id]))[-1]
            await jobs.request_cancel(session, row, attempt, now=time.time())
            await session.flush()
            view = await self._view(session, row)
        self._wake()
        return view, ended

    async def create_schedule(self, request: schemas.ScheduleCreate, key: str | None) -> Made:
        """Check a schedule and its job and accept it. Raises Problem, and then nothing is stored."""
        body_hash = idempotency.hash_of(request.model_dump(mode="json", exclude_unset=True))
        before = await self._replayed(SCHEDULES_SCOPE, key, body_hash)
        if before:
            return before
        try:
            self._check_cron(request.cron, request.timezone)
        except ValueError as error:
            raise Problem(422, "invalid_schedule", str(error), param="/cron") from error
        spec, kept = translate.to_spec(request.job, at="/job")
        await self._check(spec, request.job, at="/job")

        async def make(session: AsyncSession) -> tuple[dict[str, Any], str]:
            now = time.time()
            row = Schedule(
                id=f"ftsched-{ULID()}".lower(), created_at=now, cron=request.cron, timezone=request.timezone,
                request=kept, spec=spec.model_dump(mode="json"),
            )  # fmt: skip
            session.add(row)
            jobs.enqueue(session, jobs.CREATE_SCHEDULE, row.id, now=now)
            await session.flush()
            return translate.schedule_view(row, None).model_dump(mode="json"), f"/v1/schedules/{row.id}"

        return await self._made_once(SCHEDULES_SCOPE, key, body_hash, make)

    async def schedule(self, schedule_id: str) -> schemas.ScheduleView:
        """One schedule. Raises Problem 404."""
        async with self.db.read() as session:
            row = await self._schedule(session, schedule_id)
            return translate.schedule_view(row, await _last_job(session, schedule_id))

    async def delete_schedule(self, schedule_id: str) -> None:
        """Stop a schedule. Its jobs stay. Raises Problem 404."""
        async with self.db.write() as session:
            row = await self._schedule(session, schedule_id, lock=True)
            row.deleted_at = time.time()
            await session.execute(delete(Outbox).where(Outbox.subject == row.id))
            jobs.enqueue(session, jobs.DELETE_SCHEDULE, row.id, now=row.deleted_at)
        self._wake()

    async def _check(self, spec: JobSpec, request: schemas.JobCreate, *, at: str = "") -> None:
        try:
            async with asyncio.timeout(self.settings.preflight_seconds):
                await asyncio.to_thread(self._preflight, spec)
        except InputError as error:
            raise translate.input_problem(error, request, at=at) from error
        except TimeoutError as error:
            detail = (
                f"Model, prompts and destination could not be looked at within {self.settings.preflight_seconds:g} s. "
                "Try again; if it stays so, one of them is on storage that does not answer."
            )
            raise Problem(503, "preflight_timeout", detail, headers={"Retry-After": "10"}) from error

    async def _make_job(
        self, session: AsyncSession, spec: JobSpec, kept: dict[str, Any], *, schedule_id: str | None = None
    ) -> tuple[dict[str, Any], str]:
        now = time.time()
        job_id = f"ftjob-{ULID()}".lower()
        job, attempt = await jobs.add_job(session, job_id, spec, kept, now=now, schedule_id=schedule_id)
        jobs.enqueue(session, jobs.CREATE_RUN, jobs.subject_of(attempt), now=now)
        jobs.record(session, job, "Job created", now=now)
        await session.flush()
        view = translate.job_view(job, [attempt], self.settings, now=now)
        return view.model_dump(mode="json"), f"/v1/fine_tuning/jobs/{job_id}"

    async def _made_once(
        self,
        scope: str,
        key: str | None,
        body_hash: str,
        make: Callable[[AsyncSession], Awaitable[tuple[dict[str, Any], str]]],
    ) -> Made:
        """Make a thing and store its answer under the key, both or neither; when another was faster, its answer."""
        try:
            async with self.db.write() as session:
                response, location = await make(session)
                if key:
                    now = time.time()
                    expires = now + 3600 * self.settings.idempotency_hours
                    row = IdempotencyKey(
                        scope=scope, key=key, body_sha256=body_hash, expires_at=expires, location=location,
                        response=response,
                    )  # fmt: skip
                    await idempotency.store(session, row, now=now)
        except IntegrityError:
            before = await self._replayed(scope, key, body_hash)
            if before is None:
                raise
            return before
        self._wake()
        return Made(response, location)

    async def _replayed(self, scope: str, key: str | None, body_hash: str) -> Made | None:
        if key is None:
            return None
        async with self.db.read() as session:
            row = await idempotency.find(session, scope, key, body_hash, now=time.time())
        return Made(row.response, row.location, replayed=True) if row else None

    async def _view(self, session: AsyncSession, row: Job) -> schemas.JobView:
        return translate.job_view(row, await attempts_of(session, [row.id]), self.settings, now=time.time())

    @staticmethod
    async def _schedule(session: AsyncSession, schedule_id: str, *, lock: bool = False) -> Schedule:
        row = await session.get(Schedule, schedule_id, with_for_update=lock or None)
        if row is None or row.deleted_at is not None:
            raise _no_such("schedule", schedule_id)
        return row


async def _last_job(session: AsyncSession, schedule_id: str) -> str | None:
    query = select(Job.id).where(Job.schedule_id == schedule_id).order_by(Job.created_at.desc(), Job.id.desc())
    return await session.scalar(query.limit(1))


def _no_such(kind: str, wanted: str) -> Problem:
    return Problem(404, f"{kind}_not_found", f"There is no {kind} {wanted}.", param=f"{kind}_id")
