"""A stand-in at the one seam the service has, and requests to make with it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from api.orchestrator import ENDED, ProgressSeen, Run, RunState, Seen, StateSeen, Unavailable
from fastmtp.protocol import Measurement, Progress, Report


class FakeOrchestrator:
    """Keeps runs in memory; a test sets states. `up` unset: nothing answers. `heard` unset: the stream is silent."""

    def __init__(self) -> None:
        self.up = True
        self.heard = True
        self.runs: dict[str, Run] = {}
        self.fired: list[str] = []
        self.keys: dict[str, str] = {}
        self.results: dict[str, Report] = {}
        self.progress: list[ProgressSeen] = []
        self.schedules: dict[str, tuple[str, str]] = {}
        self.signs: dict[str, float] = {}
        self.refusal: Exception | None = None
        self.answers_lost = 0
        self.calls: list[str] = []
        self._streams: list[asyncio.Queue[Seen | None]] = []
        self._ids = itertools.count(1)

    def set_state(
        self, run_id: str, type_: str, name: str = "", message: str = "", at: float | None = None
    ) -> RunState:
        """Put a run into a state and announce it."""
        state = RunState(f"state-{next(self._ids)}", type_, name or type_.title(), at or time.time(), message)
        self.runs[run_id] = Run(run_id, state, self.runs[run_id].parameters)
        self.tell(StateSeen(run_id, state))
        return state

    def make_progress(self, job_id: str, run_id: str, stage: str, **fields: Any) -> ProgressSeen:
        """Let a run report progress."""
        record = Progress.model_validate({"time": time.time(), "stage": stage, "status": "running", **fields})
        seen = ProgressSeen(f"event-{next(self._ids)}", job_id, run_id, record)
        self.progress.append(seen)
        self.tell(seen)
        return seen

    def fire(self, schedule_id: str, job: dict[str, Any]) -> str:
        """Let a schedule start a run."""
        run_id = f"0190a0b0-0000-7000-8000-{next(self._ids):012d}"
        state = RunState(f"state-{next(self._ids)}", "PENDING", "Pending", time.time())
        self.runs[run_id] = Run(run_id, state, {"job": job, "schedule_id": schedule_id})
        self.fired.append(run_id)
        return run_id

    def tell(self, seen: Seen) -> None:
        if self.heard:
            for queue in self._streams:
                queue.put_nowait(seen)

    def close_streams(self) -> None:
        for queue in self._streams:
            queue.put_nowait(None)

    def _answer(self, call: str) -> None:
        self.calls.append(call)
        if not self.up:
            raise Unavailable("Prefect does not answer.")

    async def ready(self) -> None:
        self._answer("ready")

    async def create_run(self, *, job_id: str, spec: dict[str, Any], key: str) -> str:
        self._answer("create_run")
        if self.refusal:
            raise self.refusal
        if key not in self.keys:
            run_id = f"0190a0b0-0000-7000-8000-{next(self._ids):012d}"
            self.keys[key] = run_id
            state = RunState(f"state-{next(self._ids)}", "SCHEDULED", "Scheduled", time.time())
            self.runs[run_id] = Run(run_id, state, {"job": spec, "job_id": job_id})
        if self.answers_lost:
            self.answers_lost -= 1
            raise Unavailable("The answer was lost.")
        return self.keys[key]

    async def find_run(self, key: str) -> str | None:
        self._answer("find_run")
        return self.keys.get(key)

    async def read_runs(self, ids: Sequence[str]) -> dict[str, Run]:
        self._answer("read_runs")
        return {one: self.runs[one] for one in ids if one in self.runs}

    async def read_fired_runs(self, since: float) -> list[Run]:
        self._answer("read_fired_runs")
        return [self.runs[one] for one in self.fired]

    async def cancel_run(self, run_id: str) -> None:
        self._answer("cancel_run")
        if self.runs[run_id].state.type == "SCHEDULED":
            self.set_state(run_id, "CANCELLED")
        elif self.runs[run_id].state.type not in ENDED:
            self.set_state(run_id, "CANCELLING")

    async def crash_run(self, run_id: str, message: str) -> None:
        self._answer("crash_run")
        if run_id in self.runs and self.runs[run_id].state.type not in ENDED:
            self.set_state(run_id, "CRASHED", message=message)

    async def read_result(self, job_id: str, run_id: str) -> Report | None:
        self._answer("read_result")
        return self.results.get(job_id)

    async def read_progress(self, job_id: str, since: float) -> list[ProgressSeen]:
        self._answer("read_progress")
        return [seen for seen in self.progress if seen.job_id == job_id and seen.record.time >= since]

    async def alive_since(self, run_id: str, since: float) -> bool:
        self._answer("alive_since")
        return self.signs.get(run_id, 0.0) >= since

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[Seen]]:
        self._answer("stream")
        queue: asyncio.Queue[Seen | None] = asyncio.Queue()
        self._streams.append(queue)

        async def items() -> AsyncIterator[Seen]:
            while (seen := await queue.get()) is not None:
                yield seen

        try:
            yield items()
        finally:
            self._streams.remove(queue)

    async def create_schedule(self, schedule_id: str, cron: str, timezone: str, spec: dict[str, Any]) -> str:
        self._answer("create_schedule")
        if self.refusal:
            raise self.refusal
        self.schedules[schedule_id] = (cron, timezone)
        return f"prefect-{schedule_id}"

    async def delete_schedule(self, schedule_id: str) -> None:
        self._answer("delete_schedule")
        self.schedules.pop(schedule_id, None)


def body(**changes: Any) -> dict[str, Any]:
    """A request for a job that is in order."""
    return {
        "model": "/models/tiny",
        "training_file": "/data/train.jsonl",
        "validation_file": "/data/test.jsonl",
        "method": {"type": "mtp", "mtp": {"train": {"epochs": 2}, "publish": {"uri": "s3://models/tiny/"}}},
        **changes,
    }


def report(job_id: str, status: str = "succeeded", **fields: Any) -> Report:
    """A report as the flow stores it."""
    measured = {
        "base": Measurement(acceptance=[0.9, 0.4, 0.2], mean_acceptance_length=2.5, drafts=1500),
        "tuned": Measurement(acceptance=[0.9, 0.7, 0.5], mean_acceptance_length=3.1, drafts=1300),
        "greedy_identical": (40, 40),
        "gate": {"passed": status == "succeeded", "reason": "gain of 0.600 in mean acceptance length"},
        "seconds": {"train": 12.5},
    }
    if status == "succeeded":
        uri = "s3://models/tiny/v1"
        measured |= {
            "published": uri,
            "artifacts": [{"uri": f"{uri}/model.safetensors", "size": 10, "sha256": "0" * 64}],
        }
    if status == "failed":
        measured = {}
    return Report.model_validate({"job_id": job_id, "status": status, **measured, **fields})
