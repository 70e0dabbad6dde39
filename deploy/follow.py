"""Follow a job over HTTP and show it on the terminal: a bar for the whole job, and a line for whatever happens.

Knows the service only by its answers. Where stdout is no terminal the lines appear without the bar.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from textwrap import shorten
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

POLL_SECONDS = 1.0
METRICS_SECONDS = 3.0
SILENCE_SECONDS = 20.0
DETAIL = 60  # characters of what a stage says of itself, which may be a whole command
ENDED = ("succeeded", "failed", "cancelled")


def post_job(api: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Post a job. Raises RuntimeError with the service's own words when it refuses."""
    answer = api.post("/v1/fine_tuning/jobs", json=body)
    if answer.status_code != 202:
        problem = answer.json() if "json" in answer.headers.get("content-type", "") else {"detail": answer.text}
        raise RuntimeError(f"The service refused the job ({answer.status_code}): {problem.get('detail')}")
    job: dict[str, Any] = answer.json()
    return job


def follow(api: httpx.Client, job_id: str, console: Console, check: Callable[[], None]) -> dict[str, Any]:
    """Show the job until it ends; returns it as the service answers it then.

    Args:
        check: called about once a second; raises when something the job needs has died.
    """
    lines = _Lines(console)
    events = _Events(api, job_id)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        shown = bar.add_task("queued", total=1.0)
        while True:
            check()
            # The job first: what its last events say was written no later than its last state.
            job: dict[str, Any] = _get(api, f"/v1/fine_tuning/jobs/{job_id}")
            for event in events.new():
                lines.show(event)
            bar.update(shown, completed=job["progress"], description=_standing(job))
            lines.tick(job)
            if job["status"] in ENDED:
                return job
            time.sleep(POLL_SECONDS)


class _Events:
    """The job's events, each once, oldest first."""

    def __init__(self, api: httpx.Client, job_id: str) -> None:
        self._api = api
        self._path = f"/v1/fine_tuning/jobs/{job_id}/events"
        self._last: str | None = None

    def new(self) -> Iterator[dict[str, Any]]:
        while True:
            cursor = {"after": self._last} if self._last else {}
            page = _get(self._api, self._path, {"order": "asc", "limit": "100", **cursor})
            yield from page["data"]
            self._last = page["last_id"] or self._last
            if not page["has_more"]:
                return


class _Lines:
    """One line an event; of the numbers only some, since there may be many a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_metrics = 0.0
        self._begun = self._last_line = time.monotonic()

    def show(self, event: dict[str, Any]) -> None:
        """Print the event, unless it is one of many numbers. A measured acceptance always is."""
        if event["type"] == "metrics" and "mean_acceptance_length" not in event["data"]:
            if time.monotonic() - self._last_metrics < METRICS_SECONDS:
                return
            self._last_metrics = time.monotonic()
        self._print(_line(event), {"warn": "yellow", "error": "red"}.get(event["level"], ""))

    def tick(self, job: dict[str, Any]) -> None:
        """Say where the job stands after a long silence, where there is no bar that does."""
        if not self._console.is_terminal and time.monotonic() - self._last_line > SILENCE_SECONDS:
            self._print(_standing(job))

    def _print(self, text: str, style: str = "") -> None:
        self._last_line = time.monotonic()
        self._console.print(f"{self._last_line - self._begun:6.1f} s  {text}", style=style, markup=False)


def _line(event: dict[str, Any]) -> str:
    """An event in few words: of a step's numbers the loss and the speed, of a measurement the acceptance."""
    data = event["data"]
    if event["type"] != "metrics":
        return (
            f"{data['stage']}: {data['status']}" if "stage" in data and event["level"] == "info" else event["message"]
        )
    parts = [f"step {data['step']:.0f}"] if "step" in data else []
    # A loss that is not finite travels as text.
    loss = data.get("loss")
    parts += [] if loss is None else [f"loss {loss:.3f}" if isinstance(loss, float) else f"loss {loss}"]
    parts += [f"{data['tokens_per_second']:.0f} tokens/s"] if "tokens_per_second" in data else []
    if "mean_acceptance_length" in data:
        rates = [f"{data[name]:.3f}" for name in sorted(data) if name.startswith("acceptance_")]
        parts.append(f"acceptance {' '.join(rates)}, mean length {data['mean_acceptance_length']:.3f}")
    parts += [f"{data['drafts']:.0f} drafts"] if "drafts" in data else []
    return f"{data['stage']}: {', '.join(parts)}"


def _standing(job: dict[str, Any]) -> str:
    """The stage at hand, how far it is and what it says of itself: `train 120/300 steps`, `evaluate: vLLM starts`."""
    stage = next((one for one in job["stages"] if one["stage"] == job["stage"]), None)
    if stage is None:
        return str(job["status_detail"] or job["status"])
    of = f" {stage['done']:.0f}/{stage['total']:.0f} {stage['unit']}" if stage["total"] else ""
    detail = str(job["status_detail"] or "")
    return f"{stage['stage']}{of}" + (f": {shorten(detail, DETAIL)}" if detail else "")


def _get(api: httpx.Client, path: str, params: dict[str, str] | None = None) -> dict[str, Any]:
    answer = api.get(path, params=params)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found
