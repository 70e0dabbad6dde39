"""The narrow seam between the service and what runs its jobs: what we ask of it, in our own words.

`prefect_orchestrator.py` is the real one. Nothing else in `api` knows Prefect. State types are Prefect's (SCHEDULED,
PENDING, RUNNING, PAUSED, CANCELLING, CANCELLED, COMPLETED, FAILED, CRASHED); times are unix seconds; ids are text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from fastmtp.protocol import Progress, Report

ENDED = frozenset({"COMPLETED", "FAILED", "CRASHED", "CANCELLED"})
# What we write into a run's state when we give it up; by these words we know it again.
LOST = "No sign of life"


class OrchestratorError(Exception):
    """Base of what the seam raises."""


class Unavailable(OrchestratorError):
    """No answer, or not set up yet; the same call may succeed later."""


class Refused(OrchestratorError):
    """It answered no, and would again."""


@dataclass(frozen=True)
class RunState:
    """One state of a run. `id` is also the id of the event that announces it."""

    id: str
    type: str
    name: str
    time: float
    message: str = ""


@dataclass(frozen=True)
class Run:
    """One flow run as it is now."""

    id: str
    state: RunState
    parameters: dict[str, Any]


@dataclass(frozen=True)
class StateSeen:
    """The stream says: this run entered this state."""

    run_id: str
    state: RunState


@dataclass(frozen=True)
class Heartbeat:
    """The stream says: this run's process was alive then."""

    run_id: str
    time: float


@dataclass(frozen=True)
class ProgressSeen:
    """The stream or the store says: this job made progress."""

    id: str
    job_id: str
    run_id: str | None
    record: Progress


Seen = StateSeen | Heartbeat | ProgressSeen


class Orchestrator(Protocol):
    """Every method raises Unavailable when there is no answer."""

    async def ready(self) -> None:
        """Return when it answers."""

    async def create_run(self, *, job_id: str, spec: dict[str, Any], key: str) -> str:
        """Ask for a run of the fine-tuning flow. The same `key` gives the same run. Returns its id; raises Refused."""

    async def find_run(self, key: str) -> str | None:
        """The run that was created with this key."""

    async def read_runs(self, ids: Sequence[str]) -> dict[str, Run]:
        """These runs by id; one that is missing does not exist any more."""

    async def read_fired_runs(self, since: float) -> list[Run]:
        """Runs that schedules made for a time after `since` and that are no longer waiting for it."""

    async def cancel_run(self, run_id: str) -> None:
        """Ask a run to end. One that has ended, or is gone, is left as it is."""

    async def crash_run(self, run_id: str, message: str) -> None:
        """Give up a run that shows no sign of life."""

    async def read_result(self, job_id: str, run_id: str) -> Report | None:
        """The report that the run stored for this job, if it did."""

    async def read_progress(self, job_id: str, since: float) -> list[ProgressSeen]:
        """Stored progress of a job since then, oldest first."""

    async def alive_since(self, run_id: str, since: float) -> bool:
        """Whether anything at all was heard of the run since then."""

    def stream(self) -> AbstractAsyncContextManager[AsyncIterator[Seen]]:
        """Subscribe: what happens from entering on, as it happens. Raises Unavailable when the connection is lost."""

    async def create_schedule(self, schedule_id: str, cron: str, timezone: str, spec: dict[str, Any]) -> str:
        """Let the retraining flow run by this schedule. The same `schedule_id` gives the same one. Returns its id."""

    async def delete_schedule(self, schedule_id: str) -> None:
        """Stop a schedule and drop its runs that have not begun. One that is gone is fine."""
