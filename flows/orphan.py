"""Ends the work of a run that Prefect holds for ended while its process lives on.

That happens when nobody is left to pass a cancellation on, because the worker was killed, or when a state is forced on
a run, as the service does with one that it takes for lost. Without this, a run shown as cancelled would keep its GPU.
"""

from __future__ import annotations

import time
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound, PrefectException

from fastmtp.errors import FastMTPError

CHECK_SECONDS = 10.0
# How long a living worker may take to end a run that is being cancelled.
CANCEL_SECONDS = 60.0
_ENDED = (StateType.CANCELLED, StateType.CRASHED, StateType.FAILED, StateType.COMPLETED)


class RunEnded(FastMTPError):
    """The run is over in Prefect, or gone from it. Nothing is to be reported any more."""

    code = "run_ended"


class OrphanCheck:
    """Call it as often as you like while work goes on; it asks Prefect every `CHECK_SECONDS`.

    Raises RunEnded when the run has ended, is gone, or has been cancelling for longer than a living worker needs.
    That Prefect does not answer is no reason to stop.
    """

    def __init__(self, flow_run_id: UUID) -> None:
        self._flow_run_id = flow_run_id
        self._not_before = time.monotonic() + CHECK_SECONDS
        self._cancelling_since: float | None = None

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._not_before:
            return
        self._not_before = now + CHECK_SECONDS
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(self._flow_run_id).state
        except ObjectNotFound:
            raise RunEnded("This run was deleted from Prefect; its work has been ended.") from None
        except (httpx.HTTPError, PrefectException) as error:
            get_run_logger().warning("Prefect does not say how this run stands (the job goes on): %s", error)
            return
        if state is None:
            return
        if state.type in _ENDED:
            raise RunEnded(f"Prefect holds this run for {state.name}: {state.message}. Its work has been ended.")
        if state.type != StateType.CANCELLING:
            self._cancelling_since = None
        elif self._cancelling_since is None:
            self._cancelling_since = now
        elif now - self._cancelling_since > CANCEL_SECONDS:
            raise RunEnded("This run is being cancelled and no worker has ended it; its work has been ended.")
