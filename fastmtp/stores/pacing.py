"""A limit on bytes per second over all threads that send."""

from __future__ import annotations

import io
import threading
import time


class Pace:
    """Lets `limit` bytes pass per second; everything at once when None."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        """Return when `count` more bytes may pass."""
        if self.limit is None:
            return
        with self._lock:
            now = time.monotonic()
            wait = max(self._free_at - now, 0.0)
            self._free_at = now + wait + count / self.limit
        time.sleep(wait)

    def body(self, data: bytes | bytearray) -> bytes | bytearray | io.BytesIO:
        """`data` as what a request sends: read block by block where there is a limit."""
        return data if self.limit is None else _Paced(data, self)


class _Paced(io.BytesIO):
    def __init__(self, data: bytes | bytearray, pace: Pace) -> None:
        super().__init__(data)
        self._pace = pace

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._pace.take(len(data))
        return data
