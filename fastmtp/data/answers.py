"""Who answers, as others see it, and the journal that makes answers survive a kill. Loads no torch.

The token ids that were generated are kept, never re-tokenised text.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from fastmtp.servers.client import Answer, Request
from fastmtp.stage import fsync_path

if TYPE_CHECKING:
    from torch import Tensor

JOURNAL = "answers.jsonl"
_SYNC_SECONDS = 5.0  # a killed process loses nothing that it wrote; a power cut at most this much


# Place of the request, its answer, and the states [n, H] of prompt and answer where the engine has them anyway.
OnAnswer = Callable[[int, Answer, "Tensor | None"], None]


class Engine(Protocol):
    """Who answers. `name` says it to people."""

    name: str

    def start(self) -> None:
        """Load or start what is needed; once, and before the first answer."""

    def answer(self, requests: Sequence[Request], on_answer: OnAnswer) -> None:
        """Answer all; `on_answer` hears each as it is finished, in any order, from the calling thread."""


def row_id(name: str, turn: int, prompt: Sequence[int]) -> str:
    """Identity of a row before it is answered: its dialogue, its turn, and the very ids that are asked."""
    digest = hashlib.sha256(f"{name}:{turn}:".encode())
    digest.update(array("q", prompt).tobytes())
    return digest.hexdigest()[:32]


def seed_of(seed: int, row: str) -> int:
    """The seed of one row's sampling, below 2**31: of the job's seed and the row alone: neither the order nor the
    company of requests changes an answer."""
    return int.from_bytes(hashlib.sha256(f"answer:{seed}:{row}".encode()).digest()[:4]) >> 1


class Journal:
    """Answers in the order of their completion, appended to a file that a later run goes on with.

    Args:
        directory: made if missing.
        identity: of everything that makes answers others; a journal of another identity is begun anew.

    Attributes:
        known: row id -> answer, of this run and those before it.
        resumed: an earlier run of this identity was here.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / JOURNAL
        self.known: dict[str, Answer] = {}
        whole = self._read(identity)
        self.resumed = whole > 0
        self._file = self._path.open("r+b" if whole else "wb")
        # What follows the last whole line is half a line of a writer that was killed.
        self._file.seek(whole)
        self._file.truncate()
        self._synced = time.monotonic()
        if not whole:
            self._append({"identity": identity})
            fsync_path(directory)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def add(self, row: str, answer: Answer) -> None:
        """Keep one answer."""
        self.known[row] = answer
        self._append({"row": row, "finish": answer.finish, "ids": answer.token_ids})

    def _append(self, record: dict[str, object]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced >= _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def _read(self, identity: str) -> int:
        """Take over what is there. Returns the bytes of it that are whole; 0 where it is of another identity."""
        if not self._path.is_file():
            return 0
        data = self._path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        whole = 0
        for place, line in enumerate(lines):
            try:
                record = json.loads(line)
                if place == 0:
                    if record["identity"] != identity:
                        return 0
                else:
                    self.known[record["row"]] = Answer(tuple(record["ids"]), record["finish"])
            except (ValueError, KeyError, TypeError):
                break  # a power cut left a hole: what follows is answered again
            whole += len(line)
        return whole
