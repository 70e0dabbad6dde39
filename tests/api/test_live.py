"""The service as its users have it: a real server process, a real Prefect server and worker, OpenAI's own client.

Only the `fastmtp` command that the flow starts is a stub (tests/flows/stub_fastmtp.py); its model says what it does.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from deploy import services
from fastmtp import procs

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

STUB = Path(__file__).parents[1] / "flows" / "stub_fastmtp.py"
LOST_AFTER = 40.0


class Stack:
    """Everything that runs. The service and the worker can be killed and started again."""

    def __init__(self, root: Path, prefect_env: dict[str, str], stack: ExitStack) -> None:
        self.root = root
        self.jobs = root / "jobs"
        self._stack = stack
        stub = shlex.join([sys.executable, str(STUB)])
        self._env = {**prefect_env, "FASTMTP_COMMAND": stub, "FASTMTP_WORK_DIR": str(self.jobs)}
        self.worker = self.start_worker("first")
        self.api = self.start_api()
        self.worker.wait()
        self.api.wait()

    def start_worker(self, name: str) -> services.Service:
        return self._stack.enter_context(
            services.worker(self.root, env=self._env, name=f"{self.root.name}-{name}", limit=2)
        )

    def start_api(self) -> services.Service:
        env = {
            **self._env,
            "FASTMTP_API_PREFLIGHT": "false",
            "FASTMTP_API_POLL_SECONDS": "2",
            "FASTMTP_API_LOST_AFTER_SECONDS": str(LOST_AFTER),
            "FASTMTP_ALLOWED_SOURCES": "/",
            "FASTMTP_ALLOWED_DESTINATIONS": f"file://{self.root}",
        }
        return self._stack.enter_context(services.rest_api(self.root, env=env))

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.api.url}/v1", api_key="unused", max_retries=0)

    def create(self, plan: str, **fields: Any) -> Any:
        """A job for the stub, made with OpenAI's client."""
        method = {"type": "mtp", "mtp": {"publish": {"uri": f"file://{self.root}/published/"}}}
        return self.client.fine_tuning.jobs.create(
            model=f"stub:{plan}", training_file="train.jsonl", validation_file="test.jsonl", method=method, **fields
        )

    def until(self, job_id: str, holds: Callable[[Any], bool], seconds: float) -> Any:
        """The job, read with OpenAI's client, once `holds` is true of it."""
        return wait_for(lambda: self.client.fine_tuning.jobs.retrieve(job_id), holds, seconds)

    def wait_for_pids(self, job_id: str) -> None:
        """Until the stub's hanging stage runs."""
        path = self.jobs / job_id / "pids.json"
        wait_for(lambda: path.exists() and path.read_text().endswith("]"), bool, 60)


