"""A result appears whole or not at all, and a finished one is never redone."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fastmtp.errors import InputError
from fastmtp.progress import Reporter, Tail
from fastmtp.protocol import Progress
from fastmtp.stage import MANIFEST, Manifest, read_manifest, run_stage

CALLS: list[Path] = []


def body(directory: Path) -> dict[str, Any]:
    CALLS.append(directory)
    (directory / "sub").mkdir()
    (directory / "sub" / "b.txt").write_text("b")
    (directory / "a.txt").write_text("a")
    return {"made": 2}


def produce(target: Path, config: dict[str, Any] | None = None, replace: bool = False, run: Any = body) -> Manifest:
    reporter = Reporter("extract", quiet=True)
    return run_stage(
        "extract", target, config=config or {}, inputs={"x": "1"}, body=run, reporter=reporter, replace=replace
    )


def test_manifest_says_what_is_there(tmp_path: Path) -> None:
    manifest = produce(tmp_path / "out")
    assert list(manifest.files) == ["a.txt", "sub/b.txt"]
    assert manifest.summary == {"made": 2}
    assert read_manifest(tmp_path / "out") == manifest
    for name, entry in manifest.files.items():
        data = (tmp_path / "out" / name).read_bytes()
        assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_finished_is_not_redone_and_changed_is(tmp_path: Path) -> None:
    CALLS.clear()
    first = produce(tmp_path / "out")
    assert produce(tmp_path / "out") == first
    assert len(CALLS) == 1
    (tmp_path / "out" / "a.txt").unlink()
    produce(tmp_path / "out", replace=True)
    produce(tmp_path / "out", {"new": 1}, replace=True)
    assert len(CALLS) == 3


def test_another_result_is_not_overwritten(tmp_path: Path) -> None:
    produce(tmp_path / "out")
    with pytest.raises(InputError, match="another result"):
        produce(tmp_path / "out", {"new": 1})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="something else"):
        produce(tmp_path / "mine", replace=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_failure_leaves_nothing_and_keeps_what_was(tmp_path: Path) -> None:
    def fail(directory: Path) -> dict[str, Any]:
        body(directory)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError):
        produce(tmp_path / "out", run=fail)
    assert list(tmp_path.iterdir()) == []
    before = produce(tmp_path / "out")
    with pytest.raises(RuntimeError):
        produce(tmp_path / "out", {"new": 1}, replace=True, run=fail)
    assert read_manifest(tmp_path / "out") == before


def test_kill_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.fastmtp.test_stage import body, produce\n"
        "def slow(d):\n    body(d); Path(sys.argv[2]).touch(); time.sleep(60)\n"
        "produce(Path(sys.argv[1]), run=slow)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "out"), str(tmp_path / "ready")])
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (tmp_path / "out").exists()
    produce(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "ready"]
    assert (tmp_path / "out" / MANIFEST).exists()


def test_progress_is_recorded_and_tailed(tmp_path: Path) -> None:
    file, seen = tmp_path / "progress.jsonl", list[Progress]()
    tail = Tail(file, seen.append)
    with Reporter("train", file=file, quiet=True) as reporter:
        reporter.phase("learning", 2, "steps")
        tail()
        reporter.advance(1, metrics={"loss": 2.5})
        with file.open("a") as half:
            half.write('{"time": 1')
        tail()
        assert [record.status for record in seen] == ["started", "running", "running"]
        assert seen[-1].metrics == {"loss": 2.5}
        lines = file.read_text().splitlines()
        file.write_text("\n".join(lines[:-1]) + "\n")
    tail()
    assert seen[-1].status == "finished"


def test_a_failure_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "progress.jsonl"
    with pytest.raises(ValueError), Reporter("train", file=file, quiet=True):
        raise ValueError("no such thing")
    last = json.loads(file.read_text().splitlines()[-1])
    assert (last["status"], last["message"]) == ("failed", "no such thing")
