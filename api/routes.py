"""Routes of version 1: from HTTP to a use case and back, nothing more. A function's name is its operationId."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse

from api import listing, schemas
from api.idempotency import read_key
from api.service import Made, Service

_METADATA = re.compile(r"metadata\[(.+)\]")
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": schemas.ProblemView, "description": "The request cannot be served; `detail` says how to mend it."},
    "5XX": {"model": schemas.ProblemView, "description": "Something failed here."},
}

router = APIRouter(prefix="/v1", responses=_PROBLEMS)


def get_service(request: Request) -> Service:
    """The service this app was made with."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(get_service)]
Limit = Annotated[int, Query(ge=1, le=100, description="Items of a page.")]
After = Annotated[str | None, Query(description="Id of the last item of the page before.")]
IdempotencyKey = Annotated[str | None, Header(description="The same key and body make one thing, however often sent.")]
JobId = Annotated[str, Path(max_length=64)]
ScheduleId = Annotated[str, Path(max_length=64)]


@router.post("/fine_tuning/jobs", tags=["jobs"], status_code=202, response_model=schemas.JobView)
async def create_job(
    body: schemas.JobCreate, service: ServiceDep, idempotency_key: IdempotencyKey = None
) -> JSONResponse:
    """Check a job and accept it. It is queued; poll `Location`."""
    return _made(await service.create_job(body, read_key(idempotency_key)), 202)


@router.get("/fine_tuning/jobs", tags=["jobs"])
async def list_jobs(
    request: Request,
    service: ServiceDep,
    limit: Limit = 20,
    after: After = None,
    status: schemas.Status | None = None,
    model: str | None = None,
    schedule_id: str | None = None,
) -> schemas.Page[schemas.JobView]:
    """Jobs, newest first. `metadata[KEY]=VALUE` filters by metadata."""
    metadata = {match[1]: value for key, value in request.query_params.items() if (match := _METADATA.fullmatch(key))}
    return await listing.list_jobs(
        service.db, service.settings, limit=limit, after=after, status=status, model=model, schedule_id=schedule_id,
        metadata=metadata,
    )  # fmt: skip


@router.get("/fine_tuning/jobs/{job_id}", tags=["jobs"])
async def get_job(job_id: JobId, service: ServiceDep) -> schemas.JobView:
    """A job with its stage, progress, acceptance before and after, and where its result is."""
    return await service.job(job_id)


@router.post("/fine_tuning/jobs/{job_id}/cancel", tags=["jobs"], status_code=202)
async def cancel_job(job_id: JobId, service: ServiceDep, response: Response) -> schemas.JobView:
    """Ask a job to end: 202 with the job, `cancelling` until its processes are gone; 200 when it had ended."""
    job, ended = await service.cancel(job_id)
    if ended:
        response.status_code = 200
    return job


@router.get("/fine_tuning/jobs/{job_id}/events", tags=["jobs"])
async def list_job_events(
    job_id: JobId,
    service: ServiceDep,
    limit: Limit = 20,
    after: After = None,
    order: Literal["asc", "desc"] = "desc",
    type: Literal["message", "metrics"] | None = None,
) -> schemas.Page[schemas.EventView]:
    """What happened to a job, newest first unless `order=asc`."""
    return await listing.list_events(service.db, job_id, limit=limit, after=after, ascending=order == "asc", kind=type)


@router.get("/fine_tuning/jobs/{job_id}/metrics", tags=["jobs"])
async def list_job_metrics(
    job_id: JobId,
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after: After = None,
    name: str | None = None,
    stage: str | None = None,
) -> schemas.Page[schemas.MetricPoint]:
    """The numbers of a job, such as its losses, in the order they came. A page may hold fewer points than `limit`."""
    return await listing.list_metrics(service.db, job_id, limit=limit, after=after, name=name, stage=stage)


@router.post("/schedules", tags=["schedules"], status_code=201, response_model=schemas.ScheduleView)
async def create_schedule(
    body: schemas.ScheduleCreate, service: ServiceDep, idempotency_key: IdempotencyKey = None
) -> JSONResponse:
    """Make a job again and again. Each firing is a job like any other, with this `schedule_id`."""
    return _made(await service.create_schedule(body, read_key(idempotency_key)), 201)


@router.get("/schedules", tags=["schedules"])
async def list_schedules(
    service: ServiceDep, limit: Limit = 20, after: After = None
) -> schemas.Page[schemas.ScheduleView]:
    """Schedules, newest first."""
    return await listing.list_schedules(service.db, limit=limit, after=after)


@router.get("/schedules/{schedule_id}", tags=["schedules"])
async def get_schedule(schedule_id: ScheduleId, service: ServiceDep) -> schemas.ScheduleView:
    """A schedule and the last job it made."""
    return await service.schedule(schedule_id)


@router.delete("/schedules/{schedule_id}", tags=["schedules"], status_code=204)
async def delete_schedule(schedule_id: ScheduleId, service: ServiceDep) -> None:
    """Stop a schedule. The jobs it made stay."""
    await service.delete_schedule(schedule_id)


@router.post("/schedules/{schedule_id}/trigger", tags=["schedules"], status_code=202, response_model=schemas.JobView)
async def trigger_schedule(
    schedule_id: ScheduleId, service: ServiceDep, idempotency_key: IdempotencyKey = None
) -> JSONResponse:
    """Make the schedule's job now, whatever its cron says."""
    return _made(await service.trigger(schedule_id, read_key(idempotency_key)), 202)


def _made(made: Made, status: int) -> JSONResponse:
    headers = {"Location": made.location}
    if status == 202:
        headers["Retry-After"] = "5"
    if made.replayed:
        headers["Idempotency-Replayed"] = "true"
    return JSONResponse(made.response, status, headers)
