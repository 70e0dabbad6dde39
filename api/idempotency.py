"""Idempotency-Key: the same POST made twice makes one thing, and gets the same answer twice.

The key is stored with its answer in the transaction that makes the thing, so there is no moment, and no crash,
between them, and no key is ever left "in flight": of several requests at once, the first to commit decides, and the
others get its answer.
"""

from __future__ import annotations

import hashlib
import json

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from api.db import IdempotencyKey
from api.http import Problem

LONGEST = 255


def read_key(header: str | None) -> str | None:
    """The key from the header, with or without the draft standard's quotes. Raises Problem when it cannot be one."""
    if header is None:
        return None
    key = header[1:-1] if len(header) > 1 and header[0] == header[-1] == '"' else header
    if not key.strip() or len(key) > LONGEST:
        detail = f"Idempotency-Key must hold 1 to {LONGEST} characters; a UUID serves well."
        raise Problem(400, "invalid_idempotency_key", detail, param="Idempotency-Key")
    return key


def hash_of(body: object) -> str:
    """sha256 over the canonical JSON of a request's body."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


async def find(session: AsyncSession, scope: str, key: str, body_sha256: str, *, now: float) -> IdempotencyKey | None:
    """The answer this key got before. Raises Problem when it was for another body."""
    row = await session.get(IdempotencyKey, (scope, key), populate_existing=True)
    if row is None or row.expires_at <= now:
        return None
    if row.body_sha256 != body_sha256:
        detail = "This Idempotency-Key was used with another body; use a new key for a new request."
        raise Problem(422, "idempotency_key_reused", detail, param="Idempotency-Key")
    return row


async def store(session: AsyncSession, row: IdempotencyKey, *, now: float) -> None:
    """Keep an answer, and forget what has expired. Raises sqlalchemy's IntegrityError when another was faster."""
    await session.execute(delete(IdempotencyKey).where(IdempotencyKey.expires_at <= now))
    session.add(row)
    await session.flush()
