"""Register work pool and deployments with the Prefect server that PREFECT_API_URL names: `python -m flows.deployments`.

Idempotent: run it at every start. The flows are named by import path, so a worker needs this package installed and
nothing to pull. Prefect's own `deploy` drops a deployment's schedules when it is repeated; this keeps them, since users
made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

import fastmtp
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
        await _register(client, finetune, FINETUNE_DEPLOYMENT)
        # One firing at a time. The next ones wait rather than vanish: they may belong to other schedules. A schedule
        # faster than its own jobs still heaps nothing up, since `retrain` skips a firing that comes too late.
        one = {
            "concurrency_limit": 1,
            "concurrency_options": ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.ENQUEUE),
        }
        await _register(client, retrain, RETRAIN_DEPLOYMENT, **one)


async def _register(client: PrefectClient, flow: Flow[..., Any], full_name: str, **more: Any) -> None:
    name = full_name.split("/")[1]
    fields: dict[str, Any] = {
        "version": fastmtp.__version__,
        "description": flow.description,
        "entrypoint": f"{flow.fn.__module__}.{flow.fn.__name__}",
        "work_pool_name": WORK_POOL,
        "tags": [COMMON_TAG],
        "job_variables": {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}},
        "parameter_openapi_schema": parameter_schema(flow).model_dump(exclude_unset=True),
        "enforce_parameter_schema": True,
        **more,
    }
    try:
        existing = await client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        flow_id = await client.create_flow_from_name(flow.name)
        await client.create_deployment(flow_id, name, **fields)
    else:
        await client.update_deployment(existing.id, DeploymentUpdate(**fields))


def main() -> None:
    """Register everything and say so."""
    asyncio.run(deploy())
    sys.stdout.write(f"Registered {FINETUNE_DEPLOYMENT} and {RETRAIN_DEPLOYMENT} on work pool {WORK_POOL}.\n")


if __name__ == "__main__":
    main()
