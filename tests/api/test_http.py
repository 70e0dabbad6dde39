"""What every answer has in common, and lists: problems, request ids, pages, filters, health, the OpenAPI document."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from api.main import create_app
from tests.api.conftest import Api
from tests.api.fakes import body

JOBS = "/v1/fine_tuning/jobs"
WRONG = [
    ("GET", "/v1/nothing", None, 404, "not_found"),
    ("PUT", JOBS, None, 405, "method_not_allowed"),
    ("GET", f"{JOBS}/ftjob-none", None, 404, "job_not_found"),
    ("GET", f"{JOBS}/ftjob-none/events", None, 404, "job_not_found"),
    ("GET", f"{JOBS}/ftjob-none/metrics", None, 404, "job_not_found"),
    ("POST", f"{JOBS}/ftjob-none/cancel", None, 404, "job_not_found"),
    ("GET", "/v1/schedules/ftsched-none", None, 404, "schedule_not_found"),
    ("DELETE", "/v1/schedules/ftsched-none", None, 404, "schedule_not_found"),
    ("POST", "/v1/schedules/ftsched-none/trigger", None, 404, "schedule_not_found"),
    ("GET", f"{JOBS}?limit=0", None, 400, "invalid_parameter"),
    ("GET", f"{JOBS}?limit=101", None, 400, "invalid_parameter"),
    ("GET", f"{JOBS}?status=lost", None, 400, "invalid_parameter"),
    ("GET", f"{JOBS}?after=ftjob-none", None, 400, "invalid_cursor"),
    ("GET", f"{JOBS}/a%00b", None, 400, "invalid_parameter"),
    ("GET", f"{JOBS}?model=%00", None, 400, "invalid_parameter"),
    ("POST", JOBS, b"{", 400, "invalid_json"),
    ("POST", JOBS, b"", 422, "invalid_request"),
    ("POST", JOBS, b"[]", 422, "invalid_request"),
    ("POST", JOBS, json.dumps(body(model="/a\0b")).encode(), 422, "invalid_request"),
    ("POST", JOBS, json.dumps(body(model="/\ud800")).encode(), 422, "invalid_request"),
]


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize(("method", "url", "content", "status", "code"), WRONG)
async def test_what_cannot_be_served_is_a_problem(api: Api, method: str, url: str, content, status: int, code: str):
    headers = {"content-type": "application/json"} if content is not None else {}
    answer = await api.client.request(method, url, content=content, headers=headers)
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["status"]) == (status, code, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-should-retry"] == "false"
    assert problem["type"] == f"urn:fastmtp:problem:{code}" and problem["title"] and problem["detail"]
    assert problem["instance"] == f"urn:fastmtp:request:{answer.headers['x-request-id']}"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_an_unexpected_error_shows_nothing_but_the_request(api: Api, caplog: pytest.LogCaptureFixture):
    api.preflight_error = ZeroDivisionError("a secret")
    answer = await api.client.post(JOBS, json=body(), headers={"x-request-id": "mine-1"})
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert answer.headers["x-request-id"] == "mine-1" and "x-should-retry" not in answer.headers
    assert "secret" not in answer.text and "mine-1" in answer.json()["detail"]
    assert "mine-1" in caplog.text


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_request_id_is_made_or_taken_over_if_it_is_fit_to_be_logged(api: Api):
    made = {(await api.client.get("/healthz")).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    given = await api.client.get("/healthz", headers={"x-request-id": "abc.1-2"})
    unfit = await api.client.get("/healthz", headers={"x-request-id": "a b" * 99})
    assert given.headers["x-request-id"] == "abc.1-2"
    assert unfit.headers["x-request-id"].startswith("req-")


async def test_jobs_come_newest_first_page_by_page_each_once(api: Api):
    made = [(await api.post_job(body()))["id"] for _ in range(7)]
    found, params = [], {"limit": 3}
    while True:
        page = (await api.client.get(JOBS, params=params)).json()
        found += [job["id"] for job in page["data"]]
        assert (page["object"], page["last_id"]) == ("list", found[-1])
        if not page["has_more"]:
            break
        params = {"limit": 3, "after": page["last_id"]}
    assert found == made[::-1] == sorted(made, reverse=True)


async def test_jobs_are_found_by_what_they_are(api: Api):
    one = await api.post_job(body(model="/models/a", metadata={"team": "search", "run": "1"}))
    two = await api.post_job(body(model="/models/b", metadata={"team": "search"}))
    await api.post_job(body(model="/models/b"))
    await api.client.post(f"{JOBS}/{one['id']}/cancel")
    await api.until(one["id"], lambda job: job["status"] == "cancelled")

    async def ids(**params: str) -> list[str]:
        return [job["id"] for job in (await api.client.get(JOBS, params=params)).json()["data"]]

    assert await ids(status="cancelled") == [one["id"]]
    assert len(await ids(model="/models/b")) == 2
    assert await ids(**{"metadata[team]": "search"}) == [two["id"], one["id"]]
    assert await ids(**{"metadata[team]": "search", "metadata[run]": "1"}) == [one["id"]]
    assert await ids(**{"metadata[no'; --]": "x"}) == await ids(schedule_id="ftsched-none") == []


async def test_events_come_in_both_orders_and_their_ids_are_cursors(api: Api):
    job_id, run_id = await api.started(body())
    for step in range(5):
        api.prefect.make_progress(job_id, run_id, "train", metrics={"loss": float(step), "lr": 0.1})
    await api.until(job_id, lambda job: job["stage"] == "train")
    path = f"{JOBS}/{job_id}/events"
    metrics = {"type": "metrics"}
    while len((await api.client.get(path, params=metrics)).json()["data"]) < 5:
        pass
    ascending = await api.events(job_id)
    assert ascending[0]["message"] == "Job created" and ascending[0]["object"] == "fine_tuning.job.event"
    newest = (await api.client.get(path, params={"limit": 100})).json()["data"]
    assert newest == ascending[::-1]
    page = (await api.client.get(path, params={"limit": 2})).json()
    rest = (await api.client.get(path, params={"limit": 100, "after": page["last_id"]})).json()
    assert page["data"] + rest["data"] == newest and page["has_more"] and not rest["has_more"]
    for wrong in ("ftevent-none-1", ascending[0]["id"] + "9", "x", "-1"):
        assert (await api.client.get(path, params={"after": wrong})).status_code == 400
    points = (await api.client.get(f"{JOBS}/{job_id}/metrics", params={"name": "loss"})).json()["data"]
    assert [point["values"] for point in points] == [{"loss": float(step)} for step in range(5)]
    assert (await api.client.get(f"{JOBS}/{job_id}/metrics", params={"stage": "evaluate"})).json()["data"] == []


async def test_readiness_names_the_part_that_is_missing(api: Api):
    await _until_ready(api)
    assert (await api.client.get("/healthz")).json() == {"status": "ok"}
    api.prefect.up = False
    answer = await api.client.get("/readyz")
    assert (answer.status_code, answer.json()["errors"]) == (
        503,
        [{"detail": "Prefect does not answer.", "part": "prefect"}],
    )
    assert "retry-after" in answer.headers
    api.prefect.up = True
    async with api.db.write() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = 'older'"))
    answer = await api.client.get("/readyz")
    assert answer.status_code == 503 and "python -m api migrate" in answer.json()["detail"]
    assert (await api.client.get("/healthz")).status_code == 200


async def _until_ready(api: Api) -> httpx.Response:
    while (answer := await api.client.get("/readyz")).status_code != 200:
        pass
    return answer


def test_the_openapi_document_is_the_one_that_is_checked_in():
    """After a change: python -m api openapi > api/openapi.json."""
    checked_in = json.loads((Path(__file__).parents[2] / "api" / "openapi.json").read_text())
    made = json.loads(json.dumps(create_app().openapi()))
    assert made == checked_in
    operations = [one["operationId"] for path in made["paths"].values() for one in path.values()]
    assert sorted(operations) == sorted(set(operations)) and "create_job" in operations
