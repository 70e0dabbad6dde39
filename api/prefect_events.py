"""Prefect's event stream in the seam's words. Events that are none of ours, or not understood, are left out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from datetime import datetime

from prefect.events import Event
from prefect.events.clients import PrefectEventSubscriber
from prefect.events.filters import EventFilter, EventNameFilter
from pydantic import ValidationError
from websockets.exceptions import WebSocketException

from api.orchestrator import Heartbeat, ProgressSeen, RunState, Seen, StateSeen, Unavailable
from fastmtp import protocol
from fastmtp.protocol import Progress

log = logging.getLogger(__name__)

RUN_PREFIX = "prefect.flow-run."
PROGRESS_PREFIX = protocol.EVENT_PROGRESS
_JOB_PREFIX = protocol.resource_id("")


@contextlib.asynccontextmanager
async def subscribe(api_url: str) -> AsyncIterator[AsyncIterator[Seen]]:
    """What happens from now on, and in the last minute. Raises Unavailable when there is no connection, or no more."""
    wanted = EventFilter(event=EventNameFilter(prefix=[RUN_PREFIX, PROGRESS_PREFIX]))
    subscriber = PrefectEventSubscriber(api_url, filter=wanted, reconnection_attempts=0)
    try:
        async with subscriber:
            yield _translated(subscriber)
    except (WebSocketException, OSError, TimeoutError) as error:
        raise Unavailable(f"Prefect's event stream: {type(error).__name__}: {error}") from error


async def _translated(events: AsyncIterator[Event]) -> AsyncIterator[Seen]:
    async for event in events:
        seen = seen_of(event)
        if seen:
            yield seen


def seen_of(event: Event) -> Seen | None:
    """What this event tells us, if anything."""
    if event.event == protocol.EVENT_PROGRESS:
        return progress_of(event)
    run_id = _run_of(event.resource.id)
    if run_id is None:
        return None
    if event.event == f"{RUN_PREFIX}heartbeat":
        return Heartbeat(run_id, event.occurred.timestamp())
    state_type = event.resource.get("prefect.state-type")
    if not state_type:
        return None
    stamp = event.resource.get("prefect.state-timestamp")
    return StateSeen(
        run_id,
        RunState(
            id=str(event.id),
            type=state_type,
            name=event.resource.get("prefect.state-name") or "",
            time=(datetime.fromisoformat(stamp) if stamp else event.occurred).timestamp(),
            message=event.resource.get("prefect.state-message") or "",
        ),
    )


def progress_of(event: Event) -> ProgressSeen | None:
    """The progress record in an event; None, and a line in the log, when it does not read."""
    try:
        record = Progress.model_validate(event.payload)
    except ValidationError as error:
        log.warning("event %s of %s is no progress record: %s", event.id, event.resource.id, error)
        return None
    runs = [run for related in event.related if (run := _run_of(related.id))]
    return ProgressSeen(str(event.id), event.resource.id.removeprefix(_JOB_PREFIX), runs[0] if runs else None, record)


def _run_of(resource_id: str) -> str | None:
    return resource_id.removeprefix(RUN_PREFIX) if resource_id.startswith(RUN_PREFIX) else None
