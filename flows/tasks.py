"""One thin task per stage: run `fastmtp run --only STAGE` as a child, hand its progress on, return what it found out.

Everything a stage does happens in the child, which `fastmtp.procs` ends with a run that is cancelled or dies or stalls.
A task is never cached and never retried: a finished stage is skipped by its own manifest, in any process and attempt.
Call tasks directly. Under `.submit()` they would wait in a thread, which Prefect cannot interrupt.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.states import Failed

from fastmtp import procs
from fastmtp.errors import FastMTPError, ProcessError
from fastmtp.pipeline import Workdir
from fastmtp.progress import Tail
from fastmtp.protocol import Progress, Stage
from flows.orphan import OrphanCheck

# The fastmtp command, for a worker whose training code lives in another environment than Prefect.
COMMAND_VARIABLE = "FASTMTP_COMMAND"
STALL_VARIABLE = "FASTMTP_STALL_SECONDS"
DEFAULT_STALL_SECONDS = 3600.0


class StageFailed(FastMTPError):
    """A stage ended without a result. The text is one line; `code` and `pointer` are the child's own words."""

    def __init__(self, stage: Stage, message: str, *, code: str, pointer: str = "") -> None:
        self.stage = stage
        self.message = " ".join(message.split())[:1000]
        self.code = code
        self.pointer = pointer
        super().__init__(f"{stage}: {self.message}")


def run_stage(stage: Stage, workdir: Workdir, job_id: str, on_progress: Callable[[Progress], None]) -> dict[str, Any]:
    """Run one stage to its end.

    Args:
        on_progress: called with each progress record, from this thread, while the stage runs.

    Returns:
        The stage's manifest.

    Raises:
        StageFailed: it said what is wrong, or died, or stalled.
    """
    state = stage_task(stage, workdir, job_id, on_progress, return_state=True)
    return cast("dict[str, Any]", state.result())


@task(name="stage", task_run_name="{stage}", cache_policy=NO_CACHE, retries=0, persist_result=False)
def stage_task(
    stage: Stage, workdir: Workdir, job_id: str, on_progress: Callable[[Progress], None]
) -> dict[str, Any] | State[Any]:
    """The stage as Prefect shows it. What it refuses becomes a Failed state of one line, not a traceback in the log."""
    try:
        return execute(stage, workdir, job_id, on_progress)
    except StageFailed as failed:
        return Failed(message=str(failed), data=failed)


def execute(stage: Stage, workdir: Workdir, job_id: str, on_progress: Callable[[Progress], None]) -> dict[str, Any]:
    """The stage's child, from start to end. See `run_stage`; within a flow run, raises RunEnded too."""
    logger = get_run_logger()
    strays = procs.reap(job_id)
    if strays:
        logger.warning("Ended processes that an earlier attempt of this job left behind: %s", strays)
    logs = workdir.root / "logs"
    out, log = logs / f"{stage}.out", logs / f"{stage}.log"
    out.unlink(missing_ok=True)
    argv = [*_command(), "run", str(workdir.job_file), "--workdir", str(workdir.root), "--only", stage]
    argv += ["--job-id", job_id, "--json"]
    stall = float(os.environ.get(STALL_VARIABLE, DEFAULT_STALL_SECONDS))
    try:
        status = procs.run(
            argv, log=log, stdout=out, run_id=job_id, stall=stall, alive=workdir.progress_file,
            on_poll=_watch(workdir.progress_file, on_progress),
        )  # fmt: skip
    except ProcessError as error:
        logger.error("Last lines of %s:\n%s", log, procs.tail(log))
        raise StageFailed(stage, str(error), code=error.code) from error
    logger.info("%s ended with status %d. Last lines of %s:\n%s", stage, status, log, procs.tail(log))
    return _manifest(stage, status, out, log)


def _watch(progress_file: Path, on_progress: Callable[[Progress], None]) -> Callable[[], None]:
    """What is done while the child runs: hand its progress on, and see that the run is still wanted."""
    tail = Tail(progress_file, on_progress)
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return tail
    check = OrphanCheck(context.flow_run.id)

    def watch() -> None:
        tail()
        check()

    return watch


def _command() -> list[str]:
    return shlex.split(os.environ.get(COMMAND_VARIABLE, "")) or [sys.executable, "-m", "fastmtp"]


def _manifest(stage: Stage, status: int, out: Path, log: Path) -> dict[str, Any]:
    """What the child printed, or StageFailed with its own words, or with how it ended when it left none."""
    try:
        answer = json.loads(out.read_text("utf-8"))
    except (OSError, ValueError):
        answer = None
    if status == 0 and isinstance(answer, dict) and "error" not in answer:
        return answer
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        code = str(error.get("code") or FastMTPError.code)
        raise StageFailed(stage, error["message"], code=code, pointer=str(error.get("pointer") or ""))
    raise StageFailed(stage, f"{_ending(status)}; see {log} on the worker.", code=ProcessError.code)


def _ending(status: int) -> str:
    if status == 0:
        return "the command ended well but printed no result"
    if status > 0:
        return f"the command ended with status {status} and no explanation"
    name = signal.Signals(-status).name
    hint = " (out of memory, if nobody did it by hand)" if name == "SIGKILL" else ""
    return f"the command was ended by {name}{hint}"
