"""What a person sees of a run: `metrics.jsonl`, TensorBoard when asked, and the note beside the progress bar."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastmtp.errors import ConfigError
from fastmtp.progress import Reporter
from fastmtp.protocol import Measurement
from fastmtp.stage import write_atomic

METRICS = "metrics.jsonl"
EVENTS = "tensorboard"
TIMES = frozenset({"tokens_per_second", "loading"})  # figures that differ from run to run
Record = dict[str, float]


class MetricsLog:
    """One JSON object a line and step, in order and once each, also over kills and resumes.

    Args:
        directory: where the file and TensorBoard's events go.
        step: the last step that was done; later lines of a run that was killed are dropped, since they will come again.
    """

    def __init__(self, directory: Path, step: int, *, tensorboard: bool) -> None:
        path = directory / METRICS
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= step]
        write_atomic(path, b"".join(kept))
        self.step = json.loads(kept[-1])["step"] if kept else -1
        self._file = path.open("a", encoding="utf-8")
        self._board = board(directory / EVENTS, purge_step=step + 1) if tensorboard else None

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board:
            self._board.close()

    def add(self, step: int, record: Mapping[str, float]) -> None:
        """Write one step's figures; a step that is there already is left as it is."""
        if step <= self.step:
            return
        self.step = step
        self._file.write(json.dumps({"step": step, **record}) + "\n")
        self._file.flush()
        if self._board:
            for name, value in record.items():
                self._board.add_scalar(name.replace("_", "/", 1) if name[-1:].isdigit() else name, value, step)

    def sync(self) -> None:
        """Make what was written durable."""
        os.fsync(self._file.fileno())


class Story:
    """Where each step's figures go: the log of the main process, and the reporter.

    Args:
        log: None in the other processes, where nothing is written.
        latest: the last held-out estimate, shown until the next one.
        seconds_left: time left, or None while it is not known.
    """

    def __init__(
        self, log: MetricsLog | None, reporter: Reporter, latest: Record, seconds_left: Callable[[], float | None]
    ) -> None:
        self._log, self._reporter = log, reporter
        self._latest, self._seconds_left = latest, seconds_left

    def __enter__(self) -> Story:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log:
            self._log.close()

    def add(self, step: int, record: Record) -> None:
        """One step's figures."""
        if self._log is None:
            return
        self._log.add(step, record)
        if "mean_acceptance_length" in record:
            self._latest = record
        text = note(record, self._latest, self._seconds_left()) if "loss" in record else ""
        self._reporter.advance(step, metrics={"step": float(step), **record}, note=text)

    def sync(self) -> None:
        """Make what was written durable."""
        if self._log:
            self._log.sync()


def board(directory: Path, purge_step: int) -> Any:  # noqa: ANN401 - TensorBoard's type
    """TensorBoard's writer; events from `purge_step` on are hidden. Raises as `require_tensorboard`."""
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=purge_step)


def require_tensorboard() -> None:
    """Raise ConfigError when the package is not there."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "train.tensorboard is true, but the package tensorboard is not installed.",
            mend="pip install 'fastmtp[tensorboard]', or leave it out: metrics.jsonl and curves.png come anyway.",
            pointer="/train/tensorboard",
        )


def note(record: Mapping[str, float], latest: Mapping[str, float], seconds_left: float | None) -> str:
    """The figures of a step for people: loss in all and per recursive step, speed, held-out acceptance, time left."""
    parts = [f"loss {record['loss']:.3f} ({_series(record, 'loss_')})", f"{record['tokens_per_second']:,.0f} tokens/s"]
    if latest:
        parts.append(f"held-out {_series(latest, 'acceptance_')} length {latest['mean_acceptance_length']:.3f}")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def flat(found: Measurement) -> Record:
    """A measurement as figures of a step."""
    rates = {f"acceptance_{k}": rate for k, rate in enumerate(found.acceptance)}
    return {**rates, "mean_acceptance_length": found.mean_acceptance_length}


def duration(seconds: float) -> str:
    """Seconds as people say them: 40 s, 12 min, 3 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _series(record: Mapping[str, float], prefix: str) -> str:
    return " ".join(f"{value:.2f}" for key, value in record.items() if key.startswith(prefix))


def _lines(path: Path) -> list[bytes]:
    """Whole lines; a torn last one is left out."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    return text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
