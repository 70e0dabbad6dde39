"""Register work pool and deployments with the Prefect server that PREFECT_API_URL names: `python -m flows.deployments`.

Idempotent: run it at every start. Schedules that were made through the API stay. The flows are named by import path, so
a worker needs this package installed and nothing to pull.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists
from prefect.flows import Flow
from prefect.types.entrypoint import EntrypointType
from prefect.workers.process import ProcessWorker

from fastmtp.protocol import COMMON_TAG, FINETUNE_DEPLOYMENT, RETRAIN_DEPLOYMENT, WORK_POOL
from flows.finetune import finetune
from flows.retrain import retrain

# Prefect's smallest period. Whoever watches the runs takes three missed heartbeats for a lost run.
HEARTBEAT_SECONDS = 30


async def deploy() -> None:
    """Create or update the work pool and both deployments."""
    async with get_client() as client:
        template = ProcessWorker.get_default_base_job_template()
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process", base_job_template=template))
    # One firing at a time: a schedule faster than its own jobs must not heap them up.
    one_at_a_time = ConcurrencyLimitConfig(limit=1, collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
    await _deployment(finetune, FINETUNE_DEPLOYMENT).aapply()
    await _deployment(retrain, RETRAIN_DEPLOYMENT, one_at_a_time).aapply()


def _deployment(flow: Flow[..., Any], full_name: str, limit: ConcurrencyLimitConfig | None = None) -> RunnerDeployment:
    return RunnerDeployment.from_flow(
        flow,
        name=full_name.split("/")[1],
        work_pool_name=WORK_POOL,
        tags=[COMMON_TAG],
        entrypoint_type=EntrypointType.MODULE_PATH,
        job_variables={"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}},
        concurrency_limit=limit,
    )


def main() -> None:
    """Register everything and say so."""
    asyncio.run(deploy())
    sys.stdout.write(f"Registered {FINETUNE_DEPLOYMENT} and {RETRAIN_DEPLOYMENT} on work pool {WORK_POOL}.\n")


if __name__ == "__main__":
    main()
