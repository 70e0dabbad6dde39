"""Between the wire and the job schema: a request becomes a JobSpec, rows become views. Pure functions.

Faults are reported where the user wrote them: the spec's `/data/prompts` is the request's `/training_file`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from api import schemas
from api.db import Attempt, Event, Job, Schedule
from api.http import Problem
from api.settings import Settings
from fastmtp.config import JobSpec, faults_in
from fastmtp.errors import ConfigError, InputError
from fastmtp.protocol import STAGES, Report

_MTP = "/method/mtp"


def to_spec(request: schemas.JobCreate, *, at: str = "") -> tuple[JobSpec, dict[str, Any]]:
    """The job that a request asks for, and the request as it is kept, with its seed.

    Args:
        at: JSON pointer of the request within the body.

    Raises:
        Problem: 422 with every fault.
    """
    mtp = request.method.mtp
    for part, field in (("data", "training_file"), ("evaluate", "validation_file")):
        if "prompts" in getattr(mtp, part) and (field == "training_file" or request.validation_file is not None):
            pointer = f"{at}{_MTP}/{part}/prompts"
            raise Problem(422, "invalid_job", f"{pointer}: name the prompts once, as {field}.", param=pointer)
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    kept = request.model_copy(update={"seed": seed})
    evaluate = dict(mtp.evaluate)
    if request.validation_file is not None:
        evaluate["prompts"] = request.validation_file
    wanted = {
        "model": request.model,
        "data": {"seed": seed, **mtp.data, "prompts": request.training_file},
        "train": {"seed": seed, **mtp.train},
        "evaluate": evaluate,
        "gate": mtp.gate,
        "publish": mtp.publish,
    }
    try:
        return JobSpec.parse(wanted), kept.model_dump(mode="json")
    except ConfigError as error:
        raise _schema_problem(error, request, at, wanted) from error


def input_problem(error: InputError, request: schemas.JobCreate, *, at: str = "") -> Problem:
    """What the preflight found, pointing at the request's field."""
    pointer = at + request_pointer(error.pointer, request) if error.pointer else None
    errors = [{"detail": detail, "pointer": pointer} for detail in error.details()] if pointer else []
    return Problem(422, error.code, str(error), param=pointer, errors=errors)


def request_pointer(pointer: str, request: schemas.JobCreate) -> str:
    """Where in the request a field of the spec was written."""
    if pointer.startswith("/model"):
        return "/model"
    if _within(pointer, "/data/prompts"):
        return pointer.replace("/data/prompts", "/training_file", 1)
    if _within(pointer, "/evaluate/prompts") and "prompts" not in request.method.mtp.evaluate:
        return pointer.replace("/evaluate/prompts", "/validation_file", 1)
    part, _, field = pointer.strip("/").partition("/")
    if field == "seed" and "seed" not in getattr(request.method.mtp, part):
        return "/seed"
    return _MTP + pointer


def _within(pointer: str, field: str) -> bool:
    return pointer == field or pointer.startswith(f"{field}/")


def _schema_problem(error: ConfigError, request: schemas.JobCreate, at: str, wanted: object) -> Problem:
    cause = error.__cause__
    faults = faults_in(wanted, cause.errors()) if isinstance(cause, ValidationError) else []
    found = [(at + request_pointer(pointer, request), message) for pointer, message in faults]
    if not found:
        return input_problem(error, request, at=at)
    errors = [{"detail": message, "pointer": pointer} for pointer, message in found]
    detail = "; ".join(f"{pointer}: {message}" for pointer, message in found) + "."
    return Problem(422, error.code, detail, param=found[0][0], errors=errors)


def job_view(job: Job, attempts: Sequence[Attempt], settings: Settings, *, now: float) -> schemas.JobView:
    """A job's row as it is answered."""
    spec, request = JobSpec.model_validate(job.spec), job.request
    report = Report.model_validate(job.report) if job.report else None
    measured = report is not None and (report.base is not None or report.tuned is not None)
    return schemas.JobView(
        id=job.id,
        created_at=int(job.created_at),
        started_at=_seconds(job.started_at),
        finished_at=_seconds(job.finished_at),
        model=job.model,
        fine_tuned_model=report.published if report else None,
        status=job.status,
        status_detail=job.status_detail,
        stage=job.stage,
        progress=round(job.progress, 4),
        stages=_stages(job, report, now),
        training_file=spec.data.prompts if isinstance(spec.data.prompts, str) else list(spec.data.prompts),
        validation_file=spec.evaluate.prompts,
        hyperparameters={"n_epochs": spec.train.epochs},
        method={"type": "mtp", "mtp": spec.model_dump(mode="json", exclude={"model"})},
        seed=request["seed"],
        suffix=request.get("suffix"),
        metadata=request.get("metadata"),
        result_files=[artifact.uri for artifact in report.artifacts] if report else [],
        error=_error(job),
        acceptance=(
            schemas.Acceptance(base=report.base, tuned=report.tuned, incumbent=report.incumbent)
            if report and measured
            else None
        ),
        greedy_identical=report.greedy_identical if report else None,
        gate=report.gate or None if report else None,
        artifacts=report.artifacts if report else [],
        attempts=[_attempt_view(attempt, settings) for attempt in attempts],
        schedule_id=job.schedule_id,
        revision=job.revision,
    )


def event_view(event: Event) -> schemas.EventView:
    """An event's row as it is answered."""
    return schemas.EventView.model_validate(
        {
            "id": event_id(event.job_id, event.seq), "created_at": int(event.created_at), "level": event.level,
            "message": event.message, "type": event.type, "data": event.data,
        }
    )  # fmt: skip


def schedule_view(schedule: Schedule, last_job_id: str | None) -> schemas.ScheduleView:
    """A schedule's row as it is answered."""
    return schemas.ScheduleView(
        id=schedule.id,
        created_at=datetime.fromtimestamp(schedule.created_at, UTC).isoformat(timespec="seconds"),
        cron=schedule.cron,
        timezone=schedule.timezone,
        state="active" if schedule.prefect_id else "failed" if schedule.status_detail else "pending",
        status_detail=schedule.status_detail,
        job=schedule.request,
        last_job_id=last_job_id,
    )


def event_id(job_id: str, seq: int) -> str:
    """The id, and cursor, of an event."""
    return f"ftevent-{job_id.removeprefix('ftjob-')}-{seq}"


def _seconds(value: float | None) -> int | None:
    return None if value is None else int(value)


def _error(job: Job) -> schemas.JobError | None:
    if job.error_code is None:
        return None
    return schemas.JobError(code=job.error_code, message=job.error_message or "")


def _stages(job: Job, report: Report | None, now: float) -> list[schemas.StageView]:
    measured = report.seconds if report else {}
    views = []
    for name in STAGES:
        stage = job.stages.get(name)
        if stage is None:
            continue
        until = stage["finished_at"] or job.finished_at or now
        seconds = measured.get(name, until - stage["started_at"])
        views.append(
            schemas.StageView(
                stage=name, status=stage["status"], seconds=round(max(seconds, 0.0), 3), done=stage["done"],
                total=stage["total"], unit=stage["unit"],
            )
        )  # fmt: skip
    return views


def _attempt_view(attempt: Attempt, settings: Settings) -> schemas.AttemptView:
    return schemas.AttemptView(
        number=attempt.number,
        flow_run_id=attempt.flow_run_id,
        url=settings.run_url(attempt.flow_run_id) if attempt.flow_run_id else None,
        state=attempt.state_name,
        created_at=int(attempt.created_at),
        finished_at=_seconds(attempt.finished_at),
    )
