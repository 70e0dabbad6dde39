"""The flow `finetune`: one job, stage by stage, from a checkpoint to a better checkpoint that is published, or not.

Decides the order of the stages and whether to publish, nothing else. Every run that starts leaves a report, whether it
succeeded, was rejected by the gate, or failed; a run that is cancelled or killed leaves none, and its state says why.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.flows import Flow
from prefect.states import Completed, Failed

from fastmtp import procs
from fastmtp.config import JobSpec
from fastmtp.errors import FastMTPError
from fastmtp.pipeline import Workdir, build_report, open_workdir
from fastmtp.protocol import STAGES, Report, scheduled_job_id
from flows.orphan import RunEnded
from flows.reporting import JobReporter
from flows.tasks import StageFailed, run_stage

WORK_DIR_VARIABLE = "FASTMTP_WORK_DIR"


def sweep(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """Hook for a run that was cancelled or crashed: end what it left behind in sessions of its own."""
    procs.reap(flow_run.parameters.get("job_id") or scheduled_job_id(flow_run.id))


@flow(
    name="finetune",
    flow_run_name="{job_id}",
    retries=0,
    persist_result=False,
    on_cancellation=[sweep],
    on_crashed=[sweep],
)
def finetune(job: JobSpec, job_id: str) -> State[Any]:
    """Fine-tune the MTP head of `job.model`, measure it before and after with vLLM, and publish it if it is better."""
    return run_chain(job, job_id)


def run_chain(job: JobSpec, job_id: str) -> State[Any]:
    """Run every stage of a job in this flow run and return the flow's final state."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "run_chain runs inside a flow"
    reporter = JobReporter(job_id, context.flow_run.id, job.model)
    root = Path(os.environ.get(WORK_DIR_VARIABLE, "~/.fastmtp/jobs")).expanduser() / job_id
    get_run_logger().info("Job %s works in %s", job_id, root)
    workdir: Workdir | None = None
    error: dict[str, str] | None = None
    try:
        workdir = open_workdir(root, job)
        _run_stages(job, job_id, workdir, reporter)
    except StageFailed as failed:
        error = {"code": failed.code, "message": failed.message, "stage": failed.stage}
    except RunEnded:
        raise
    except Exception as unexpected:
        # Not a stage: the worker's disk, or our own fault. With its traceback, for the operator; the user gets a line.
        get_run_logger().exception("Job %s failed outside its stages, in %s", job_id, root)
        error = {"code": FastMTPError.code, "message": " ".join(str(unexpected).split()), "stage": "preflight"}
    if workdir is None:
        report = Report(job_id=job_id, status="failed", error=error)
    else:
        report = build_report(workdir, job_id, error=error)
    reporter.store_report(report)
    return _final_state(report)


def _run_stages(job: JobSpec, job_id: str, workdir: Workdir, reporter: JobReporter) -> None:
    # One object for all stages: Prefect takes a new one at the address of an old result for that result, and draws
    # dependencies that are none.
    on_progress = reporter.on_progress
    for stage in STAGES[: STAGES.index("evaluate")]:
        run_stage(stage, workdir, job_id, on_progress)
    evaluated = run_stage("evaluate", workdir, job_id, on_progress)["summary"]
    reporter.show_acceptance(evaluated, workdir.evaluation / "acceptance.md")
    if evaluated["gate"]["passed"] and job.publish:
        run_stage("publish", workdir, job_id, on_progress)


def _final_state(report: Report) -> State[Any]:
    if report.status == "failed":
        error = report.error or {"stage": "", "message": FastMTPError.code}
        return Failed(message=f"{error['stage']}: {error['message']}")
    if report.status == "rejected":
        return Completed(message=f"Not published: {report.gate.get('reason', 'the gate said no')}")
    return Completed(message=f"Published {report.published}" if report.published else "Done; no destination was given")
