"""What a running job shows in Prefect: progress, loss and acceptance as artifacts, each progress record as an event.

All of that is a courtesy: when Prefect cannot be reached it is dropped, with a warning, and the job goes on. The
exception is the report, which is the record of how the job ended: `store_report` returns only when the server has it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.events import emit_event
from prefect.exceptions import PrefectException

from fastmtp.protocol import EVENT_PROGRESS, JOB_TAG_PREFIX, Measurement, Progress, Report, resource_id, result_key
from fastmtp.table import acceptance_table

EVENT_SECONDS = 1.0
ARTIFACT_SECONDS = 2.0
BACK_OFF_SECONDS = 30.0
LOSS_ROWS = 100


class LiveArtifact:
    """An artifact of the run that is created once and then updated in place, at most every `ARTIFACT_SECONDS`."""

    def __init__(self, kind: str, flow_run_id: UUID, *, key: str | None = None, description: str = "") -> None:
        self._fields = {"type": kind, "key": key, "description": description, "flow_run_id": flow_run_id}
        self._id: UUID | None = None
        self._not_before = 0.0

    def show(self, data: float | str, *, now: bool = False) -> None:
        """Show `data`; skipped when the last update was a moment ago, unless `now`."""
        if not now and time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + ARTIFACT_SECONDS
        try:
            with get_client(sync_client=True) as client:
                if self._id is None:
                    self._id = client.create_artifact(ArtifactCreate(**self._fields, data=data)).id
                else:
                    client.update_artifact(self._id, ArtifactUpdate(data=data))
        except (httpx.HTTPError, PrefectException) as error:
            self._not_before = time.monotonic() + BACK_OFF_SECONDS
            get_run_logger().warning("Prefect did not take a progress update (the job goes on): %s", error)


class JobReporter:
    """Shows one job while it runs. Use from the flow's main thread.

    Args:
        job_id: whose events these are.
        model: its name becomes part of the artifact keys, so that Prefect shows the trend over runs.
    """

    def __init__(self, job_id: str, flow_run_id: UUID, model: str) -> None:
        self._job_id = job_id
        self._flow_run_id = flow_run_id
        slug = re.sub(r"[^a-z0-9]+", "-", model.rstrip("/").rsplit("/", 1)[-1].lower()).strip("-")
        self._acceptance_key = f"acceptance-{slug}"
        self._progress = LiveArtifact("progress", flow_run_id, description=f"Progress of job {job_id}")
        self._loss = LiveArtifact("table", flow_run_id, key=f"loss-{slug}", description=f"Training of job {job_id}")
        self._losses = Thinned(LOSS_ROWS)
        self._last_event = 0.0
        self._fraction = 0.0

    def on_progress(self, record: Progress) -> None:
        """Emit the record as an event and bring the artifacts up to date."""
        worth_it = record.status != "running" or bool(record.metrics)
        if worth_it or time.monotonic() - self._last_event >= EVENT_SECONDS:
            self._last_event = time.monotonic()
            self._emit(record)
        self._fraction = max(self._fraction, record.job_fraction())
        self._progress.show(round(100 * self._fraction, 1), now=record.status == "finished")
        if record.stage == "train":
            self._show_loss(record)

    def show_acceptance(self, summary: Mapping[str, Any], tables: Path) -> None:
        """What the evaluate stage found out: its own tables, or the acceptance table from its summary."""
        description = f"Acceptance of job {self._job_id}"
        table = LiveArtifact("markdown", self._flow_run_id, key=self._acceptance_key, description=description)
        with contextlib.suppress(OSError):
            return table.show(tables.read_text("utf-8"), now=True)
        table.show(acceptance_markdown(summary), now=True)

    def store_report(self, report: Report) -> None:
        """Store how the job ended. Raises what Prefect's client raises when the server does not take it."""
        artifact = ArtifactCreate(
            type="result", key=result_key(report.job_id), flow_run_id=self._flow_run_id, data=report.model_dump_json(),
            description=f"Report of job {report.job_id}: {report.status}",
        )  # fmt: skip
        retrying(lambda: _create(artifact))
        if report.status != "failed":
            self._progress.show(100.0, now=True)

    def _emit(self, record: Progress) -> None:
        emit_event(
            event=EVENT_PROGRESS,
            resource={"prefect.resource.id": resource_id(self._job_id)},
            related=[
                {
                    "prefect.resource.id": f"prefect.flow-run.{self._flow_run_id}",
                    "prefect.resource.role": "flow-run",
                },
                {
                    "prefect.resource.id": f"prefect.tag.{JOB_TAG_PREFIX}{self._job_id}",
                    "prefect.resource.role": "tag",
                },
            ],
            payload=json.loads(record.model_dump_json()),
        )

    def _show_loss(self, record: Progress) -> None:
        if "loss" in record.metrics:
            self._losses.add({name: _shown(value) for name, value in record.metrics.items()})
        if self._losses.rows:
            self._loss.show(json.dumps(self._losses.rows), now=record.status == "finished")


class Thinned:
    """At most `limit` rows of a series of any length: when full, every second one goes, and half as many come in."""

    def __init__(self, limit: int) -> None:
        self.rows: list[dict[str, float | str]] = []
        self._limit = limit
        self._stride = 1
        self._seen = 0

    def add(self, row: dict[str, float | str]) -> None:
        """Add the next row of the series, unless it falls between those that are kept."""
        if self._seen % self._stride == 0:
            self.rows.append(row)
        self._seen += 1
        if len(self.rows) > self._limit:
            self.rows = self.rows[::2]
            self._stride *= 2


def acceptance_markdown(summary: Mapping[str, Any]) -> str:
    """The acceptance table, whether greedy answers stayed the same, and what the gate made of it, as Markdown."""
    heads = ("base", "tuned", "incumbent")
    figures = {head: Measurement.model_validate(summary[head]) for head in heads if summary.get(head)}
    parts = [acceptance_table(figures)]
    if identical := summary.get("greedy_identical"):
        parts.append(f"Greedy answers identical: {identical[0]} of {identical[1]}.")
    if gate := summary.get("gate"):
        parts.append(f"Gate: {'passed' if gate['passed'] else 'not passed'}, {gate['reason']}.")
    return "\n\n".join(parts)


def retrying(call: Callable[[], None], *, attempts: int = 6, first_wait: float = 1.0) -> None:
    """Call until it works, waiting twice as long each time; the last failure is raised."""
    for attempt in range(attempts):
        try:
            return call()
        except (httpx.HTTPError, PrefectException) as error:
            if attempt == attempts - 1:
                raise
            get_run_logger().warning("Prefect did not take the report yet, trying again: %s", error)
            time.sleep(first_wait * 2**attempt)


def _create(artifact: ArtifactCreate) -> None:
    with get_client(sync_client=True) as client:
        client.create_artifact(artifact)


def _shown(value: float) -> float | str:
    """A number as a table shows it: JSON has no NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
