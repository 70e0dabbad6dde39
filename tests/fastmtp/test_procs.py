"""Children end with their parent, with all they started, and are found again by their marker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fastmtp import procs
from fastmtp.errors import ProcessError

# A child that starts a grandchild in a session of its own, deaf to SIGTERM, and then waits.
FAMILY = (
    "import subprocess, sys, time\n"
    "deaf = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)'\n"
    "g = subprocess.Popen([sys.executable, '-c', deaf], start_new_session=True)\n"
    "open(sys.argv[1], 'w').write(str(g.pid))\n"
    "time.sleep(120)\n"
)


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def read_pid(file: Path) -> int:
    until(lambda: file.exists() and file.read_text() != "")
    return int(file.read_text())


def test_output_goes_to_files_and_status_comes_back(tmp_path: Path) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    log, out = tmp_path / "log", tmp_path / "out"
    assert procs.run([sys.executable, "-c", program], log=log, stdout=out) == 3
    assert (log.read_text(), out.read_text()) == ("err\n", "out\n")


def test_unknown_command_says_so(tmp_path: Path) -> None:
    assert procs.run(["no-such-command"], log=tmp_path / "log") == 1
    assert "no-such-command: No such file" in (tmp_path / "log").read_text()


def test_leaving_ends_the_whole_tree(tmp_path: Path) -> None:
    with procs.spawn([sys.executable, "-c", FAMILY, str(tmp_path / "pid")], log=tmp_path / "log", grace=1) as child:
        grandchild = read_pid(tmp_path / "pid")
        assert alive(child.pid) and alive(grandchild)
    assert not alive(child.pid)
    assert not alive(grandchild)


def test_an_orphaned_grandchild_is_still_found(tmp_path: Path) -> None:
    program = FAMILY.rsplit("time.sleep", 1)[0]
    with procs.spawn([sys.executable, "-c", program, str(tmp_path / "pid")], log=tmp_path / "log", grace=1) as child:
        grandchild = read_pid(tmp_path / "pid")
        child.wait()
        assert alive(grandchild)
    assert not alive(grandchild)


def test_timeout_and_stall(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(ProcessError, match="ran past 1 s"):
        procs.run(sleeper, log=tmp_path / "log", timeout=1)
    (tmp_path / "alive").touch()
    with pytest.raises(ProcessError, match="no progress for 1 s"):
        procs.run(sleeper, log=tmp_path / "log", stall=1, alive=tmp_path / "alive")


def test_kill_of_the_parent_ends_the_child(tmp_path: Path) -> None:
    parent = (
        "import sys; from pathlib import Path; from fastmtp import procs\n"
        "procs.run([sys.executable, '-c', 'import os,sys,time; open(sys.argv[1],\"w\").write(str(os.getpid())); "
        "time.sleep(120)', sys.argv[1]], log=Path(sys.argv[2]))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, str(tmp_path / "pid"), str(tmp_path / "log")])
    child = read_pid(tmp_path / "pid")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not alive(child), 5)


def test_reap_finds_leftovers_by_their_marker_and_spares_others(tmp_path: Path) -> None:
    mine, other = uuid.uuid4().hex, uuid.uuid4().hex
    sleeper = [sys.executable, "-c", "import time; time.sleep(120)"]
    with (
        procs.spawn(sleeper, log=tmp_path / "a", run_id=mine) as first,
        procs.spawn(sleeper, log=tmp_path / "b", run_id=other) as second,
    ):
        until(lambda: bool(psutil.Process(first.pid).environ().get(procs.MARKER)))
        assert procs.reap(mine) == [first.pid]
        assert not alive(first.pid)
        assert alive(second.pid)


def test_wait_reports_a_death_at_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    begun = time.monotonic()
    with (
        procs.spawn([sys.executable, "-c", "import sys; sys.exit('bad flag')"], log=log) as child,
        pytest.raises(ProcessError, match="bad flag") as caught,
    ):
        procs.wait_until(lambda: False, child, what="server", log=log, timeout=60)
    assert caught.value.returncode == 1
    assert time.monotonic() - begun < 30
