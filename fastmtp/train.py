"""Fine-tune the head on prepared rows: the stage, and the plan it follows.

Only the head trains; embedding and output head are read from the verifier and stay as they are. Master weights are
fp32 and are cast to each tensor's stored type at the end. The result directory holds a head like the one that went
in, taken at the best held-out mean acceptance length, with `metrics.jsonl` and a plot of the curves.

Until the result is in place, the state of the run lies beside it in `.NAME.progress/`; a run that was killed goes on
from there, with other processes too. The loop itself is `fastmtp.training`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fastmtp
from fastmtp.checkpoint import Checkpoint, open_checkpoint
from fastmtp.config import TrainConfig
from fastmtp.data.online import open_rows
from fastmtp.errors import TrainingError
from fastmtp.extract import fingerprint
from fastmtp.families.base import text_config
from fastmtp.progress import Reporter
from fastmtp.stage import Manifest, digest_of, read_manifest, run_stage
from fastmtp.training.headfiles import HeadFiles
from fastmtp.training.launch import Request, run_here, run_in_processes
from fastmtp.training.memory import needs, require_room
from fastmtp.training.metrics import METRICS, require_tensorboard
from fastmtp.training.objective import step_weights
from fastmtp.training.plan import make_plan
from fastmtp.training.saves import claim
from fastmtp.training.world import count_processes, pick_device

__all__ = ["METRICS", "TrainingError", "plan", "saves_of", "step_weights", "train"]


def train(
    model: str | Path,
    head: Path,
    data: Path,
    config: TrainConfig,
    target: Path,
    reporter: Reporter,
    *,
    replace: bool = False,
) -> Manifest:
    """Fine-tune the head in `head` on the rows in `data` into `target`, or go on with a run that was stopped.

    Raises:
        InputError: the rows are of another verifier, none counts, or there is no room.
        TrainingError: a mis-read head, a loss that is not finite, or a tensor that did not move.
        Interrupted: SIGTERM or SIGINT came; what was done is saved.
    """
    checkpoint = open_checkpoint(model)
    inputs = {
        "model": fingerprint(checkpoint),
        "head": read_manifest(head).digest(),
        "data": read_manifest(data).digest(),
    }
    identity = digest_of({"config": config.identity(), "inputs": inputs, "version": fastmtp.__version__})
    saves = saves_of(target)

    def body(directory: Path) -> dict[str, Any]:
        found = _plan(checkpoint, head, data, config, target)
        reporter.say(found["text"])
        claim(saves, identity)
        request = Request(
            model=str(model), head=head, data=data, config=config, saves=saves, directory=directory
        )  # fmt: skip
        if found["processes"] > 1:
            return run_in_processes(request, found["processes"], reporter)
        return run_here(request, reporter)

    manifest = run_stage(
        "train", target, config=config.identity(), inputs=inputs, body=body, reporter=reporter, replace=replace
    )  # fmt: skip
    shutil.rmtree(saves, ignore_errors=True)
    return manifest


def saves_of(target: Path) -> Path:
    """Where the state of a run that is to become `target` lies."""
    return target.parent / f".{target.name}.progress"


def plan(model: str | Path, head: Path, data: Path, config: TrainConfig, target: Path) -> dict[str, Any]:
    """What `train` would do, without doing it: rows, tokens, steps, processes, memory; `text` says it in a line or two.

    Raises:
        InputError: as `train`.
    """
    return _plan(open_checkpoint(model), head, data, config, target)


def _plan(checkpoint: Checkpoint, head: Path, data: Path, config: TrainConfig, target: Path) -> dict[str, Any]:
    if config.tensorboard:
        require_tensorboard()
    device, processes = pick_device(config), count_processes(config)
    rows = open_rows(data, checkpoint)
    found = make_plan(rows.split("train"), rows.split("holdout"), config)
    files = HeadFiles(checkpoint, head)
    tokens = min(config.micro_tokens, found.step_tokens)
    memory = needs(files.parameters, files.shared, text_config(checkpoint.config), config, processes, tokens)
    require_room(memory, device, target.absolute().parent)
    spread = ", spread over them" if config.shard and processes > 1 else ""
    text = (
        f"{found.rows:,} rows, {found.supervised:,} supervised tokens; {len(found.steps):,} steps of up to"
        f" {config.batch_tokens:,} tokens, {found.fill:.1%} full, {found.tokens:,} in all;"
        f" {found.held_out:,} rows held out\n"
        f"{config.recursion} recursion, K={config.num_steps}, {config.optimizer}, {config.dtype} on {device.type},"
        f" {processes} process{'es' * (processes > 1)}{spread}; needs {memory}"
    )
    return {
        "rows": found.rows, "rows_held_out": found.held_out, "tokens": found.tokens, "steps": len(found.steps),
        "tokens_supervised": found.supervised, "fill": round(found.fill, 4),
        "validations": len(found.validate_at), "device": device.type,
        "processes": processes, "parameters": files.parameters, "memory_bytes": memory.memory,
        "disk_bytes": memory.disk, "text": text,
    }  # fmt: skip
