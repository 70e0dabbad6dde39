"""SIGTERM and SIGINT while training: what was done is kept. Prefect gives a run 30 s before it kills.

A signal is noted, and acted on where nothing is half done. Inside `at_once` it also breaks off the work under way,
whose result is then not used: a forward and backward pass over many tokens may take longer than there is time.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator
from typing import Any


class Stop(BaseException):
    """Work was broken off for a signal. No error: nothing but the loop that owns the signals may catch it."""


class StopSignals:
    """Notes SIGTERM and SIGINT while it is entered; `number` is the one that came. Without effect outside the main
    thread, where signals are somebody else's.

    With `last`, a process that was stopped takes no more of them: one of several is signalled again by the launcher as
    soon as another ends, and must still say how it ended.
    """

    def __init__(self, *, last: bool = False) -> None:
        self.number = 0
        self._last = last
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self.number and self._last:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """In this block a signal raises Stop, as does one that came before."""
        self._at_once = True
        try:
            if self.number:
                raise Stop
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, _frame: types.FrameType | None) -> None:
        self.number = number
        if self._at_once:
            self._at_once = False
            raise Stop
