"""What is shown of a job, without a server."""

from __future__ import annotations

import json
import math
import time
from uuid import uuid4

import httpx
import pytest
from prefect.logging import disable_run_logger

from fastmtp.protocol import Progress
from flows import reporting
from flows.reporting import JobReporter, LiveArtifact, Thinned, acceptance_markdown, retrying

BASE = {"acceptance": [0.8, 0.4], "mean_acceptance_length": 2.2, "drafts": 1000}
TUNED = {"acceptance": [0.79, 0.6], "mean_acceptance_length": 2.39, "drafts": 900}


def test_acceptance_is_shown_with_its_gain_its_gate_and_what_was_published_before():
    summary = {
        "base": BASE,
        "tuned": TUNED,
        "incumbent": {"acceptance": [0.8, 0.5], "mean_acceptance_length": 2.3, "drafts": 950},
        "greedy_identical": [199, 200],
        "gate": {"passed": True, "reason": "gain 0.19"},
    }
    text = acceptance_markdown(summary)
    assert "| gain | -0.010 | +0.200 | +0.190 |" in text
    assert "| incumbent | 0.800 | 0.500 | 2.300 | 950 |" in text
    assert "Greedy answers identical: 199 of 200." in text
    assert "Gate: passed, gain 0.19." in text


def test_sampled_answers_are_not_compared():
    gate = {"passed": False, "reason": "no better"}
    text = acceptance_markdown({"base": BASE, "tuned": TUNED, "greedy_identical": None, "gate": gate})
    assert "identical" not in text
    assert "Gate: not passed, no better." in text


@pytest.mark.parametrize("count", [1, 99, 100, 101, 5000])
def test_a_thinned_series_keeps_its_first_row_its_order_and_its_span(count):
    series = Thinned(100)
    for step in range(count):
        series.add({"step": float(step)})
    steps = [float(row["step"]) for row in series.rows]
    assert len(steps) <= 100
    assert steps[0] == 0
    assert steps == sorted(set(steps))
    assert steps[-1] >= count * 0.9 - 1


def test_events_are_throttled_except_those_that_say_something(monkeypatch):
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(reporting, "emit_event", lambda **fields: sent.append(fields))
    monkeypatch.setattr(LiveArtifact, "show", lambda *args, **kwargs: None)
    reporter = JobReporter("Job_1", uuid4(), "/models/tiny")
    reporter.on_progress(_record("started"))
    for done in range(50):
        reporter.on_progress(_record("running", done=done))
    reporter.on_progress(_record("running", metrics={"loss": 2.0}))
    reporter.on_progress(_record("finished"))
    payloads = [fields["payload"] for fields in sent]
    assert [payload["status"] for payload in payloads] == ["started", "running", "finished"]
    assert sent[0]["resource"] == {"prefect.resource.id": "fastmtp.job.Job_1"}
    assert {"prefect.resource.id": "prefect.tag.job:Job_1", "prefect.resource.role": "tag"} in sent[0]["related"]


def test_the_evaluations_own_tables_are_shown_where_there_are_some(monkeypatch, tmp_path):
    shown: list[str] = []
    monkeypatch.setattr(LiveArtifact, "show", lambda _self, data, **_: shown.append(data))
    summary = {"base": BASE, "tuned": TUNED, "gate": {"passed": True, "reason": "better"}}
    reporter = JobReporter("job-1", uuid4(), "tiny")
    reporter.show_acceptance(summary, tmp_path / "acceptance.md")
    (tmp_path / "acceptance.md").write_text("### Acceptance on traffic")
    reporter.show_acceptance(summary, tmp_path / "acceptance.md")
    assert shown == [acceptance_markdown(summary), "### Acceptance on traffic"]


def test_a_loss_that_became_nan_survives_the_way_to_the_service(monkeypatch):
    sent: list[dict[str, object]] = []
    monkeypatch.setattr(reporting, "emit_event", lambda **fields: sent.append(fields))
    monkeypatch.setattr(LiveArtifact, "show", lambda *args, **kwargs: None)
    record = Progress.model_validate_json(_record("running", metrics={"loss": math.nan}).model_dump_json())
    JobReporter("job-1", uuid4(), "tiny").on_progress(record)
    over_the_wire = json.loads(json.dumps(sent[0]["payload"], allow_nan=False))
    assert math.isnan(Progress.model_validate(over_the_wire).metrics["loss"])


def test_a_server_that_does_not_answer_costs_a_warning_and_a_pause(monkeypatch):
    calls: list[float] = []

    def refuse(**_: object) -> None:
        calls.append(time.monotonic())
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(reporting, "get_client", refuse)
    artifact = LiveArtifact("progress", uuid4())
    with disable_run_logger():
        artifact.show(1.0)
        artifact.show(2.0)
    assert len(calls) == 1


def test_the_report_is_offered_again_and_its_last_refusal_is_raised():
    calls: list[int] = []

    def refuse() -> None:
        calls.append(1)
        raise httpx.ReadTimeout("no answer")

    with disable_run_logger(), pytest.raises(httpx.ReadTimeout):
        retrying(refuse, attempts=3, first_wait=0.01)
    assert len(calls) == 3


def _record(status: str, *, done: float = 0, metrics: dict[str, float] | None = None) -> Progress:
    return Progress.model_validate(
        {"time": time.time(), "stage": "train", "status": status, "done": done, "total": 50, "metrics": metrics or {}}
    )
