"""The app: puts the parts together. Importing this module starts nothing and loads no torch.

Serve it with `python -m api serve`, or, on a database that is migrated, `uvicorn --factory api.main:create_app`.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from fastapi.routing import APIRoute

import fastmtp
from api import health, http, migrate, routes
from api.db import Database
from api.orchestrator import Orchestrator
from api.outbox import Dispatcher
from api.prefect_orchestrator import PrefectOrchestrator, check_cron
from api.reconcile import Reconciler
from api.service import Preflight, Service
from api.settings import Settings
from api.sync import Sync
from fastmtp.preflight import Policy, check_job


class NotMigrated(RuntimeError):
    """The database is not at the schema of this version."""


def create_app(
    settings: Settings | None = None, *, orchestrator: Orchestrator | None = None, preflight: Preflight | None = None
) -> FastAPI:
    """The service as an ASGI app.

    Args:
        settings: from the environment when unset.
        orchestrator: Prefect, as the settings name it, when unset.
        preflight: how to look at a job before it is accepted; as the settings say when unset.
    """
    chosen = settings or Settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            db = Database(chosen.database_url)
            stack.push_async_callback(db.close)
            await _require_migrated(db)
            used = orchestrator
            if used is None:
                prefect = PrefectOrchestrator(chosen.prefect_api_url, timeout=chosen.prefect_timeout_seconds)
                used = await stack.enter_async_context(prefect)
            reconciler = Reconciler(db, used, lost_after=chosen.lost_after_seconds)
            sync = Sync(used, Dispatcher(db, used), reconciler, poll_seconds=chosen.poll_seconds)
            app.state.orchestrator, app.state.sync = used, sync
            app.state.service = Service(
                chosen, db, preflight=preflight or _preflight(chosen), check_cron=check_cron, wake=sync.wake
            )
            await stack.enter_async_context(sync.running())
            yield

    app = FastAPI(
        title="fastmtp",
        version=fastmtp.__version__,
        summary="Fine-tune a model's own MTP head for the traffic it serves, in the shape of OpenAI's fine-tuning API",
        lifespan=lifespan,
        generate_unique_id_function=_operation_id,
    )
    http.install(app)
    app.include_router(routes.router)
    app.include_router(health.router)
    return app


def _preflight(settings: Settings) -> Preflight:
    policy = Policy(
        sources=settings.allowed_sources, destinations=settings.allowed_destinations, servers=settings.allowed_servers
    )
    return functools.partial(check_job, policy=policy) if settings.preflight else policy.require_job


async def _require_migrated(db: Database) -> None:
    found, wanted = await migrate.current(db), migrate.head()
    if found != wanted:
        raise NotMigrated(f"The database is at {found}, this version needs {wanted}; run `python -m api migrate`.")


def _operation_id(route: APIRoute) -> str:
    return route.name
