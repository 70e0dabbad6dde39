"""Prefect as our Orchestrator: translates between its client and the seam, and decides nothing.

One client for the life of the service, used from one event loop. Prefect's settings are not asked for the address,
which is ours; they are for what goes with it, such as PREFECT_API_AUTH_STRING.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID
from zoneinfo import available_timezones

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.schedules import CronSchedule
from prefect.client.schemas.sorting import ArtifactSort, FlowRunSort
from prefect.events import Event
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventNameFilter, EventOccurredFilter, EventOrder
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import Cancelling, Crashed
from pydantic import ValidationError

from api.orchestrator import ENDED, ProgressSeen, Refused, Run, RunState, Seen, Unavailable
from api.prefect_events import PROGRESS_PREFIX, RUN_PREFIX, progress_of, subscribe
from fastmtp import protocol
from fastmtp.protocol import Report

PAGE = 200
EVENT_PAGE = 50


class PrefectOrchestrator:
    """See `api.orchestrator.Orchestrator`. Use as an async context manager."""

    def __init__(self, api_url: str, *, timeout: float = 15.0) -> None:
        auth = get_current_settings().api.auth_string
        self._api_url = api_url
        self._timeout = timeout
        self._client = PrefectClient(
            api_url,
            auth_string=auth.get_secret_value() if auth else None,
            httpx_settings={"timeout": httpx.Timeout(timeout)},
        )

    async def __aenter__(self) -> PrefectOrchestrator:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(*error)

    async def ready(self) -> None:
        async with self._call("ready"):
            await self._client.request("GET", "/ready")

    async def create_run(self, *, job_id: str, spec: dict[str, Any], key: str) -> str:
        async with self._call("create a run"):
            deployment = await self._deployment(protocol.FINETUNE_DEPLOYMENT)
            run = await self._client.create_flow_run_from_deployment(
                deployment,
                name=job_id,
                parameters={"job": spec, "job_id": job_id},
                tags=[protocol.COMMON_TAG, f"{protocol.JOB_TAG_PREFIX}{job_id}"],
                idempotency_key=key,
            )
        return str(run.id)

    async def find_run(self, key: str) -> str | None:
        wanted = filters.FlowRunFilter(idempotency_key=filters.FlowRunFilterIdempotencyKey(any_=[key]))
        async with self._call("find a run"):
            runs = await self._client.read_flow_runs(flow_run_filter=wanted, limit=1)
        return str(runs[0].id) if runs else None

    async def read_runs(self, ids: Sequence[str]) -> dict[str, Run]:
        found: dict[str, Run] = {}
        for start in range(0, len(ids), PAGE):
            some = [UUID(one) for one in ids[start : start + PAGE]]
            wanted = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=some))
            async with self._call("read runs"):
                runs = await self._client.read_flow_runs(flow_run_filter=wanted, limit=PAGE)
            found.update((run.id, run) for run in map(_run, runs))
        return found

    async def read_fired_runs(self, since: float) -> list[Run]:
        wanted = filters.FlowRunFilter(
            expected_start_time=filters.FlowRunFilterExpectedStartTime(after_=_datetime(since)),
            state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(not_any_=[StateType.SCHEDULED])),
        )
        flow, deployment = protocol.RETRAIN_DEPLOYMENT.split("/")
        found: list[Run] = []
        while True:
            async with self._call("read scheduled runs"):
                runs = await self._client.read_flow_runs(
                    flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=[flow])),
                    deployment_filter=filters.DeploymentFilter(name=filters.DeploymentFilterName(any_=[deployment])),
                    flow_run_filter=wanted,
                    sort=FlowRunSort.EXPECTED_START_TIME_ASC,
                    limit=PAGE,
                    offset=len(found),
                )
            found.extend(map(_run, runs))
            if len(runs) < PAGE:
                return found

    async def cancel_run(self, run_id: str) -> None:
        # The answer does not matter: a run that has not begun answers REJECT and is cancelled all the same.
        async with self._call("cancel a run"):
            with contextlib.suppress(ObjectNotFound):
                await self._client.set_flow_run_state(UUID(run_id), Cancelling())

    async def crash_run(self, run_id: str, message: str) -> None:
        async with self._call("give up a run"):
            with contextlib.suppress(ObjectNotFound):
                run = await self._client.read_flow_run(UUID(run_id))
                if _run(run).state.type not in ENDED:
                    await self._client.set_flow_run_state(run.id, Crashed(message=message), force=True)

    async def read_result(self, job_id: str, run_id: str) -> Report | None:
        wanted = filters.ArtifactFilter(
            key=filters.ArtifactFilterKey(any_=[protocol.result_key(job_id)]),
            flow_run_id=filters.ArtifactFilterFlowRunId(any_=[UUID(run_id)]),
        )
        async with self._call("read a result"):
            found = await self._client.read_artifacts(artifact_filter=wanted, sort=ArtifactSort.CREATED_DESC, limit=1)
        return Report.model_validate_json(str(found[0].data)) if found else None

    async def read_progress(self, job_id: str, since: float) -> list[ProgressSeen]:
        wanted = EventFilter(
            occurred=EventOccurredFilter(since=_datetime(since)),
            event=EventNameFilter(prefix=[PROGRESS_PREFIX]),
            any_resource=EventAnyResourceFilter(id=[protocol.resource_id(job_id)]),
            order=EventOrder.ASC,
        )
        # Page by time, not by the server's next-page link, which names the server as it sees itself.
        events: dict[UUID, Event] = {}
        while True:
            async with self._call("read events"):
                page = (await self._client.read_events(wanted, limit=EVENT_PAGE)).events
            known = len(events)
            events.update((event.id, event) for event in page)
            if len(page) < EVENT_PAGE or len(events) == known:
                return [seen for event in events.values() if (seen := progress_of(event))]
            wanted.occurred.since = page[-1].occurred

    async def alive_since(self, run_id: str, since: float) -> bool:
        wanted = EventFilter(
            occurred=EventOccurredFilter(since=_datetime(since)),
            any_resource=EventAnyResourceFilter(id=[f"{RUN_PREFIX}{run_id}"]),
        )
        async with self._call("read events"):
            return bool((await self._client.read_events(wanted, limit=1)).events)

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[Seen]]:
        async with subscribe(self._api_url) as seen:
            yield seen

    async def create_schedule(self, schedule_id: str, cron: str, timezone: str, spec: dict[str, Any]) -> str:
        async with self._call("create a schedule"):
            deployment = await self._deployment(protocol.RETRAIN_DEPLOYMENT)
            for existing in await self._client.read_deployment_schedules(deployment):
                if existing.slug == schedule_id:
                    return str(existing.id)
            wanted = DeploymentScheduleCreate(
                schedule=CronSchedule(cron=cron, timezone=timezone),
                slug=schedule_id,
                parameters={"job": spec, "schedule_id": schedule_id},
            )
            created = await self._client.create_deployment_schedules(deployment, [wanted])
        return str(created[0].id)

    async def delete_schedule(self, schedule_id: str) -> None:
        async with self._call("delete a schedule"):
            deployment = await self._deployment(protocol.RETRAIN_DEPLOYMENT)
            for existing in await self._client.read_deployment_schedules(deployment):
                if existing.slug == schedule_id:
                    with contextlib.suppress(ObjectNotFound):
                        await self._client.delete_deployment_schedule(deployment, existing.id)

    async def _deployment(self, name: str) -> UUID:
        try:
            return (await self._client.read_deployment_by_name(name)).id
        except ObjectNotFound as error:
            raise Unavailable(
                f"Prefect has no deployment {name}; create it with `python -m flows.deployments`."
            ) from error

    @contextlib.asynccontextmanager
    async def _call(self, what: str) -> AsyncIterator[None]:
        """Bound a call in time (Prefect's client retries for minutes) and turn its errors into the seam's."""
        try:
            async with asyncio.timeout(2 * self._timeout):
                yield
        except httpx.HTTPStatusError as error:
            kind = Refused if error.response.status_code in (400, 409, 422) else Unavailable
            raise kind(f"Prefect, asked to {what}, answered {error.response.status_code}: {_detail(error)}") from error
        except (httpx.TransportError, TimeoutError) as error:
            raise Unavailable(f"Prefect, asked to {what}, did not answer: {type(error).__name__}") from error


def check_cron(cron: str, timezone: str) -> None:
    """Raise ValueError, with what to write instead, when Prefect would not take this cron or time zone."""
    if timezone not in available_timezones():
        raise ValueError(f"{timezone} is no IANA time zone; write one such as UTC or Europe/Berlin.")
    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        raise ValueError(f"{cron!r} is no cron of five fields, such as `0 3 * * 1` for Mondays at three.") from error


def _detail(error: httpx.HTTPStatusError) -> str:
    return " ".join(error.response.text.split())[:500]


def _datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _run(run: FlowRun) -> Run:
    assert run.state is not None, "the server gives every run a state"
    return Run(str(run.id), _state(run.state), run.parameters)


def _state(state: State[Any]) -> RunState:
    return RunState(
        id=str(state.id), type=state.type.value, name=state.name or "", time=state.timestamp.timestamp(),
        message=state.message or "",
    )  # fmt: skip
