"""Run by Alembic: migrates on the connection that `api.migrate` hands over, or on one of its own for the alembic
command.
"""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy import Connection

from api.db import Base, Database
from api.settings import Settings


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


async def _migrate_alone() -> None:
    db = Database(Settings().database_url)
    async with db.engine.begin() as connection:
        await connection.run_sync(_migrate)
    await db.close()


given = context.config.attributes.get("connection")
if given is not None:
    _migrate(given)
else:
    asyncio.run(_migrate_alone())
