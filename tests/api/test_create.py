"""Creating jobs: what is accepted, what is refused and how, and that the same request made twice makes one job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from sqlalchemy import func, select

from api import migrate
from api.db import Attempt, Database, Event, IdempotencyKey, Job, Outbox
from api.main import create_app
from api.settings import Settings
from fastmtp.errors import CheckpointError, DataError, DestinationError
from tests.api.conftest import Api
from tests.api.fakes import FakeOrchestrator, body

JOBS = "/v1/fine_tuning/jobs"


async def test_a_job_is_accepted_with_its_defaults_filled_in(api: Api):
    answer = await api.client.post(JOBS, json=body(suffix="nightly", metadata={"team": "search"}))
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"{JOBS}/{job['id']}"
    assert answer.headers["retry-after"] == "5"
    assert (job["object"], job["status"], job["model"]) == ("fine_tuning.job", "queued", "/models/tiny")
    assert (job["training_file"], job["validation_file"]) == ("/data/train.jsonl", "/data/test.jsonl")
    assert (job["suffix"], job["metadata"]) == ("nightly", {"team": "search"})
    mtp = job["method"]["mtp"]
    assert (mtp["train"]["epochs"], mtp["train"]["beta"], mtp["publish"]["uri"]) == (2, 0.6, "s3://models/tiny/")
    assert job["error"] is None and job["acceptance"] is None and job["fine_tuned_model"] is None
    assert [spec.data.prompts for spec in api.preflights] == ["/data/train.jsonl"]


async def test_prompts_may_come_from_several_places(api: Api):
    files, sets = ["/data/a.jsonl", "s3://logs/2026-*/"], {"gsm8k": "/data/a.jsonl", "traffic": "/data/b.jsonl"}
    job = await api.post_job(body(training_file=files, validation_file=sets))
    assert (job["training_file"], job["validation_file"]) == (files, sets)
    assert api.preflights[0].data.sources == tuple(files) and api.preflights[0].evaluate.sets == sets


async def test_a_seed_is_made_up_answered_and_used(api: Api):
    job = await api.post_job(body())
    assert 0 <= job["seed"] < 2**31
    assert job["method"]["mtp"]["data"]["seed"] == job["method"]["mtp"]["train"]["seed"] == job["seed"]
    given = await api.post_job(body(seed=7))
    assert given["seed"] == given["method"]["mtp"]["train"]["seed"] == 7


FAULTS = [
    ({"model": ""}, "/model"),
    ({"training_file": 3}, "/training_file"),
    ({"training_file": ["a", 3]}, "/training_file/1"),
    ({"training_file": []}, "/training_file"),
    ({"validation_file": {"gsm8k": 3}}, "/validation_file/gsm8k"),
    ({"validation_file": {"A B": "a"}}, "/validation_file/A B"),
    ({"validation_file": None}, "/validation_file"),
    ({"seed": -1}, "/seed"),
    ({"suffix": "x" * 65}, "/suffix"),
    ({"metadata": {"k": "v" * 513}}, "/metadata/k"),
    ({"metadata": {str(number): "" for number in range(17)}}, "/metadata"),
    ({"hyperparameters": {}}, "/hyperparameters"),
    ({"method": {"type": "supervised"}}, "/method/type"),
    ({"method": {"type": "mtp", "mtp": {"train": {"lr": "fast"}}}}, "/method/mtp/train/lr"),
    ({"method": {"type": "mtp", "mtp": {"train": {"epoch": 1}}}}, "/method/mtp/train/epoch"),
    ({"method": {"type": "mtp", "mtp": {"evaluate": {"num_prompts": 0}}}}, "/method/mtp/evaluate/num_prompts"),
    ({"method": {"type": "mtp", "mtp": {"data": {"prompts": "x"}}}}, "/method/mtp/data/prompts"),
    ({"method": {"type": "mtp", "mtp": {"publish": {"uri": "ftp://x"}}}}, "/method/mtp/publish/uri"),
]


@pytest.mark.parametrize(("change", "pointer"), FAULTS, ids=[pointer for _, pointer in FAULTS])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_fault_is_refused_where_it_was_written(api: Api, change: dict, pointer: str):
    answer = await api.client.post(JOBS, json=body(**change))
    problem = answer.json()
    assert answer.status_code == problem["status"] == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-should-retry"] == "false"
    assert problem["param"] == problem["errors"][0]["pointer"] == pointer
    assert pointer in problem["detail"]
    assert await _counts(api) == [0, 0, 0, 0]
    assert api.preflights == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_every_fault_of_a_body_is_listed(api: Api):
    change = {"method": {"type": "mtp", "mtp": {"train": {"lr": 2, "beta": 0}}}}
    problem = (await api.client.post(JOBS, json=body(**change))).json()
    assert {one["pointer"] for one in problem["errors"]} == {"/method/mtp/train/lr", "/method/mtp/train/beta"}


LOOKS = [
    (CheckpointError("/models/tiny has lost its head.", mend="Take the original.", pointer="/model"), "/model"),
    (DataError("/data/train.jsonl has no row.", mend="Give one.", pointer="/data/prompts"), "/training_file"),
    (DataError("/data/test.jsonl has no row.", pointer="/evaluate/prompts"), "/validation_file"),
    (DestinationError("s3://models: no.", mend="Allow it.", pointer="/publish/uri"), "/method/mtp/publish/uri"),
]


@pytest.mark.parametrize(("error", "pointer"), LOOKS, ids=[pointer for _, pointer in LOOKS])
@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_what_the_preflight_finds_is_a_problem_and_nothing_is_stored(api: Api, error, pointer: str):
    api.preflight_error = error
    answer = await api.client.post(JOBS, json=body(), headers={"Idempotency-Key": "one"})
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["param"]) == (422, error.code, pointer)
    assert problem["detail"] == str(error)
    assert await _counts(api) == [0, 0, 0, 0]
    api.preflight_error = None
    await api.post_job(body(), **{"Idempotency-Key": "one"})


class _Wrong(NamedTuple):
    what: str
    mend: str


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_every_fault_of_a_checkpoint_is_listed(api: Api):
    faults = (_Wrong("m lacks a.safetensors.", "Download it again."), _Wrong("m lacks b.safetensors.", ""))
    api.preflight_error = CheckpointError("m lacks a.safetensors.", pointer="/model", faults=faults)
    problem = (await api.client.post(JOBS, json=body())).json()
    assert problem["errors"] == [
        {"detail": "m lacks a.safetensors. Download it again.", "pointer": "/model"},
        {"detail": "m lacks b.safetensors.", "pointer": "/model"},
    ]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_real_look_obeys_the_operator_and_reads_the_model(settings: Settings, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    wanted = body(
        model=str(tmp_path / "model"), training_file=str(tmp_path / "train.jsonl"), validation_file="/etc/passwd"
    )

    async def refused(**changes: Any) -> tuple[str, str]:
        async with real_look(settings.model_copy(update=changes)) as client:
            problem = (await client.post(JOBS, json=wanted)).json()
            return problem["param"], problem["detail"]

    pointer, detail = await refused()
    assert pointer == "/model" and "FASTMTP_ALLOWED_SOURCES" in detail
    sources = (str(tmp_path),)
    assert (await refused(allowed_sources=sources))[0] == "/validation_file"
    assert (await refused(allowed_sources=sources, preflight=False))[0] == "/validation_file"
    wanted["validation_file"] = wanted["training_file"]
    wanted["method"]["mtp"]["data"] = {"server": "http://10.0.0.1:8000"}
    pointer, detail = await refused(allowed_sources=sources, preflight=False)
    assert pointer == "/method/mtp/data/server" and "FASTMTP_ALLOWED_SERVERS" in detail
    del wanted["method"]["mtp"]["data"]
    pointer, detail = await refused(allowed_sources=sources)
    assert pointer == "/method/mtp/publish/uri" and "FASTMTP_ALLOWED_DESTINATIONS" in detail
    pointer, detail = await refused(allowed_sources=sources, allowed_destinations=("s3://models",))
    assert pointer == "/model" and str(tmp_path / "model") in detail


@asynccontextmanager
async def real_look(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """The service as it is, but for Prefect."""
    db = Database(settings.database_url)
    await migrate.upgrade(db)
    await db.close()
    app = create_app(settings, orchestrator=FakeOrchestrator())
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):
        yield client


async def test_one_key_makes_one_job_from_many_requests_at_once(api: Api):
    headers = {"Idempotency-Key": '"a-key"'}
    posts = (api.client.post(JOBS, json=body(), headers=headers) for _ in range(10))
    answers = await asyncio.gather(*posts)
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len({answer.json()["seed"] for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    job_id = answers[0].json()["id"]
    await api.until(job_id, lambda job: job["attempts"][0]["flow_run_id"] is not None)
    assert len(api.prefect.runs) == 1
    replayed = await api.client.post(JOBS, json=body(), headers={"Idempotency-Key": "a-key"})
    assert replayed.headers["idempotency-replayed"] == "true"
    assert replayed.headers["location"] == f"{JOBS}/{job_id}"
    assert (await _counts(api))[:2] == [1, 1]


async def test_a_key_with_another_body_is_refused(api: Api):
    await api.post_job(body(), **{"Idempotency-Key": "one"})
    answer = await api.client.post(JOBS, json=body(seed=1), headers={"Idempotency-Key": "one"})
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
    assert (await api.client.get(JOBS)).json()["data"][1:] == []


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("key", ["", '""', "x" * 256])
async def test_a_key_that_is_none_is_refused(api: Api, key: str):
    answer = await api.client.post(JOBS, json=body(), headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_idempotency_key")


async def test_a_key_is_forgotten_when_it_expires(api: Api):
    first = await api.post_job(body(), **{"Idempotency-Key": "one"})
    async with api.db.write() as session:
        (await session.scalars(select(IdempotencyKey))).one().expires_at = 1.0
    second = await api.post_job(body(), **{"Idempotency-Key": "one"})
    assert second["id"] != first["id"]


async def _counts(api: Api) -> list[int]:
    async with api.db.read() as session:
        tables = (Job, Attempt, Event, Outbox)
        return [int(await session.scalar(select(func.count()).select_from(table)) or 0) for table in tables]
