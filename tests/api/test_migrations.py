"""Migrations give the tables that the code uses, on both databases, and the service does not run without them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from api import migrate
from api.db import Base, Database
from api.main import NotMigrated, create_app
from api.settings import Settings
from fastmtp import procs
from tests.api.fakes import FakeOrchestrator


@pytest.fixture
async def db(database_url: str):
    db = Database(database_url)
    yield db
    await db.close()


async def test_migrations_and_models_agree(db: Database):
    await migrate.upgrade(db)

    def differences(connection: Any) -> list[Any]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))

    async with db.engine.connect() as connection:
        assert await connection.run_sync(differences) == []


async def test_migrating_again_and_by_several_at_once_is_harmless(db: Database, database_url: str, tmp_path: Path):
    env = {"FASTMTP_API_DATABASE_URL": database_url}
    argv, log = [sys.executable, "-m", "api", "migrate"], tmp_path / "migrate.log"
    with contextlib.ExitStack() as started:
        children = [started.enter_context(procs.spawn(argv, log=log, env=env)) for _ in range(3)]
        assert [child.wait(60) for child in children] == [0, 0, 0], procs.tail(log, 60)
    await migrate.upgrade(db)
    assert await migrate.current(db) == migrate.head()


async def test_a_migration_can_be_undone(db: Database):
    await migrate.upgrade(db)

    def undo(connection: Any) -> list[str]:
        settings = migrate.config()
        settings.attributes["connection"] = connection
        command.downgrade(settings, "base")
        return list(inspect(connection).get_table_names())

    async with db.engine.begin() as connection:
        assert await connection.run_sync(undo) == ["alembic_version"]


async def test_the_service_does_not_start_on_a_database_that_is_not_migrated(database_url: str):
    app = create_app(Settings(database_url=database_url), orchestrator=FakeOrchestrator())
    with pytest.raises(NotMigrated, match="python -m api migrate"):
        async with app.router.lifespan_context(app):
            pass
