"""The flow `retrain`: what a firing of a schedule runs. The same chain as `finetune`, under a job id of its own.

A firing that comes late is skipped once the next one is nearer than the one that was missed: after an outage that
leaves at most one run to catch up, never a heap. A skipped run ends Cancelled under the name Skipped, and says why.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.runtime import flow_run as runtime

from fastmtp.config import JobSpec
from fastmtp.protocol import scheduled_job_id
from flows.finetune import run_chain, sweep

# A busy machine may take this long to start a run; that alone is no miss, however short the period.
START_UP = timedelta(minutes=2)


def run_name() -> str:
    """The job id of the run at hand."""
    return scheduled_job_id(str(runtime.get_id()))


@flow(
    name="retrain",
    flow_run_name=run_name,
    retries=0,
    persist_result=False,
    on_cancellation=[sweep],
    on_crashed=[sweep],
)
def retrain(job: JobSpec, schedule_id: str) -> State[Any]:
    """Fine-tune again as a schedule asks for; publishes only what beats the last published result."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    get_run_logger().info("Firing of schedule %s", schedule_id)
    with get_client(sync_client=True) as client:
        missed = missed_by_too_much(client, context.flow_run, datetime.now(UTC))
    if missed:
        get_run_logger().warning(missed)
        return State(type=StateType.CANCELLED, name="Skipped", message=missed)
    return run_chain(job, scheduled_job_id(context.flow_run.id))


def missed_by_too_much(client: SyncPrefectClient, run: FlowRun, now: datetime) -> str | None:
    """Why a scheduled run must not start any more, or None.

    The period is the distance to the next slot of the same schedule, which Prefect plans ahead. A run that no schedule
    made, or whose schedule plans nothing more, is never too late.
    """
    if run.created_by is None or run.created_by.type != "SCHEDULE" or run.expected_start_time is None:
        return None
    slot = run.expected_start_time
    later = client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[run.deployment_id])),
        flow_run_filter=FlowRunFilter(expected_start_time=FlowRunFilterExpectedStartTime(after_=slot)),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
        limit=200,
    )
    slots = [
        other.expected_start_time
        for other in later
        if other.created_by and other.created_by.id == run.created_by.id and other.expected_start_time
    ]
    following = min((other for other in slots if other > slot), default=None)
    if following is None or now - slot <= max((following - slot) / 2, START_UP):
        return None
    late = int((now - slot).total_seconds())
    return f"Skipped: the slot of {slot:%Y-%m-%d %H:%M} UTC was missed by {late} s; the next is {following:%H:%M}."
