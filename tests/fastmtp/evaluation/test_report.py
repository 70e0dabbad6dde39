"""The schema of report.json, which others read: a field that goes or comes is a change of version, not an accident."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fastmtp.evaluation.report import Acceptance, EvaluationReport
from tests.fastmtp.evaluation import example

FIELDS = {
    "schema_version", "model", "heads", "sets", "confidence", "seed", "vllm", "fastmtp", "torch", "hardware", "created",
    "servers", "acceptance", "gains", "sweeps", "lossless", "reference", "speed", "gate", "warnings", "timings",
}  # fmt: skip
# Case V3: figures taken with any of these different must not be compared, so none may be missing.
CONDITIONS = {
    "set", "temperature", "num_speculative_tokens", "draft_sampling", "max_tokens", "dtype", "prefix_caching", "vllm",
    "digest", "drafts",
}  # fmt: skip


def test_the_schema_is_frozen() -> None:
    schema = EvaluationReport.model_json_schema()
    assert set(schema["properties"]) == FIELDS
    assert schema["properties"]["schema_version"]["const"] == 1
    assert not schema["additionalProperties"]


def test_a_figure_says_what_it_was_taken_with() -> None:
    assert set(Acceptance.model_json_schema()["required"]) >= CONDITIONS
    whole = example.acceptance("base").model_dump()
    for name in CONDITIONS:
        with pytest.raises(ValidationError, match=name):
            Acceptance.model_validate({key: value for key, value in whole.items() if key != name})


def test_an_unknown_field_is_refused() -> None:
    whole = example.report().model_dump(mode="json") | {"verdict": "passed"}
    with pytest.raises(ValidationError, match="verdict"):
        EvaluationReport.model_validate(whole)
