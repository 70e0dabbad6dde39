"""When the work of a run is ended because Prefect holds the run for ended. Prefect's client is the seam."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.exceptions import ObjectNotFound
from prefect.logging import disable_run_logger
from prefect.states import Cancelled, Cancelling, Crashed, Running

from flows import orphan
from flows.orphan import OrphanCheck, RunEnded


class Server:
    """Answers with one state after the other, or raises what stands in its place; the last one stays."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked = 0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def read_flow_run(self, _: Any) -> Any:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(state=answer)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(orphan.time, "monotonic", lambda: now.seconds)
    return now


def checked(monkeypatch, clock, server: Server, seconds: int) -> None:
    """Let a check run every second."""
    monkeypatch.setattr(orphan, "get_client", lambda **_: server)
    check = OrphanCheck(uuid4())
    with disable_run_logger():
        for _ in range(seconds):
            clock.seconds += 1
            check()


def test_a_running_run_goes_on_and_prefect_is_asked_now_and_then(monkeypatch, clock):
    server = Server(Running())
    checked(monkeypatch, clock, server, 100)
    assert server.asked == 10


@pytest.mark.parametrize("state", [Cancelled(message="timed out"), Crashed(message="lost")])
def test_a_run_that_has_ended_ends_its_work(monkeypatch, clock, state):
    with pytest.raises(RunEnded, match=f"{state.name}: {state.message}"):
        checked(monkeypatch, clock, Server(Running(), state), 100)


def test_a_deleted_run_ends_its_work(monkeypatch, clock):
    response = httpx.Response(404, request=httpx.Request("GET", "http://prefect"))
    missing = ObjectNotFound(httpx.HTTPStatusError("gone", request=response.request, response=response))
    with pytest.raises(RunEnded, match="deleted"):
        checked(monkeypatch, clock, Server(missing), 100)


def test_a_worker_is_given_time_to_cancel(monkeypatch, clock):
    checked(monkeypatch, clock, Server(Cancelling()), 60)
    with pytest.raises(RunEnded, match="no worker has ended it"):
        checked(monkeypatch, clock, Server(Cancelling()), 90)


def test_a_server_that_does_not_answer_ends_nothing(monkeypatch, clock):
    server = Server(httpx.ConnectError("refused"))
    checked(monkeypatch, clock, server, 100)
    assert server.asked == 10
