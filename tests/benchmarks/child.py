"""What a child process costs: wall clock, bytes read and written, and peak memory, from /proc."""

from __future__ import annotations

import os
import re
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL = 0.02  # seconds between two looks at the peak


@dataclass(frozen=True)
class Usage:
    """One run of a command.

    Attributes:
        seconds: from its start to its exit; `durable` until the files it left are on disk as well.
        read: bytes that system calls returned, from the page cache or not.
        written: bytes of pages made dirty: written through calls or mappings, and not counting links.
        peak: largest resident memory in bytes, mapped files included; zero for a process that was too quick to look at.
    """

    seconds: float
    durable: float
    read: int
    written: int
    peak: int
    stdout: str


def run(command: Sequence[str | Path], *, leaves: Path | None = None) -> Usage:
    """Run a command to its end; `leaves` names the directory it makes. Raises RuntimeError with its output if it fails.

    Earlier writes are brought to disk first, so that this command does not pay for them.
    """
    os.sync()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun = time.perf_counter()
        # As on anybody's machine: modules are compiled once, not at every start.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        child = subprocess.Popen([str(p) for p in command], stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env)
        peak = _watch(child.pid)
        seconds = time.perf_counter() - begun
        # Its accounts stay readable until it is waited for.
        counted = _fields(Path(f"/proc/{child.pid}/io"))
        code = child.wait()
        if code:
            err.seek(0)
            out.seek(0)
            raise RuntimeError(f"{command} ended with {code}:\n{out.read().decode()}{err.read().decode()}")
        if leaves is not None:
            _to_disk(leaves)
        durable = time.perf_counter() - begun
        out.seek(0)
        return Usage(seconds, durable, counted["rchar"], counted["write_bytes"], peak, out.read().decode())


def bare_peak(python: Path) -> int:
    """Peak resident memory in bytes of an interpreter that does nothing."""
    program = "import pathlib; print(pathlib.Path('/proc/self/status').read_text())"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True)
    return _peak(done.stdout)


def warm(root: Path) -> None:
    """Read every file below `root`, so that whoever reads it next finds it in the page cache."""
    buffer = bytearray(8 << 20)
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def _watch(pid: int) -> int:
    """Wait for the end of a process, leaving it to be waited for. Returns its peak resident memory in bytes."""
    peak = 0
    descriptor = os.pidfd_open(pid)
    try:
        while not select.select([descriptor], [], [], _POLL)[0]:
            peak = max(peak, _peak(Path(f"/proc/{pid}/status").read_text()))
    finally:
        os.close(descriptor)
    return peak


def _peak(status: str) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split(": ") for line in path.read_text().splitlines())}


def _to_disk(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
