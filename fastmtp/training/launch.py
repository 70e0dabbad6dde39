"""Run training in this process, or in several that torchrun starts, and bring home what they found or why they stopped.

`python -m fastmtp.training.launch REQUEST.json` is what each of several processes runs. Their progress and outcome go
through files in the directory of saves; everything else is as in one process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fastmtp import procs
from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import TrainConfig
from fastmtp.data.online import open_rows
from fastmtp.errors import FastMTPError, InputError, ProcessError, TrainingError
from fastmtp.progress import Reporter, Tail
from fastmtp.protocol import Progress
from fastmtp.stage import write_atomic
from fastmtp.training.headfiles import HeadFiles
from fastmtp.training.loop import Run
from fastmtp.training.plan import make_plan
from fastmtp.training.saves import Saves, held
from fastmtp.training.world import World

REQUEST, PROGRESS, LOG = "request.json", "progress.jsonl", "torchrun.log"


class Request(BaseModel):
    """Everything a process needs to take part.

    Attributes:
        saves: directory of the run's saves, claimed for it.
        directory: where the result is written.
    """

    model: str
    head: Path
    data: Path
    config: TrainConfig
    saves: Path
    directory: Path


def run_here(request: Request, reporter: Reporter) -> dict[str, Any]:
    """Take part in training. Returns the stage's summary in the main process, and nothing in others."""
    checkpoint = open_checkpoint(request.model)
    rows = open_rows(request.data, checkpoint)
    plan = make_plan(rows.split("train"), rows.split("holdout"), request.config)
    with World(request.config) as world, held(request.saves) if world.main else nullcontext():
        saves = Saves(request.saves, world)
        files = HeadFiles(checkpoint, request.head)
        run = Run(files, rows, plan, request.config, saves, world, reporter)
        return run.train(request.directory)


def run_in_processes(request: Request, count: int, reporter: Reporter) -> dict[str, Any]:
    """Train in `count` processes on this host. Returns the stage's summary.

    Raises:
        FastMTPError: what the first process that failed said, or ProcessError when it could not say anything.
    """
    for stale in (request.saves / PROGRESS, *request.saves.glob("outcome-*.json")):
        stale.unlink(missing_ok=True)
    file, log = request.saves / REQUEST, request.saves / LOG
    write_atomic(file, request.model_dump_json().encode())
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={count}", "--max-restarts=0",
        "--master-addr=127.0.0.1", f"--master-port={procs.free_port()}", "-m", __name__, str(file),
    ]  # fmt: skip
    threads = max(1, (os.cpu_count() or 1) // count)
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    status = procs.run(argv, log=log, env=env, on_poll=Tail(request.saves / PROGRESS, _relay(reporter)))
    found = sorted(request.saves.glob("outcome-*.json"))
    outcomes = [json.loads(path.read_bytes()) for path in found]
    for outcome in outcomes:
        if "message" in outcome:
            raise _error(outcome)
    if status == 0 and outcomes:
        return dict(outcomes[0]["summary"])
    raise ProcessError(f"Training ended with status {status}. Last lines of {log}:\n{procs.tail(log)}")


def _relay(reporter: Reporter) -> Callable[[Progress], None]:
    """Hand the main process's records on to our reporter."""
    shown: list[tuple[float | None, str]] = [(None, "")]

    def relay(record: Progress) -> None:
        if record.status != "running":
            return
        if (record.total, record.unit) != shown[0]:
            shown[0] = (record.total, record.unit)
            reporter.phase(record.message, record.total, record.unit)
        elif record.message and not record.metrics:
            reporter.say(record.message)
        else:
            reporter.advance(record.done, metrics=record.metrics, note=record.message)

    return relay


def _error(outcome: dict[str, Any]) -> FastMTPError:
    """The error as another process raised it."""
    message, code, status = str(outcome["message"]), str(outcome["code"]), int(outcome["exit_code"])
    error: FastMTPError
    if status == InputError.exit_code:
        error = InputError(message, pointer=str(outcome["pointer"]))
    else:
        error = TrainingError(message)
    error.code, error.exit_code = code, status
    return error


def _main(file: Path) -> int:
    """One of several processes: train, and leave an outcome."""
    request = Request.model_validate_json(file.read_bytes())
    rank = int(os.environ["RANK"])
    outcome: dict[str, Any]
    try:
        progress = request.saves / PROGRESS if rank == 0 else None
        with Reporter("train", file=progress, quiet=True) as reporter:
            summary = run_here(request, reporter)
        outcome = {"summary": summary}
    except FastMTPError as error:
        outcome = {
            "message": str(error), "code": error.code, "exit_code": error.exit_code,
            "pointer": getattr(error, "pointer", ""),
        }  # fmt: skip
    write_atomic(request.saves / f"outcome-{rank:05d}.json", json.dumps(outcome).encode())
    if "message" not in outcome:
        return 0
    sys.stderr.write(f"rank {rank}: {outcome['message']}\n")
    sys.stderr.flush()
    # At once: leaving the group would wait for processes that wait for this one. torchrun ends them when it sees this.
    os._exit(int(outcome["exit_code"]))


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
