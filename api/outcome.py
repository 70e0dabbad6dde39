"""What the end of a run means for its job, and how its states read to a person. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from api.orchestrator import LOST, RunState
from fastmtp.protocol import WORK_POOL, Report


class Outcome(NamedTuple):
    """How a job ended: its final status, the error code if it failed, and one line for people."""

    status: str
    code: str | None
    message: str


def outcome_of(state: RunState, report: Report | None) -> Outcome:
    """A stored report is the record of what was done and outranks how the process ended; else the state decides."""
    if report and report.status == "succeeded":
        return Outcome("succeeded", None, _gain(report))
    if report and report.status == "rejected":
        return Outcome("failed", "gate_rejected", str(report.gate.get("reason") or "the gate said no"))
    if state.type == "CANCELLED":
        return Outcome("cancelled", None, state.message or "Cancelled.")
    if report and report.error:
        return Outcome("failed", report.error.get("code", "pipeline_error"), report.error.get("message", ""))
    return _without_report(state)


def _without_report(state: RunState) -> Outcome:
    if state.type == "COMPLETED":
        return Outcome("failed", "result_missing", "The run completed but stored no report.")
    if state.type == "CRASHED" and state.message.startswith(LOST):
        return Outcome("failed", "lost", state.message)
    if state.type == "CRASHED":
        return Outcome("failed", "infrastructure_error", state.message or "The run's process ended unexpectedly.")
    code = "timeout" if state.name == "TimedOut" else "pipeline_error"
    return Outcome("failed", code, state.message or "The run failed.")


def detail_of(state: RunState) -> str | None:
    """What a waiting or running job's `status_detail` says of this state; nothing when it goes without saying."""
    if state.name == "Late":
        return (
            "Late: no worker has taken the run; none is there or all are busy. "
            f"To start one: prefect worker start --pool {WORK_POOL}"
        )
    if state.name == "AwaitingConcurrencySlot":
        return "AwaitingConcurrencySlot: waits for another run to end."
    return None if state.name == "Running" else state.name


def _gain(report: Report) -> str:
    lengths = f"mean acceptance length {_length(report.base)} -> {_length(report.tuned)}"
    return f"{lengths}, published at {report.published}" if report.published else lengths


def _length(measured: object) -> str:
    length = getattr(measured, "mean_acceptance_length", None)
    return "?" if length is None else f"{length:.3f}"
