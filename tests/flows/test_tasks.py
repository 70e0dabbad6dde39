"""The wrapper around a stage's child, with the stub in the child's place and no Prefect server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from prefect.logging import disable_run_logger

from fastmtp import procs
from fastmtp.config import JobSpec
from fastmtp.pipeline import Workdir, open_workdir
from fastmtp.protocol import Progress
from flows import tasks
from flows.tasks import StageFailed, execute


@pytest.fixture(autouse=True)
def no_run_logger(stub_env: dict[str, str]) -> Iterator[None]:
    with disable_run_logger():
        yield


@pytest.fixture
def open_job(tmp_path: Path, make_job: Callable[[str], JobSpec]) -> Callable[[str], Workdir]:
    return lambda plan: open_workdir(tmp_path / "job", make_job(plan))


def test_returns_the_manifest_and_hands_on_every_record(open_job):
    records: list[Progress] = []
    manifest = execute("train", open_job("ok"), "job-1", records.append)
    assert manifest["stage"] == "train"
    assert [record.status for record in records][0] == "started"
    assert records[-1].status == "finished"
    assert [record.metrics["step"] for record in records if record.metrics] == [1, 2, 3, 4, 5]


def test_a_finished_stage_is_skipped_on_the_next_attempt(open_job):
    workdir = open_job("ok")
    first = execute("extract", workdir, "job-1", lambda record: None)
    records: list[Progress] = []
    second = execute("extract", workdir, "job-1", records.append)
    assert second["created"] == first["created"]
    assert "skipped" in [record.status for record in records]


def test_a_refusal_carries_the_childs_own_words_in_one_line(open_job):
    with pytest.raises(StageFailed) as caught:
        execute("extract", open_job("bad-extract"), "job-1", lambda record: None)
    failed = caught.value
    assert (failed.stage, failed.code, failed.pointer) == ("extract", "invalid_checkpoint", "/model")
    assert str(failed) == "extract: shard 2 is missing. Copy it again."


def test_a_silent_death_says_how_and_where_to_look(open_job):
    with pytest.raises(StageFailed, match="SIGKILL") as caught:
        execute("train", open_job("die-train"), "job-1", lambda record: None)
    assert caught.value.code == "process_failed"
    assert "train.log" in str(caught.value)


def test_a_stage_that_stalls_is_ended_with_all_it_started(open_job, monkeypatch):
    monkeypatch.setenv(tasks.STALL_VARIABLE, "3")
    workdir = open_job("hang-train")
    with pytest.raises(StageFailed, match="no progress for 3 s"):
        execute("train", workdir, "job-stall", lambda record: None)
    pids = json.loads((workdir.root / "pids.json").read_text())
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_what_an_earlier_attempt_left_behind_is_ended_first(open_job):
    stray = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, procs.MARKER: "job-stray"},
        start_new_session=True,
    )
    execute("extract", open_job("ok"), "job-stray", lambda record: None)
    assert not psutil.pid_exists(stray.pid)
    stray.wait(timeout=1)


def test_a_command_that_prints_no_json_is_a_failure(open_job, monkeypatch):
    monkeypatch.setenv(tasks.COMMAND_VARIABLE, "true")
    with pytest.raises(StageFailed, match="printed no result"):
        execute("extract", open_job("ok"), "job-1", lambda record: None)


def test_the_default_command_is_this_interpreters_fastmtp(monkeypatch):
    monkeypatch.delenv(tasks.COMMAND_VARIABLE)
    assert tasks._command() == [sys.executable, "-m", "fastmtp"]
