"""The state machine of a job: every change to a job's row is made here, on a row the caller has locked.

    queued --> running --> succeeded
      |           +------> failed        (also by the gate, by silence, or refused by Prefect while queued)
      v           v
    cancelled <- cancelling              cancelled only when Prefect says that the run is no more

What is applied twice, late or out of order changes nothing: an attempt that ended stays ended, a job that ended keeps
its status, a state older than the one known is passed over, an event counts once by its id. Each change bumps
`revision` and, but for mere ticks of a progress bar, adds one event in the same transaction. Talks to nobody:
outbox.py does.
"""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from api import outcome
from api.db import Attempt, Event, Job, Outbox
from api.orchestrator import ENDED, ProgressSeen, RunState
from fastmtp.config import JobSpec
from fastmtp.protocol import Progress, Report

TERMINAL = frozenset({"succeeded", "failed", "cancelled"})
STATUSES = ("queued", "running", "succeeded", "failed", "cancelling", "cancelled")

CREATE_RUN = "create_run"
CANCEL_RUN = "cancel_run"
CREATE_SCHEDULE = "create_schedule"
DELETE_SCHEDULE = "delete_schedule"

_STATUS_OF = {
    "SCHEDULED": "queued", "PENDING": "queued", "RUNNING": "running", "PAUSED": "running", "CANCELLING": "cancelling",
}  # fmt: skip


async def add_job(
    session: AsyncSession,
    job_id: str,
    spec: JobSpec,
    request: dict[str, Any],
    *,
    now: float,
    schedule_id: str | None = None,
) -> tuple[Job, Attempt]:
    """A queued job with its first attempt, unknown to Prefect yet. Flushed, so that rows which name it can follow."""
    job = Job(
        id=job_id, revision=0, created_at=now, status="queued", model=spec.model, request=request,
        spec=spec.model_dump(mode="json"), stages={}, progress=0.0, progress_time=0.0, schedule_id=schedule_id,
    )  # fmt: skip
    session.add(job)
    await session.flush()
    attempt = Attempt(job_id=job_id, number=1, created_at=now)
    session.add(attempt)
    await session.flush()
    return job, attempt


def enqueue(session: AsyncSession, kind: str, subject: str, *, now: float) -> None:
    """Ask for something to be told to Prefect, as part of this transaction."""
    session.add(Outbox(kind=kind, subject=subject, created_at=now, due_at=now, tries=0))


def subject_of(attempt: Attempt) -> str:
    """The attempt as the outbox, and Prefect's idempotency key, name it."""
    return f"{attempt.job_id}:{attempt.number}"


def record(
    session: AsyncSession,
    job: Job,
    message: str,
    *,
    now: float,
    level: str = "info",
    kind: str = "message",
    data: dict[str, Any] | None = None,
    source_id: str | None = None,
) -> None:
    """Append an event to a job and bump its revision."""
    job.revision += 1
    session.add(
        Event(
            job_id=job.id, seq=job.revision, created_at=now, level=level, type=kind, message=message, data=data or {},
            source_id=source_id,
        )
    )  # fmt: skip


async def request_cancel(session: AsyncSession, job: Job, attempt: Attempt, *, now: float) -> None:
    """Ask a job to end. One that Prefect never saw is cancelled at once; asking again, or too late, changes nothing."""
    if job.status in TERMINAL or job.status == "cancelling":
        return
    waiting = await session.get(Outbox, (CREATE_RUN, subject_of(attempt)), with_for_update=True, populate_existing=True)
    if waiting and waiting.tries == 0:
        await session.delete(waiting)
        end(session, job, attempt, "cancelled", "Cancelled before it was handed to Prefect.", now=now)
        return
    job.status = "cancelling"
    job.status_detail = None
    enqueue(session, CANCEL_RUN, subject_of(attempt), now=now)
    record(session, job, "Cancellation requested", now=now)


def end(
    session: AsyncSession,
    job: Job,
    attempt: Attempt,
    status: str,
    message: str,
    *,
    now: float,
    code: str | None = None,
    source_id: str | None = None,
) -> None:
    """Close an attempt and, unless it has ended already, its job."""
    attempt.finished_at = now
    if job.status in TERMINAL:
        return
    job.status, job.finished_at, job.status_detail = status, now, None
    if status == "succeeded":
        job.progress = 1.0
    if status == "failed":
        job.error_code, job.error_message = code or "pipeline_error", message
    else:
        job.status_detail = message
    data = {"status": status, "attempt": attempt.number, **({"code": code} if code else {})}
    level = "error" if status == "failed" else "info"
    record(session, job, f"Job {status}: {message}", now=now, level=level, data=data, source_id=source_id)