def wait_for(read: Callable[[], Any], holds: Callable[[Any], bool], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not holds(found := read()):
        assert time.monotonic() < deadline, f"still not so after {seconds} s: {found}"
        time.sleep(0.3)
    return found


@pytest.fixture(scope="module")
def stack(prefect_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("live")
    log = root / "logs" / "deployments.log"
    assert procs.run([sys.executable, "-m", "flows.deployments"], log=log, env=prefect_server.env) == 0, procs.tail(log)
    with ExitStack() as started:
        yield Stack(root, prefect_server.env, started)


@pytest.fixture(scope="module")
def followed(stack: Stack) -> tuple[Any, list[Any]]:
    """A job that OpenAI's client made, as it ended, and every state it was seen in."""
    job = stack.create("ok", seed=3, suffix="live", metadata={"team": "search"})
    assert job.status == "queued" and job.seed == 3 and job.suffix == "live"
    seen = [job]

    def look() -> Any:
        seen.append(stack.client.fine_tuning.jobs.retrieve(job.id))
        return seen[-1]

    return wait_for(look, lambda job: job.status in ("succeeded", "failed"), 90), seen


def test_openais_client_follows_a_job_to_its_end(stack: Stack, followed: tuple[Any, list[Any]]):
    ended, seen = followed
    assert ended.status == "succeeded", ended.error
    assert ended.fine_tuned_model == f"file://{stack.root}/published/v1/"
    assert ended.result_files == [f"file://{stack.root}/published/v1/model.safetensors"]
    extra = ended.model_dump()
    assert extra["acceptance"]["tuned"]["acceptance"] == [0.85, 0.60, 0.45]
    assert extra["acceptance"]["base"]["mean_acceptance_length"] == 2.40
    assert extra["greedy_identical"] == [200, 200] and extra["gate"]["passed"] is True
    assert extra["progress"] == 1.0 and extra["attempts"][0]["state"] == "Completed"
    stages = {stage["stage"]: stage["status"] for stage in extra["stages"]}
    assert set(stages) == {"preflight", "extract", "prepare", "train", "stitch", "evaluate", "publish"}
    assert set(stages.values()) == {"finished"}
    assert len({job.model_dump()["stage"] for job in seen}) > 3, "the stage was not seen moving"
    browser = {"accept": "text/html"}
    assert httpx.get(extra["attempts"][0]["url"], headers=browser, timeout=10).status_code == 200


def test_its_events_metrics_and_place_in_the_list_are_there(stack: Stack, followed: tuple[Any, list[Any]]):
    job = followed[0]
    wait_for(lambda: losses(stack, job.id), lambda found: len(found) == 5, 30)
    assert losses(stack, job.id) == pytest.approx([3.0, 1.5, 1.0, 0.75, 0.6])
    events = list(stack.client.fine_tuning.jobs.list_events(job.id, limit=5))
    assert len(events) > 20 and len({event.id for event in events}) == len(events)
    assert events[-1].message == "Job created"
    assert any(event.message.startswith("Job succeeded: mean acceptance length 2.400 -> 2.900") for event in events)
    assert [one.id for one in stack.client.fine_tuning.jobs.list(metadata={"team": "search"})] == [job.id]


def test_openais_client_understands_the_problems(stack: Stack):
    with pytest.raises(openai.NotFoundError) as missing:
        stack.client.fine_tuning.jobs.retrieve("ftjob-none")
    assert (missing.value.code, missing.value.param) == ("job_not_found", "job_id")
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        stack.create("ok", seed=-1)
    assert (refused.value.code, refused.value.param) == ("invalid_request", "/seed")


def losses(stack: Stack, job_id: str) -> list[float]:
    answer = httpx.get(f"{stack.api.url}/v1/fine_tuning/jobs/{job_id}/metrics", params={"name": "loss"}, timeout=10)
    return [point["values"]["loss"] for point in answer.json()["data"]]


def test_a_rejected_result_and_a_failed_stage_say_why(stack: Stack):
    rejected, failed = stack.create("reject"), stack.create("bad-train")
    job = stack.until(rejected.id, lambda job: job.status in ("succeeded", "failed"), 120)
    assert (job.status, job.error.code, job.error.message) == ("failed", "gate_rejected", "no gain over the base")
    assert job.model_dump()["acceptance"]["tuned"]["drafts"] == 2600 and job.fine_tuned_model is None
    job = stack.until(failed.id, lambda job: job.status in ("succeeded", "failed"), 120)
    assert (job.status, job.error.code) == ("failed", "invalid_checkpoint")
    assert job.error.message == "shard 2 is missing. Copy it again."
    assert job.model_dump()["stage"] == "train"


def test_a_job_is_cancelled_while_a_stage_hangs(stack: Stack):
    job = stack.create("hang-train")
    stack.wait_for_pids(job.id)
    stack.until(job.id, lambda job: job.model_dump()["stage"] == "train", 20)
    assert stack.client.fine_tuning.jobs.cancel(job.id).status == "cancelling"
    ended = stack.until(job.id, lambda job: job.status != "cancelling", 60)
    assert ended.status == "cancelled" and ended.finished_at is not None
    assert stack.client.fine_tuning.jobs.cancel(job.id).status == "cancelled"


def test_a_killed_service_finds_what_happened_meanwhile(stack: Stack):
    job = stack.create("ok")
    stack.until(job.id, lambda job: job.model_dump()["attempts"][0]["flow_run_id"] is not None, 30)
    kill(stack.api)
    run_id = job.id
    wait_for(lambda: (stack.jobs / run_id / "report.json").exists(), bool, 90)
    stack.api = stack.start_api()
    stack.api.wait()
    ended = stack.until(job.id, lambda job: job.status in ("succeeded", "failed"), 30)
    assert ended.status == "succeeded"
    wait_for(lambda: losses(stack, job.id), lambda found: len(found) == 5, 20)


def test_a_schedule_fires_and_its_job_is_like_any_other(stack: Stack):
    template = {"model": "stub:reject", "training_file": "train.jsonl", "validation_file": "test.jsonl"}
    api = httpx.Client(base_url=stack.api.url, timeout=30)
    answer = api.post("/v1/schedules", json={"cron": "* * * * *", "timezone": "Europe/Berlin", "job": template})
    assert answer.status_code == 201, answer.text
    schedule = answer.json()
    wait_for(lambda: api.get(f"/v1/schedules/{schedule['id']}").json()["state"], lambda state: state == "active", 20)
    found = wait_for(lambda: jobs_of(api, schedule["id"]), lambda jobs: bool(jobs), 100)
    assert api.delete(answer.headers["location"]).status_code == 204
    job = stack.until(found[0]["id"], lambda job: job.status in ("succeeded", "failed"), 90)
    assert job.error.code == "gate_rejected" and job.fine_tuned_model is None
    assert [event["message"] for event in events_of(api, job.id)][0] == f"Started by schedule {schedule['id']}"
    assert api.get(answer.headers["location"]).status_code == 404
    api.close()


def jobs_of(api: httpx.Client, schedule_id: str) -> list[dict[str, Any]]:
    return list(api.get("/v1/fine_tuning/jobs", params={"schedule_id": schedule_id}).json()["data"])


def events_of(api: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    params = {"order": "asc", "limit": 100}
    return list(api.get(f"/v1/fine_tuning/jobs/{job_id}/events", params=params).json()["data"])


def test_a_job_whose_worker_and_flow_were_killed_is_lost(stack: Stack):
    """Last, because it takes the worker away."""
    job = stack.create("hang-train")
    stack.wait_for_pids(job.id)
    stack.until(job.id, lambda job: job.status == "running", 20)
    kill(stack.worker)
    killed = time.monotonic()
    ended = stack.until(job.id, lambda job: job.status != "running", LOST_AFTER + 60)
    assert (ended.status, ended.error.code) == ("failed", "lost")
    assert time.monotonic() - killed < LOST_AFTER + 45
    assert ended.model_dump()["attempts"][0]["state"] == "Crashed"


def kill(service: services.Service) -> None:
    """SIGKILL to a process and everything it started, as losing power would."""
    root = psutil.Process(service.child.pid)
    for process in [root, *root.children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)
    service.child.wait(10)
