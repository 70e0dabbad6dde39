"""One writer per destination: a claim is a small object that its owner renews and removes.

Needs no conditional writes, which some stores ignore: every writer puts its own claim first and then looks for others.
Of two that come at once at least one sees the other's; who sees one steps back. A claim counts as dead when its process
is known to be gone, or when it has not been renewed for `LEASE` seconds by the store's own clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from fastmtp.errors import DestinationError
from fastmtp.stores.base import ERRORS, Store, explained, whole

CLAIMS = ".fastmtp/claims/"
LEASE = 120.0
_ATTEMPTS = 3


class Claim:
    """Holds the destination `store` while the block runs. Raises DestinationError where another writer does."""

    def __init__(self, store: Store, purpose: str) -> None:
        self._store = store
        self._key = f"{CLAIMS}{uuid.uuid4().hex}.json"
        self._body = json.dumps({**_who(), "purpose": purpose}).encode()
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, daemon=True, name="claim")

    def __enter__(self) -> Claim:
        with explained(self._store.name):
            self._take()
        self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._renewing.join()
        # One that cannot be removed is dead with this process.
        with contextlib.suppress(*ERRORS):
            self._store.delete([self._key])

    def require(self) -> None:
        """Raise DestinationError where the claim was lost meanwhile, having not been renewed for too long."""
        if self._store.head(self._key) is None:
            raise DestinationError(
                f"{self._store.name}: another job took over while this one stood still.", mend="Run it again."
            )

    def _take(self) -> None:
        found: dict[str, Any] = {}
        for attempt in range(_ATTEMPTS):
            self._store.put(self._key, self._body)
            other = self._other()
            if other is None:
                return
            found = other
            self._store.delete([self._key])
            if attempt + 1 < _ATTEMPTS:
                time.sleep(random.uniform(0.05, 0.3) * (attempt + 1))  # noqa: S311 - no secret
        raise DestinationError(
            f"{self._store.name} is being written by another job: {found.get('purpose', 'unknown')}, "
            f"process {found.get('pid')} on {found.get('host')}.",
            mend="Wait for it, or name another destination.", pointer="/publish/uri",
        )  # fmt: skip

    def _other(self) -> dict[str, Any] | None:
        """Somebody else's living claim. Dead ones are removed."""
        claims = self._store.objects(CLAIMS)
        own = claims.pop(self._key, None) or self._store.head(self._key)
        if own is None:
            return {"purpose": "unknown"}
        for key, info in claims.items():
            data = whole(self._store, key)
            if data is None:
                continue
            found = _parsed(data)
            if own.modified - info.modified > LEASE or _is_dead(found):
                self._store.delete([key])
            else:
                return found
        return None

    def _renew(self) -> None:
        while not self._ended.wait(LEASE / 4):
            with contextlib.suppress(*ERRORS):
                # A claim that was taken away must not come back.
                if self._store.head(self._key) is not None:
                    self._store.put(self._key, self._body)


def _who() -> dict[str, Any]:
    """This process, so that others on the same machine can tell whether it still runs."""
    return {
        "host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }  # fmt: skip


def _machine() -> str:
    """This boot of this machine, and its view of process ids: containers have their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116


def _is_dead(found: dict[str, Any]) -> bool:
    """Whether a claim's process is known to be gone."""
    if found.get("machine") != _machine():
        return False
    try:
        return abs(psutil.Process(int(found["pid"])).create_time() - float(found["started"])) > 1.0
    except psutil.NoSuchProcess:
        return True


def _parsed(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    return {}