def apply_state(
    session: AsyncSession, job: Job, attempt: Attempt, state: RunState, report: Report | None, *, now: float
) -> bool:
    """Take over a state of the attempt's run. `report` is what the run stored, looked up when `state` ends it.

    Returns:
        Whether anything changed.
    """
    attempt.seen_at = max(attempt.seen_at or 0.0, min(state.time, now))
    if attempt.finished_at is not None or state.id == attempt.state_id:
        return False
    ended = state.type in ENDED
    if not ended and attempt.state_time is not None and state.time < attempt.state_time:
        return False
    attempt.state_id, attempt.state_type, attempt.state_name = state.id, state.type, state.name
    attempt.state_time = state.time
    if ended:
        _settle(session, job, attempt, state, report, now=now)
        return True
    if job.status not in TERMINAL:
        _move(session, job, attempt, state, now=now)
    return True


def _move(session: AsyncSession, job: Job, attempt: Attempt, state: RunState, *, now: float) -> None:
    if job.status != "cancelling":
        job.status = "running" if state.name == "AwaitingRetry" else _STATUS_OF[state.type]
        job.status_detail = outcome.detail_of(state)
    if state.type == "RUNNING" and job.started_at is None:
        job.started_at = state.time
    level = "warn" if state.name == "Late" else "info"
    data = {"state": state.name, "attempt": attempt.number}
    message = f"Attempt {attempt.number}: {outcome.detail_of(state) or state.name}"
    record(session, job, message, now=now, level=level, data=data, source_id=state.id)


def _settle(
    session: AsyncSession, job: Job, attempt: Attempt, state: RunState, report: Report | None, *, now: float
) -> None:
    result = outcome.outcome_of(state, report)
    if report and job.status not in TERMINAL:
        job.report = report.model_dump(mode="json")
        job.stage = (report.error or {}).get("stage") or job.stage
    if state.type == "CANCELLED" and "timed out" in state.message:
        warning = "Prefect gave up waiting for the worker; work on its host may still be alive."
        record(session, job, warning, now=now, level="warn")
    end(session, job, attempt, result.status, result.message, now=now, code=result.code, source_id=state.id)


async def apply_progress(session: AsyncSession, job: Job, attempt: Attempt, seen: ProgressSeen, *, now: float) -> bool:
    """Take over one progress record. Of a job that has ended only its series of metrics still grows.

    Returns:
        Whether anything changed.
    """
    record_ = seen.record
    attempt.seen_at = max(attempt.seen_at or 0.0, min(record_.time, now))
    if await session.scalar(select(Event.seq).where(Event.source_id == seen.id)) is not None:
        return False
    if job.status not in TERMINAL:
        job.stages = {**job.stages, record_.stage: _stage_after(job.stages.get(record_.stage), record_)}
        if record_.time >= job.progress_time:
            job.progress_time, job.stage = record_.time, record_.stage
            job.progress = min(max(job.progress, record_.job_fraction()), 0.999)
            if job.status == "running":
                job.status_detail = record_.message or None
    elif not record_.metrics:
        return False
    if record_.metrics or record_.status != "running":
        _record_progress(session, job, seen, now=now)
    else:
        job.revision += 1
    return True


def _stage_after(before: dict[str, Any] | None, record_: Progress) -> dict[str, Any]:
    """How a stage stands after one more record; an older record than the last one only fills in its beginning."""
    stage = before or {"started_at": record_.time, "finished_at": None, "time": 0.0}
    stage = {**stage, "started_at": min(stage["started_at"], record_.time)}
    if record_.time < stage["time"]:
        return stage
    stage |= {"time": record_.time, "status": record_.status}
    stage |= {"done": record_.done, "total": record_.total, "unit": record_.unit}
    if record_.status in ("finished", "skipped", "failed"):
        stage["finished_at"] = record_.time
    return stage


def _record_progress(session: AsyncSession, job: Job, seen: ProgressSeen, *, now: float) -> None:
    record_ = seen.record
    of = f" {record_.done:,.10g}/{record_.total:,.10g} {record_.unit}" if record_.total else ""
    words = ", ".join(f"{name}={value:.4g}" for name, value in record_.metrics.items()) or record_.status
    if record_.message:
        words = f"{words}: {record_.message}" if record_.status == "failed" else record_.message
    message = f"{record_.stage}{of}: {words}"
    # JSON has no NaN, and a loss that became one is worth keeping.
    metrics = {name: value if math.isfinite(value) else str(value) for name, value in record_.metrics.items()}
    data = {"stage": record_.stage, "status": record_.status, "time": record_.time, **metrics}
    level = "error" if record_.status == "failed" else "info"
    kind = "metrics" if record_.metrics else "message"
    record(session, job, message, now=now, level=level, kind=kind, data=data, source_id=seen.id)
