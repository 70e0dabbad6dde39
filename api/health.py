"""Whether the process lives (/healthz), and whether it can do its work (/readyz)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from fastapi import APIRouter, Request

from api import migrate
from api.db import Database
from api.http import Problem
from api.orchestrator import Orchestrator, OrchestratorError

ANSWER_SECONDS = 5.0

router = APIRouter(tags=["operations"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers; nothing else is looked at."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> dict[str, object]:
    """Database, migrations and Prefect are there and rows are in step; else 503 names the parts that are not."""
    state = request.app.state
    db, orchestrator, sync = state.service.db, state.orchestrator, state.sync
    checks = {"database": _database(db), "migrations": _migrations(db), "prefect": _prefect(orchestrator)}
    found = await asyncio.gather(*(_fault(check) for check in checks.values()))
    parts = {**dict(zip(checks, found, strict=True)), "sync": sync.fault()}
    faults = {part: fault for part, fault in parts.items() if fault}
    if faults:
        detail = "; ".join(f"{part}: {fault}" for part, fault in faults.items())
        errors = [{"detail": fault, "part": part} for part, fault in faults.items()]
        raise Problem(503, "not_ready", detail, errors=errors, headers={"Retry-After": "5"})
    return {"status": "ok", "streaming": sync.streaming, "lag_seconds": round(sync.lag() or 0.0, 1)}


async def _fault(check: Awaitable[str | None]) -> str | None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await check
    except TimeoutError:
        return f"no answer within {ANSWER_SECONDS:g} s"


async def _database(db: Database) -> str | None:
    try:
        await db.ping()
    except Exception as error:  # noqa: BLE001 - whatever a driver raises, the answer is the same
        return f"does not answer: {type(error).__name__}"
    return None


async def _migrations(db: Database) -> str | None:
    try:
        found = await migrate.current(db)
    except Exception as error:  # noqa: BLE001
        return f"unknown: {type(error).__name__}"
    wanted = migrate.head()
    return None if found == wanted else f"at {found}, this version needs {wanted}; run `python -m api migrate`"


async def _prefect(orchestrator: Orchestrator) -> str | None:
    try:
        await orchestrator.ready()
    except OrchestratorError as error:
        return str(error)
    return None
