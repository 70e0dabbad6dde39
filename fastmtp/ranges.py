"""Which parts of a file that is being read from a store are here, noted beside it: a killed run goes on inside it.

What is noted may not have reached the disk when the machine went down: who goes on proves the whole file in the end.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fastmtp.stores.base import ObjectInfo

PART = 16 << 20
_LINE = re.compile(rb"[0-9]{8}\n")


class Ranges:
    """Numbers of the parts (of PART bytes, from 0) of one object that are in the file `temporary`."""

    def __init__(self, temporary: Path, info: ObjectInfo) -> None:
        self._path = temporary.with_name(f"{temporary.name}.ranges")
        self._about = f"{info.stamp} {info.size} {PART}\n".encode()
        self._descriptor = -1
        self.done: set[int] = set()
        with contextlib.suppress(OSError):
            noted = self._path.read_bytes()
            # Of another object, or of a file that is gone: from the start.
            if noted.startswith(self._about) and temporary.stat().st_size == info.size:
                self.done = {int(line) for line in _LINE.findall(noted, len(self._about))}

    def forget(self) -> None:
        """Nothing is there."""
        self.done = set()
        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes are taken inside the block."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if self.done else os.O_TRUNC)
        self._descriptor = os.open(self._path, flags, 0o644)
        try:
            if not self.done:
                os.write(self._descriptor, self._about)
            yield
        finally:
            os.close(self._descriptor)

    def note(self, number: int) -> None:
        """A part is there. From any thread."""
        os.write(self._descriptor, b"%08d\n" % number)
