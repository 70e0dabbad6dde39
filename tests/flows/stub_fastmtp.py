"""Stands in for `fastmtp run --only STAGE`: same arguments, records, manifests and error JSON, in no time.

What it does is named by the job's model, so that jobs of one worker can differ:

    stub:ok              every stage finishes, the gate passes
    stub:reject          the gate says no
    stub:bad-STAGE       STAGE refuses its input (exit 2, error JSON)
    stub:die-STAGE       STAGE kills itself without a word
    stub:hang-STAGE      STAGE starts a child in a session of its own, writes both pids to pids.json, and sleeps
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fastmtp import procs
from fastmtp.config import JobSpec
from fastmtp.pipeline import Workdir
from fastmtp.progress import Reporter
from fastmtp.stage import run_stage

BASE = {"acceptance": [0.80, 0.40, 0.20], "mean_acceptance_length": 2.40, "drafts": 3000}
TUNED = {"acceptance": [0.85, 0.60, 0.45], "mean_acceptance_length": 2.90, "drafts": 2600}


def summary_of(stage: str, job: JobSpec, rejected: bool) -> dict[str, Any]:
    """What the real stage's manifest would say."""
    if stage == "evaluate":
        gate = {"passed": not rejected, "reason": "no gain over the base" if rejected else "gain 0.50"}
        return {"base": BASE, "tuned": TUNED, "greedy_identical": [200, 200], "gate": gate}
    if stage == "publish":
        assert job.publish is not None
        uri = job.publish.uri + "v1/"
        artifact = {"uri": uri + "model.safetensors", "size": 1, "sha256": "0" * 64}
        return {"uri": uri, "artifacts": [artifact]}
    return {}


def work(stage: str, directory: Path, reporter: Reporter) -> None:
    """A little progress; for train, a loss that falls."""
    (directory / "result.txt").write_text(stage)
    reporter.phase("working", total=5, unit="steps")
    for step in range(1, 6):
        metrics = {"step": float(step), "loss": 3.0 / step, "lr": 1e-4} if stage == "train" else {}
        reporter.advance(step, metrics=metrics)


def hang(workdir: Workdir, log: Path) -> None:
    """Start a grandchild that no process group of ours holds, then sleep with it."""
    with procs.spawn(["sleep", "600"], log=log, run_id=os.environ[procs.MARKER]) as grandchild:
        (workdir.root / "pids.json").write_text(json.dumps([os.getpid(), grandchild.pid]))
        time.sleep(600)


def main() -> int:
    """Run one stage as the real command does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["run"])
    parser.add_argument("job", type=Path)
    for name in ("--workdir", "--only", "--job-id"):
        parser.add_argument(name, required=True)
    parser.add_argument("--json", action="store_true", required=True)
    arguments = parser.parse_args()
    job = JobSpec.from_yaml(arguments.job)
    workdir, stage = Workdir(Path(arguments.workdir)), arguments.only
    plan = job.model.removeprefix("stub:")
    if plan == f"die-{stage}":
        os.kill(os.getpid(), signal.SIGKILL)
    if plan == f"bad-{stage}":
        error = {"code": "invalid_checkpoint", "message": "shard 2 is missing.\nCopy it again.", "pointer": "/model"}
        sys.stdout.write(json.dumps({"error": error}))
        return 2

    def body(directory: Path) -> dict[str, Any]:
        if plan == f"hang-{stage}":
            hang(workdir, workdir.root / "logs" / "grandchild.log")
        work(stage, directory, reporter)
        return summary_of(stage, job, plan == "reject")

    target = workdir.result_of(stage)
    with Reporter(stage, file=workdir.progress_file) as reporter:
        if target is None:
            found = {"stage": stage, "summary": {}}
        else:
            manifest = run_stage(stage, target, config={}, inputs={}, body=body, reporter=reporter)
            found = manifest.model_dump(mode="json")
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
