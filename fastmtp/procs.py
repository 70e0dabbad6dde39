"""The only place that starts processes: each child ends with its parent, leaves no orphan, and writes to a file.

What each child gets: its own session, no standard input, output in files (a child that inherits a pipe keeps a dead
parent's run looking alive), a marker variable in its environment by which strays are found, and a signal when its
parent dies. What ends it: SIGTERM to the whole tree, then SIGKILL, then a sweep over everything that still carries
the marker, since grandchildren in sessions of their own (torchrun's ranks, vLLM's engine) are in no group of ours.

Does not restart anything and knows nothing about what it runs. Call it from the main thread: the kernel sends the
parent-death signal when the *thread* that forked ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from fastmtp.errors import ProcessError

MARKER = "FASTMTP_RUN_ID"
GRACE_SECONDS = 12.0
POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def spawn(
    argv: Sequence[str],
    *,
    log: Path,
    run_id: str | None = None,
    stdout: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace: float = GRACE_SECONDS,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `argv` and yield it; on leaving, end it and everything it started.

    Args:
        argv: command and arguments; nothing is passed through a shell.
        log: file for the child's stderr, and its stdout too unless `stdout` is given. Appended to.
        run_id: marker value; strays carrying it can be found later by `reap`. Unique when unset.
        env: added to the current environment.
        grace: seconds between SIGTERM and SIGKILL.
    """
    marker = run_id or uuid.uuid4().hex
    log.parent.mkdir(parents=True, exist_ok=True)
    # A second variable, unique to this child, so that ending it never sweeps a sibling of the same run.
    own = uuid.uuid4().hex
    full_env = {**os.environ, **(env or {}), MARKER: marker, f"{MARKER}_{own}": "1"}
    with log.open("ab") as err, (stdout or log).open("ab") as out:
        child = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "fastmtp.procs", str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=full_env,
            cwd=cwd,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        _end_tree(child, f"{MARKER}_{own}", grace)


def run(
    argv: Sequence[str],
    *,
    log: Path,
    run_id: str | None = None,
    stdout: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
    stall: float | None = None,
    alive: Path | None = None,
    on_poll: Callable[[], None] | None = None,
) -> int:
    """Run `argv` to its end and return its exit status (negative: the signal that ended it).

    Args:
        timeout: seconds it may take in all.
        stall: seconds `alive` may go without being written to.
        on_poll: called about five times a second from this thread, and once after the end.

    Raises:
        ProcessError: it ran past `timeout` or stalled; everything it started has been ended.
    """
    begun = time.monotonic()
    with spawn(argv, log=log, run_id=run_id, stdout=stdout, env=env, cwd=cwd) as child:
        while child.poll() is None:
            if on_poll:
                on_poll()
            if timeout is not None and time.monotonic() - begun > timeout:
                raise ProcessError(f"{_name(argv)} ran past {timeout:.0f} s and was ended; see {log}.")
            if stall is not None and alive is not None and _age(alive, begun) > stall:
                raise ProcessError(f"{_name(argv)} made no progress for {stall:.0f} s and was ended; see {log}.")
            time.sleep(POLL_SECONDS)
    if on_poll:
        on_poll()
    return int(child.returncode)


def wait_until(
    ready: Callable[[], bool], child: subprocess.Popen[bytes], *, what: str, log: Path, timeout: float
) -> None:
    """Poll `ready` until it holds. Raises ProcessError with the log's last lines when the child dies or time is up."""
    begun = time.monotonic()
    while not ready():
        status = child.poll()
        if status is not None:
            raise ProcessError(
                f"{what} ended with status {status} before it was ready. Last lines of {log}:\n{tail(log)}",
                returncode=status,
            )
        if time.monotonic() - begun > timeout:
            raise ProcessError(f"{what} was not ready within {timeout:.0f} s. Last lines of {log}:\n{tail(log)}")
        time.sleep(POLL_SECONDS)


def reap(run_id: str) -> list[int]:
    """End every process that carries this run's marker, save this one and its ancestors. Returns the pids ended."""
    spared = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    strays = [process for process in _carriers(MARKER, run_id) if process.pid not in spared]
    _terminate(strays, GRACE_SECONDS)
    return [process.pid for process in strays]


def free_port() -> int:
    """A TCP port that was free on 127.0.0.1 a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log file, or a note that there is none. Reads at most its last 64 KiB."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


def _name(argv: Sequence[str]) -> str:
    return " ".join([Path(argv[0]).name, *argv[1:4]])


def _age(path: Path, begun: float) -> float:
    """Seconds since `path` was written, or since `begun` (monotonic) when that is later or there is no file."""
    since_start = time.monotonic() - begun
    with contextlib.suppress(OSError):
        return min(since_start, time.time() - path.stat().st_mtime)
    return since_start


def _carriers(name: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value:
                found.append(process)
    return found


def _end_tree(child: subprocess.Popen[bytes], own_variable: str, grace: float) -> None:
    tree: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(child.pid)
        tree = [root, *root.children(recursive=True)]
    _terminate(tree, grace)
    # The snapshot misses what was re-parented before it was taken: those still carry the variable.
    _terminate([process for process in _carriers(own_variable, "1") if process.pid != os.getpid()], 2.0)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)


def _terminate(processes: list[psutil.Process], grace: float) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=grace)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def _launch(arguments: list[str]) -> None:
    """Entry of the child: ask for SIGTERM when the parent dies, then become the command.

    A launcher rather than `preexec_fn`, which may deadlock in a parent that has threads.
    """
    parent, *argv = arguments
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        sys.exit("the parent ended before its child began")
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


if __name__ == "__main__":
    _launch(sys.argv[1:])
