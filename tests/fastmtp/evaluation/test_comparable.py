"""Case V3: figures that were taken differently are refused, and the fields are named."""

from __future__ import annotations

import pytest

from fastmtp.errors import InputError
from fastmtp.evaluation.comparable import MUST_AGREE, differences, require_comparable
from tests.fastmtp.evaluation.figures import acceptance

OTHER = {
    "set": "traffic", "digest": "e", "num_speculative_tokens": 1, "temperature": 1.0, "draft_sampling": "probabilistic",
    "max_tokens": 97, "dtype": "float16", "prefix_caching": True, "vllm": "0.33.0",
}  # fmt: skip


def test_the_same_conditions_compare() -> None:
    one, other = acceptance("base", [0.7, 0.5]), acceptance("tuned", [0.8, 0.6], drafts=4000, seconds=3.0)
    assert differences(one, other) == []
    require_comparable(one, other)


@pytest.mark.parametrize("field", MUST_AGREE)
def test_each_condition_keeps_figures_apart(field: str) -> None:
    one, other = acceptance("base", [0.7, 0.5]), acceptance("tuned", [0.8, 0.6], **{field: OTHER[field]})  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        require_comparable(one, other)
    assert MUST_AGREE[field] in str(caught.value) and str(OTHER[field]) in str(caught.value)
    assert "Measure both in one evaluation." in str(caught.value)


def test_every_difference_is_named() -> None:
    one, other = acceptance("base", [0.7]), acceptance("tuned", [0.8], temperature=1.0, vllm="0.33.0")
    with pytest.raises(
        InputError, match=r"temperature \(0\.0 against 1\.0\), vLLM's version \(0\.32\.0 against 0\.33\.0\)"
    ):
        require_comparable(one, other)
