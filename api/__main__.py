"""`python -m api serve | migrate | openapi`. Settings come from FASTMTP_API_* (see api/settings.py)."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys

import uvicorn
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from api import migrate
from api.db import Database
from api.main import create_app
from api.settings import Settings


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m api", description="The fastmtp REST service.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="migrate the database, then serve")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on (default 8000)")
    commands.add_parser("migrate", help="bring the database to the schema of this version")
    commands.add_parser("openapi", help="print the OpenAPI document")
    chosen = parser.parse_args(argv)
    try:
        settings = Settings()
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        sys.stderr.write(f"settings: {faults}\n")
        return 2
    if chosen.command == "openapi":
        sys.stdout.write(json.dumps(create_app(settings).openapi(), indent=1, sort_keys=True) + "\n")
        return 0
    _log_to_stderr()
    try:
        asyncio.run(_migrate(settings))
    except (SQLAlchemyError, OSError) as error:
        sys.stderr.write(f"database: {' '.join(str(error).split())}\n")
        return 1
    if chosen.command == "serve":
        uvicorn.run(create_app(settings), host=chosen.host, port=chosen.port, log_config=None)
    return 0


async def _migrate(settings: Settings) -> None:
    db = Database(settings.database_url)
    try:
        await migrate.upgrade(db)
    finally:
        await db.close()


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
