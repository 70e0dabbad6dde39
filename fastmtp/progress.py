"""How long work shows itself: a bar on the terminal, and records in a file that a flow, or anyone, can tail.

One `Reporter` serves both. The bar goes to stderr, so that stdout stays for `--json`; where stderr is no terminal a
plain line appears every few seconds instead. Records are `fastmtp.protocol.Progress`, one JSON object a line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from fastmtp.protocol import Progress, Stage
from fastmtp.table import size

RECORD_SECONDS = 1.0
LINE_SECONDS = 10.0


class Reporter:
    """Reports one stage. Use as a context manager; an exception that leaves it is recorded as `failed`.

    Args:
        stage: whose progress this is.
        file: where records are appended; none when unset.
        quiet: no bar and no lines.
        label: what the person watching reads instead of the stage, for work that is no stage of a job.
    """

    def __init__(
        self, stage: Stage, *, file: Path | None = None, quiet: bool = False, label: str | None = None
    ) -> None:
        self.stage: Stage = stage
        self._label = label or stage
        self._file = file
        self._quiet = quiet
        self._console = Console(file=sys.stderr)
        self._bar: Bar | None = None
        self._unit = ""
        self._done = 0.0
        self._total: float | None = None
        self._last_record = 0.0
        self._last_line = 0.0
        self._begun = time.monotonic()

    def __enter__(self) -> Reporter:
        self._record("started")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        if error is None:
            self._record("finished")
        else:
            self._record("failed", message=str(error) or type(error).__name__)

    def phase(self, message: str, total: float | None = None, unit: str = "") -> None:
        """Begin a part of the stage with its own bar: `total` of `unit`, or open-ended when unset."""
        if self._bar:
            self._bar.stop()
        self._done, self._total, self._unit = 0.0, total, unit
        self._last_line = time.monotonic()
        if not self._quiet and self._console.is_terminal:
            amount: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TextColumn(unit))
            if unit == "bytes":
                amount = (DownloadColumn(), TransferSpeedColumn())
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(), *amount, TimeElapsedColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"), console=self._console, transient=False,
            )  # fmt: skip
            self._bar.add_task(f"{self._label}: {message}", total=total, note="")
            self._bar.start()
        self.say(message, bar_only_in_file=self._bar is not None)

    def advance(self, done: float, *, metrics: Mapping[str, float] | None = None, note: str = "") -> None:
        """Report that `done` (absolute) is reached. Records are throttled, except those that carry metrics."""
        self._done = done
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done, note=note)
        now = time.monotonic()
        if metrics or now - self._last_record >= RECORD_SECONDS:
            self._record("running", metrics=metrics or {}, message=note)
        if not self._bar and not self._quiet and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            if self._unit == "bytes":
                reached = size(done) + (f" of {size(self._total)}" if self._total else "")
            else:
                reached = f"{done:,.0f}" + (f"/{self._total:,.0f}" if self._total else "") + f" {self._unit}"
            self._console.print(f"{self._label}: {reached} {note}", highlight=False)

    def say(self, message: str, *, bar_only_in_file: bool = False) -> None:
        """One line for the person watching, and a record."""
        if not self._quiet and not bar_only_in_file:
            self._console.print(f"{self._label}: {message}", highlight=False)
        self._record("running", message=message)

    def skipped(self) -> None:
        """Say that a finished result was found and is used."""
        if not self._quiet:
            self._console.print(f"{self._label}: finished before, used as it is", highlight=False)
        self._record("skipped")

    def _record(self, status: str, *, metrics: Mapping[str, float] | None = None, message: str = "") -> None:
        self._last_record = time.monotonic()
        if self._file is None:
            return
        record = Progress.model_validate(
            {
                "time": time.time(), "stage": self.stage, "status": status, "done": self._done, "total": self._total,
                "unit": self._unit, "message": message, "metrics": dict(metrics or {}),
            }
        )  # fmt: skip
        with self._file.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")


class Tail:
    """Reads the records that were appended to a progress file since the last call. A half-written last line waits."""

    def __init__(self, file: Path, on_record: Callable[[Progress], None]) -> None:
        self._file = file
        self._on_record = on_record
        self._offset = file.stat().st_size if file.exists() else 0

    def __call__(self) -> None:
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._on_record(Progress.model_validate_json(line))
