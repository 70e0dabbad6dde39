"""Keeps the database and Prefect in step while the service runs: stream for speed, poll for truth.

Four tasks: one works through the outbox, one listens to Prefect's events, one applies what was heard, and one reads the
state of open runs every few seconds, and at once when the stream (re)connects: subscribed first, then read, so that
nothing falls between. None ends by an error: it is logged, shows in `fault`, and is tried again. Several services on
one database only repeat each other's work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from sqlalchemy.exc import SQLAlchemyError

from api.orchestrator import Orchestrator, OrchestratorError, Seen, Unavailable
from api.outbox import Dispatcher
from api.reconcile import Reconciler

log = logging.getLogger(__name__)

IDLE_SECONDS = 30.0
STEADY_SECONDS = 60.0
LONGEST_LAG_SECONDS = 60.0
STOP_SECONDS = 5.0
RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)


class Sync:
    """The background work of the service. `running` starts it and ends it."""

    def __init__(
        self, orchestrator: Orchestrator, dispatcher: Dispatcher, reconciler: Reconciler, *, poll_seconds: float
    ) -> None:
        self._orchestrator = orchestrator
        self._dispatcher = dispatcher
        self._reconciler = reconciler
        self._poll_seconds = poll_seconds
        self._work = asyncio.Event()
        self._poll = asyncio.Event()
        self._stopping = asyncio.Event()
        self._heard: asyncio.Queue[Seen | None] = asyncio.Queue()
        self._deep = True
        self.last_reading: float | None = None
        self.streaming = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work in the background until left; then what is under way may end, for a moment."""
        listening = asyncio.create_task(self._forever(self._listen), name="sync-listen")
        steps = (self._dispatch, self._apply, self._read)
        working = [asyncio.create_task(self._forever(step), name=f"sync{step.__name__}") for step in steps]
        try:
            yield
        finally:
            self._stopping.set()
            self._work.set()
            self._poll.set()
            self._heard.put_nowait(None)
            listening.cancel()
            await asyncio.wait(working, timeout=STOP_SECONDS)
            for task in working:
                task.cancel()
            await asyncio.gather(listening, *working, return_exceptions=True)

    def wake(self) -> None:
        """There is something new in the outbox."""
        self._work.set()

    def lag(self) -> float | None:
        """Seconds since the state of all open runs was last read; None before the first time."""
        return None if self.last_reading is None else time.time() - self.last_reading

    def fault(self) -> str | None:
        """Why rows may be out of step with Prefect, if they may."""
        lag = self.lag()
        if lag is None:
            return "runs have not been read yet"
        longest = max(LONGEST_LAG_SECONDS, 3 * self._poll_seconds)
        return None if lag <= longest else f"runs were last read {lag:.0f} s ago"

    async def _dispatch(self) -> None:
        self._work.clear()
        done, wait = await self._dispatcher.dispatch_due()
        if done:
            # The stream may have told of a new run before its row named it.
            self._poll.set()
        await _wait(self._work, IDLE_SECONDS if wait is None else min(wait, IDLE_SECONDS))

    async def _listen(self) -> None:
        try:
            async with self._orchestrator.stream() as stream:
                self.streaming = True
                self._read_deeply()
                async for seen in stream:
                    self._heard.put_nowait(seen)
        finally:
            self.streaming = False
        raise Unavailable("Prefect closed its event stream.")

    async def _apply(self) -> None:
        seen = await self._heard.get()
        if seen is None:
            return
        try:
            await self._reconciler.hear(seen)
        except Exception:
            self._read_deeply()
            raise

    async def _read(self) -> None:
        self._poll.clear()
        deep, self._deep = self._deep, False
        try:
            await self._reconciler.reconcile(deep=deep)
        except Exception:
            self._deep = self._deep or deep
            self._reconciler.lost_contact()
            raise
        self.last_reading = time.time()
        await _wait(self._poll, self._poll_seconds)

    def _read_deeply(self) -> None:
        """Something may have been missed: let the next reading, now, make up for it."""
        self._deep = True
        self._poll.set()

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        """Repeat a step. After an error wait, longer each time; of known errors in a row only the first is logged."""
        failures = 0
        while not self._stopping.is_set():
            begun = time.monotonic()
            try:
                await step()
                failures = 0
                continue
            except (OrchestratorError, SQLAlchemyError, OSError) as error:
                if time.monotonic() - begun > STEADY_SECONDS:
                    failures = 0
                if failures == 0:
                    log.warning("%s: %s", step.__name__.strip("_"), error)
            except Exception:
                log.exception("%s failed; trying again", step.__name__.strip("_"))
            failures += 1
            await _wait(self._stopping, RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1])


async def _wait(event: asyncio.Event, seconds: float) -> None:
    # Not wait_for: until Python 3.12 it forgets a cancellation that arrives together with the event.
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
