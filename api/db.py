"""Tables, and how to reach them: SQLite by default, PostgreSQL by setting.

Times are unix seconds. A job's row is locked by whoever changes it (`Database.write` and `get_locked`), so that every
change sees the latest state and adds its event in the same transaction. Does not decide anything: see jobs.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, MetaData, String, Text, event, select, text
from sqlalchemy.engine import Connection, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import ConnectionPoolEntry

_WRITE = "fastmtp_write"


class Base(DeclarativeBase):
    """Constraint names are fixed, so that migrations can name them on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: JSON, list[Any]: JSON, str: String(255)}


class Schedule(Base):
    """A job that is made again and again. Deleted ones stay, because their jobs name them."""

    __tablename__ = "schedules"

    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    deleted_at: Mapped[float | None]
    cron: Mapped[str]
    timezone: Mapped[str]
    request: Mapped[dict[str, Any]]
    spec: Mapped[dict[str, Any]]
    prefect_id: Mapped[str | None]
    status_detail: Mapped[str | None] = mapped_column(Text)


class Job(Base):
    """One job as users see it. `revision` grows with every change; `spec` is its JobSpec, `report` how it ended.

    `stages` holds status, started_at, finished_at, done, total and unit of each stage that began; `progress_time` is
    the time of the newest progress record that was applied.
    """

    __tablename__ = "jobs"
    __table_args__ = (Index("ix_jobs_created_at_id", "created_at", "id"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    revision: Mapped[int]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    status: Mapped[str] = mapped_column(String(32), index=True)
    status_detail: Mapped[str | None] = mapped_column(Text)
    stage: Mapped[str | None] = mapped_column(String(32))
    stages: Mapped[dict[str, Any]]
    progress: Mapped[float]
    progress_time: Mapped[float]
    model: Mapped[str] = mapped_column(Text)
    request: Mapped[dict[str, Any]]
    spec: Mapped[dict[str, Any]]
    report: Mapped[dict[str, Any] | None]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None] = mapped_column(Text)
    schedule_id: Mapped[str | None] = mapped_column(ForeignKey("schedules.id"), index=True)


class Attempt(Base):
    """One flow run of a job. `state_*` are the newest Prefect state applied; `seen_at` is its last sign of life."""

    __tablename__ = "attempts"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    finished_at: Mapped[float | None] = mapped_column(index=True)
    flow_run_id: Mapped[str | None] = mapped_column(String(36), unique=True)
    state_id: Mapped[str | None] = mapped_column(String(64))
    state_type: Mapped[str | None] = mapped_column(String(32))
    state_name: Mapped[str | None]
    state_time: Mapped[float | None]
    seen_at: Mapped[float | None]


class Event(Base):
    """What happened to a job, in the order it was applied: `seq` is the job's revision then.

    `source_id` is Prefect's id of the event, where it comes from one: heard from stream and poll, it counts once.
    """

    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    level: Mapped[str] = mapped_column(String(8))
    type: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]]
    source_id: Mapped[str | None] = mapped_column(String(64), unique=True)


class Outbox(Base):
    """Something Prefect still has to be told: written with the change that asks for it, deleted when Prefect has it.

    `subject` is `JOB_ID:NUMBER` of an attempt, or the id of a schedule. It is not tried before `due_at`; a try moves
    that ahead by as long as it may take.
    """

    __tablename__ = "outbox"

    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    subject: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[float]
    due_at: Mapped[float] = mapped_column(index=True)
    tries: Mapped[int]
    last_error: Mapped[str | None] = mapped_column(Text)


class IdempotencyKey(Base):
    """The answer a POST with this key got, written in the transaction that made what it answers about."""

    __tablename__ = "idempotency_keys"

    scope: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_sha256: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[float] = mapped_column(index=True)
    location: Mapped[str]
    response: Mapped[dict[str, Any]]


class Database:
    """An engine and its two kinds of session. Opens connections on first use.

    `writing` is the same engine for what will write: on SQLite its transactions take the lock as they begin.
    """

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self.writing = self.engine.execution_options(**{_WRITE: True})

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A session for one consistent look; changes are not kept."""
        async with AsyncSession(self.engine, expire_on_commit=False) as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """A session whose changes are committed together on leaving, or not at all when an exception leaves it."""
        async with AsyncSession(self.writing, expire_on_commit=False) as session, session.begin():
            yield session

    async def ping(self) -> None:
        """Raises sqlalchemy's error when the database does not answer."""
        async with self.engine.connect() as connection:
            await connection.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close all connections."""
        await self.engine.dispose()


async def lock_job(session: AsyncSession, job_id: str) -> Job | None:
    """A job's row as it is now, held until the transaction ends."""
    return await session.get(Job, job_id, with_for_update=True, populate_existing=True)


async def attempts_of(session: AsyncSession, job_ids: list[str]) -> list[Attempt]:
    """The attempts of these jobs, oldest first."""
    query = select(Attempt).where(Attempt.job_id.in_(job_ids)).order_by(Attempt.job_id, Attempt.number)
    return list((await session.scalars(query)).all())


def _engine(url: str) -> AsyncEngine:
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        folder = Path(parsed.database or "").parent
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no directory; make it, or name another file for the database.")
        engine = create_async_engine(parsed.set(drivername="sqlite+aiosqlite"))
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    return create_async_engine(parsed, pool_pre_ping=True)


def _prepare_sqlite(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    """Leave BEGIN to us, let readers and the writer work side by side, and wait for a lock rather than fail."""
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "busy_timeout=30000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    """A writer takes the lock when it begins: SQLite refuses to turn a reader into a writer when another was faster."""
    writes = connection.get_execution_options().get(_WRITE)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
