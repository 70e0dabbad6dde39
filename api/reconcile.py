"""Takes what Prefect says, from stream or poll, into the rows: one path for both, so that hearing a thing twice is
harmless.

Also gives up runs that show no sign of life, and makes job rows for runs that schedules started. Ends raise nothing
for a run that is not ours: a Prefect server may serve others too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import select
from sqlalchemy.exc import InterfaceError, OperationalError

from api import jobs
from api.db import Attempt, Database, Job, Schedule, lock_job
from api.orchestrator import (
    ENDED,
    LOST,
    Heartbeat,
    Orchestrator,
    OrchestratorError,
    ProgressSeen,
    Run,
    RunState,
    Seen,
    StateSeen,
)
from fastmtp.config import JobSpec
from fastmtp.errors import ConfigError
from fastmtp.protocol import Report, scheduled_job_id

log = logging.getLogger(__name__)

RECENT_SECONDS = 3600.0
DEEP_SECONDS = 7 * 86400.0
# A pending run is a worker starting a process, which takes longer than the space between two heartbeats.
_PATIENCE = {"RUNNING": 1.0, "PENDING": 4.0}


@contextmanager
def _one_fault_spares_the_rest(what: str) -> Iterator[None]:
    """Log an error that concerns only `what`; Prefect's or the database's silence concerns everything and is raised."""
    try:
        yield
    except (OrchestratorError, OperationalError, InterfaceError):
        raise
    except Exception:
        log.exception("%s could not be taken over", what)


class Reconciler:
    """Brings job rows in step with Prefect.

    Args:
        lost_after: seconds of silence, while Prefect was there to hear, after which a running attempt is given up.
    """

    def __init__(
        self, db: Database, orchestrator: Orchestrator, *, lost_after: float, now: Callable[[], float] = time.time
    ) -> None:
        self._db = db
        self._orchestrator = orchestrator
        self._lost_after = lost_after
        self._now = now
        self._listening_since: float | None = None

    def lost_contact(self) -> None:
        """Prefect did not answer: silence of runs means nothing until it has listened long enough again."""
        self._listening_since = None

    async def reconcile(self, *, deep: bool = False) -> None:
        """Read every open attempt and apply what it says. `deep` also makes up for a time in which nobody listened."""
        begun = self._now()
        attempts = await self._open_attempts()
        runs = await self._orchestrator.read_runs([str(one.flow_run_id) for one in attempts])
        for attempt in attempts:
            with _one_fault_spares_the_rest(f"job {attempt.job_id}"):
                await self._compare(attempt, runs.get(str(attempt.flow_run_id)), deep=deep)
        for run in await self._orchestrator.read_fired_runs(begun - (DEEP_SECONDS if deep else RECENT_SECONDS)):
            with _one_fault_spares_the_rest(f"scheduled run {run.id}"):
                await self.adopt(run)
        if self._listening_since is None:
            self._listening_since = begun

    async def hear(self, seen: Seen) -> None:
        """Apply one item of the stream."""
        with _one_fault_spares_the_rest(f"item {seen} of the stream"):
            await self._hear(seen)

    async def _hear(self, seen: Seen) -> None:
        run_id = seen.run_id
        attempt = await self._attempt_of(run_id) if run_id else None
        if attempt is None and run_id and isinstance(seen, StateSeen) and seen.state.type != "SCHEDULED":
            run = (await self._orchestrator.read_runs([run_id])).get(run_id)
            attempt = await self.adopt(run) if run else None
        if attempt is None:
            return
        match seen:
            case StateSeen():
                await self._observe(attempt.job_id, attempt.number, seen.run_id, seen.state)
            case ProgressSeen():
                await self._progress(attempt.number, seen)
            case Heartbeat():
                await self._alive(attempt, seen.time)

    async def adopt(self, run: Run) -> Attempt | None:
        """The attempt that a run is; made, with its job, when a schedule of ours fired it. None when it is not ours."""
        known = await self._attempt_of(run.id)
        schedule_id = run.parameters.get("schedule_id")
        if known or not isinstance(schedule_id, str):
            return known
        async with self._db.write() as session:
            schedule = await session.get(Schedule, schedule_id, with_for_update=True)
            if schedule is None:
                return None
            # Locked by the schedule's row: stream and poll may see the same run at once.
            known = await session.scalar(select(Attempt).where(Attempt.flow_run_id == run.id))
            if known:
                return known
            try:
                spec = JobSpec.parse(run.parameters.get("job"))
            except ConfigError as error:
                log.error("run %s of schedule %s carries no job: %s", run.id, schedule_id, error)
                return None
            job_id = scheduled_job_id(run.id)
            job, attempt = await jobs.add_job(
                session, job_id, spec, schedule.request, now=self._now(), schedule_id=schedule_id
            )
            attempt.flow_run_id = run.id
            jobs.record(session, job, f"Started by schedule {schedule_id}", now=self._now())
        await self._observe(job_id, attempt.number, run.id, run.state)
        return attempt

    async def _compare(self, attempt: Attempt, run: Run | None, *, deep: bool) -> None:
        if deep:
            await self._catch_up(attempt.job_id, attempt.number)
        if run is None:
            await self._gone(attempt)
        elif run.state.id != attempt.state_id:
            await self._observe(attempt.job_id, attempt.number, run.id, run.state)
        else:
            await self._check_alive(attempt)

    async def _observe(self, job_id: str, number: int, run_id: str, state: RunState) -> None:
        report = None
        if state.type in ENDED:
            report = await self._report(job_id, run_id)
            await self._catch_up(job_id, number)
        async with self._db.write() as session:
            job = await lock_job(session, job_id)
            assert job is not None, "attempts have jobs"
            attempt = await session.get_one(Attempt, (job_id, number))
            jobs.apply_state(session, job, attempt, state, report, now=self._now())

    async def _report(self, job_id: str, run_id: str) -> Report | None:
        try:
            return await self._orchestrator.read_result(job_id, run_id)
        except ValueError as error:
            log.error("the report of job %s does not read: %s", job_id, error)
            return None

    async def _progress(self, number: int, seen: ProgressSeen) -> None:
        async with self._db.write() as session:
            job = await lock_job(session, seen.job_id)
            attempt = await session.get(Attempt, (seen.job_id, number))
            if job and attempt:
                await jobs.apply_progress(session, job, attempt, seen, now=self._now())

    async def _alive(self, attempt: Attempt, at: float) -> None:
        async with self._db.write() as session:
            row = await session.get_one(Attempt, (attempt.job_id, attempt.number), with_for_update=True)
            row.seen_at = max(row.seen_at or 0.0, min(at, self._now()))

    async def _catch_up(self, job_id: str, number: int) -> None:
        """Apply stored progress that the stream did not bring, from a minute before the last that is known."""
        async with self._db.read() as session:
            job = await session.get_one(Job, job_id)
        for seen in await self._orchestrator.read_progress(job_id, max(job.progress_time, job.created_at) - 60):
            await self._progress(number, seen)

    async def _gone(self, attempt: Attempt) -> None:
        """The flow run was deleted in Prefect: nobody will ever say how it ends."""
        message = f"{LOST}: the run was deleted in Prefect."
        state = RunState(f"gone-{attempt.flow_run_id}", "CRASHED", "Crashed", self._now(), message)
        await self._observe(attempt.job_id, attempt.number, str(attempt.flow_run_id), state)

    async def _check_alive(self, attempt: Attempt) -> None:
        patience = self._lost_after * _PATIENCE.get(attempt.state_type or "", float("inf"))
        heard = max(attempt.seen_at or 0.0, attempt.state_time or 0.0)
        if self._listening_since is None or self._now() - max(heard, self._listening_since) <= patience:
            return
        run_id = str(attempt.flow_run_id)
        if await self._orchestrator.alive_since(run_id, self._now() - patience):
            await self._alive(attempt, self._now())
            return
        log.warning("run %s of job %s was silent for %.0f s: given up", run_id, attempt.job_id, patience)
        await self._orchestrator.crash_run(run_id, f"{LOST} for {patience:.0f} s; its worker died or lost its network.")
        run = (await self._orchestrator.read_runs([run_id])).get(run_id)
        if run:
            await self._observe(attempt.job_id, attempt.number, run_id, run.state)

    async def _open_attempts(self) -> list[Attempt]:
        query = select(Attempt).where(Attempt.finished_at.is_(None), Attempt.flow_run_id.is_not(None))
        async with self._db.read() as session:
            return list((await session.scalars(query)).all())

    async def _attempt_of(self, run_id: str) -> Attempt | None:
        async with self._db.read() as session:
            return await session.scalar(select(Attempt).where(Attempt.flow_run_id == run_id))
