"""Brings the database to the schema of this version, and tells whether it is there. Nothing migrates by itself but
`serve`.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from api.db import Database

# Any number that nothing else in the database uses as an advisory lock.
_LOCK = 5_201_120


def config() -> Config:
    """Alembic's configuration, wherever the package is installed."""
    return Config(str(Path(__file__).with_name("alembic.ini")))


def head() -> str:
    """The revision this version works with."""
    revision = ScriptDirectory.from_config(config()).get_current_head()
    assert revision is not None, "there is at least one migration"
    return revision


async def upgrade(db: Database) -> None:
    """Apply what is missing. Several services may start at once: one does it, the others wait."""
    async with db.writing.begin() as connection:
        await connection.run_sync(_upgrade)


async def current(db: Database) -> str | None:
    """The revision the database is at; None when it is empty."""
    async with db.engine.connect() as connection:
        return await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    settings = config()
    settings.attributes["connection"] = connection
    command.upgrade(settings, "head")
