"""Lists, page by page: newest first, and the id of the last item is the cursor of the next page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from api import schemas, translate
from api.db import Database, Event, Job, Schedule, attempts_of
from api.http import Problem
from api.settings import Settings


async def list_jobs(
    db: Database,
    settings: Settings,
    *,
    limit: int,
    after: str | None,
    status: str | None = None,
    model: str | None = None,
    schedule_id: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> schemas.Page[schemas.JobView]:
    """Jobs, newest first."""
    query = select(Job)
    for column, value in ((Job.status, status), (Job.model, model), (Job.schedule_id, schedule_id)):
        if value is not None:
            query = query.where(column == value)
    for key, value in (metadata or {}).items():
        query = query.where(Job.request[("metadata", key)].as_string() == value)
    async with db.read() as session:
        rows, more = await _newest_first(session, query, Job, limit, after)
        attempts = await attempts_of(session, [row.id for row in rows])
    now = time.time()
    views = [
        translate.job_view(row, [one for one in attempts if one.job_id == row.id], settings, now=now) for row in rows
    ]
    return _page(views, more)


async def list_schedules(db: Database, *, limit: int, after: str | None) -> schemas.Page[schemas.ScheduleView]:
    """Schedules that were not deleted, newest first."""
    async with db.read() as session:
        query = select(Schedule).where(Schedule.deleted_at.is_(None))
        rows, more = await _newest_first(session, query, Schedule, limit, after)
        ids = [row.id for row in rows]
        made = select(Job.schedule_id, Job.id).where(Job.schedule_id.in_(ids)).order_by(Job.created_at, Job.id)
        last = {row.schedule_id: row.id for row in await session.execute(made)}
    return _page([translate.schedule_view(row, last.get(row.id)) for row in rows], more)


async def list_events(
    db: Database, job_id: str, *, limit: int, after: str | None, ascending: bool = False, kind: str | None = None
) -> schemas.Page[schemas.EventView]:
    """Events of a job that exists, newest first unless `ascending`."""
    query = select(Event).where(Event.job_id == job_id)
    if kind:
        query = query.where(Event.type == kind)
    async with db.read() as session:
        if await session.get(Job, job_id) is None:
            raise Problem(404, "job_not_found", f"There is no job {job_id}.", param="job_id")
        if after is not None:
            seq = await _event_seq(session, job_id, after)
            query = query.where(Event.seq > seq if ascending else Event.seq < seq)
        query = query.order_by(Event.seq if ascending else Event.seq.desc()).limit(limit + 1)
        rows = list((await session.scalars(query)).all())
    return _page([translate.event_view(row) for row in rows[:limit]], len(rows) > limit)


async def list_metrics(
    db: Database, job_id: str, *, limit: int, after: str | None, name: str | None = None, stage: str | None = None
) -> schemas.Page[schemas.MetricPoint]:
    """The numbers of a job in the order they came, one point per record; with `name`, those that have it."""
    page = await list_events(db, job_id, limit=limit, after=after, ascending=True, kind="metrics")
    points = []
    for event in page.data:
        data = dict(event.data)
        point = schemas.MetricPoint(
            id=event.id, stage=data.pop("stage"), time=data.pop("time"),
            values={key: value for key, value in data.items() if key != "status" and name in (None, key)},
        )  # fmt: skip
        if point.values and stage in (None, point.stage):
            points.append(point)
    return schemas.Page(data=points, has_more=page.has_more, first_id=page.first_id, last_id=page.last_id)


async def _newest_first(
    session: AsyncSession, query: Select[Any], table: type[Job] | type[Schedule], limit: int, after: str | None
) -> tuple[list[Any], bool]:
    if after is not None:
        created_at = await session.scalar(select(table.created_at).where(table.id == after))
        if created_at is None:
            raise _invalid_cursor(after)
        query = query.where(_before(table, created_at, after))
    query = query.order_by(table.created_at.desc(), table.id.desc()).limit(limit + 1)
    rows = list((await session.scalars(query)).all())
    return rows[:limit], len(rows) > limit


def _before(table: type[Job] | type[Schedule], created_at: float, row_id: str) -> ColumnElement[bool]:
    same_time = and_(table.created_at == created_at, table.id < row_id)
    return or_(table.created_at < created_at, same_time)


async def _event_seq(session: AsyncSession, job_id: str, cursor: str) -> int:
    prefix, _, seq = cursor.rpartition("-")
    known = seq.isdecimal() and len(seq) < 10 and translate.event_id(job_id, int(seq)) == cursor
    if not known or await session.get(Event, (job_id, int(seq))) is None:
        raise _invalid_cursor(cursor)
    return int(seq)


def _invalid_cursor(cursor: str) -> Problem:
    return Problem(400, "invalid_cursor", f"after={cursor} is the id of no item of this list.", param="after")


def _page(views: list[Any], more: bool) -> schemas.Page[Any]:
    return schemas.Page(
        data=views,
        has_more=more,
        first_id=views[0].id if views else None,
        last_id=views[-1].id if views else None,
    )
