"""Points in time, as people and logs write them, and a window between two of them. UTC where no zone is given."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime

_AGO = re.compile(r"(\d+)([hdw])")
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}
# An earlier time is none, but a duration or a counter.
_FIRST = datetime(2000, 1, 1, tzinfo=UTC).timestamp()
# Seconds since 1970 stay below the first for 3000 years; then come milli-, micro- and nanoseconds.
_UNITS = ((1e11, 1.0), (1e14, 1e3), (1e17, 1e6), (1e20, 1e9))


@dataclass(frozen=True)
class Window:
    """What was logged at or after `since` and before `until`, Unix seconds; None leaves that end open."""

    since: float | None = None
    until: float | None = None

    @classmethod
    def of(cls, since: str | None, until: str | None, now: float | None = None) -> Window:
        """From a date, a time, or a length of time before now such as 7d.

        Raises:
            ValueError: for what is none, and for an end that comes before the begin and always will.
        """
        now = time.time() if now is None else now
        window = cls(*(None if text is None else _moment(text, now) for text in (since, until)))
        if since and until and bool(_AGO.fullmatch(since)) == bool(_AGO.fullmatch(until)):
            assert window.since is not None and window.until is not None
            if window.since >= window.until:
                raise ValueError(f"since ({since}) is not before until ({until})")
        return window

    @property
    def open(self) -> bool:
        """Whether everything lies in it."""
        return self.since is None and self.until is None

    def holds(self, moment: float) -> bool:
        """Whether a moment lies in it."""
        return (self.since is None or moment >= self.since) and (self.until is None or moment < self.until)


def moment_of(value: object) -> float | None:
    """Unix seconds of what a log has as a time: a number in any common unit, ISO 8601 or a datetime; None otherwise."""
    if isinstance(value, str):
        try:
            return moment_of(datetime.fromisoformat(value.strip()))
        except ValueError:
            try:
                return moment_of(float(value))
            except ValueError:
                return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < _FIRST:
        return None
    return next((value / unit for below, unit in _UNITS if value < below), None)


def _moment(text: str, now: float) -> float:
    if ago := _AGO.fullmatch(text):
        return now - int(ago[1]) * _SECONDS[ago[2]]
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"{text} is no date: {error}") from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
