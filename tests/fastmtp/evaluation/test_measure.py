"""Measuring on a server of our own making: what is counted, what is not, and figures that do not add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fastmtp.config import EvaluateConfig, SamplingConfig
from fastmtp.evaluation.measure import Measured, Prompts, gain, measure, warm_up
from fastmtp.progress import Reporter
from fastmtp.servers.logs import Effective
from fastmtp.serving import Answer, Counters, Request, Server

PROMPTS = Prompts("prompts", "file", tuple((place, 1) for place in range(12)), "d")
CONFIG = EvaluateConfig(prompts="file", num_speculative_tokens=2, max_tokens=40, warmup=3, concurrency=4)


class Fake(Server):
    """Answers with histograms that go by the prompt; counts as vLLM does, and what else `extra` says."""

    def __init__(self, better: int = 0, reports: bool = True, extra: int = 0) -> None:
        super().__init__("http://fake", "m", effective=Effective("0.32.0", "mtp", 2, False))
        self.__dict__.update(better=better, reports=reports, extra=extra, drafts=7, accepted=[5, 2], asked=[])

    def counters(self) -> Counters:
        found: dict[str, Any] = self.__dict__
        return Counters(found["drafts"], tuple(found["accepted"]))

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        concurrency: int,
        on_answer: Callable[[int, Answer], None] = lambda _place, _answer: None,
    ) -> list[Answer]:
        state: dict[str, Any] = self.__dict__
        state["asked"].append((len(requests), sampling.temperature, concurrency, requests[-1].max_tokens))
        answers = []
        for place, request in enumerate(requests):
            easy = request.prompt[0] % 3
            histogram = (4 - easy, 3, 2 + easy + state["better"])
            state["drafts"] += sum(histogram) + state["extra"]
            state["accepted"][0] += histogram[1] + histogram[2]
            state["accepted"][1] += histogram[2]
            answers.append(Answer((1,) * 20, "length", histogram if state["reports"] else None))
            on_answer(place, answers[-1])
        return answers


def measured(server: Fake, head: Any = "base", temperature: float = 0.0) -> Measured:  # noqa: ANN401 - a literal
    reporter = Reporter("evaluate", quiet=True)
    return measure(head, server, 1, PROMPTS, temperature, 2, CONFIG, 0.95, reporter)


def test_figures_are_differences_of_the_counters() -> None:
    found = measured(Fake(), temperature=1.0)
    figures = found.figures
    # Per three prompts: 4 + 3 + 2, 3 + 3 + 3, 2 + 3 + 4.
    assert figures.drafts == 4 * 27 and figures.accepted == [4 * (9 + 9), 4 * 9]
    assert [rate.value for rate in figures.rates] == pytest.approx([18 / 27, 9 / 27])
    assert figures.mean_acceptance_length.value == pytest.approx(2.0)
    low, high = figures.mean_acceptance_length.low, figures.mean_acceptance_length.high
    assert low is not None and high is not None and low < 2.0 < high
    assert (figures.answers, figures.answer_tokens, figures.server, figures.temperature) == (12, 240, 1, 1.0)
    assert figures.per_request and found.warning == "" and figures.vllm == "0.32.0"


def test_the_warm_up_is_short_and_not_counted() -> None:
    server = Fake()
    warm_up(server, PROMPTS, CONFIG)
    assert server.__dict__["asked"] == [(3, 0.0, 4, 16)]
    assert measured(server).figures.drafts == 4 * 27
    warm_up(server, PROMPTS, CONFIG.model_copy(update={"warmup": 0}))
    assert len(server.__dict__["asked"]) == 2


def test_a_server_without_figures_per_request_has_no_intervals() -> None:
    found = measured(Fake(reports=False))
    assert found.figures.drafts == 4 * 27 and found.figures.rates[0].low is None and not found.figures.per_request
    assert found.warning == "vLLM gave no figures per request for base on prompts: there are no intervals."
    one = gain(measured(Fake(better=1), "tuned"), found, 0.95)
    assert one.paired == 0 and one.mean_acceptance_length.low is None
    assert one.mean_acceptance_length.value == pytest.approx(0.1)


def test_figures_per_request_that_do_not_add_up_are_said_and_not_used() -> None:
    found = measured(Fake(extra=1))
    assert found.figures.drafts == 4 * 27 + 12 and found.histograms is None
    assert "add up to 108 drafts, accepted [72, 36]; its counters say 120" in found.warning


def test_a_gain_is_paired_by_prompt() -> None:
    one = gain(measured(Fake(better=1), "tuned"), measured(Fake()), 0.95)
    assert (one.head, one.over, one.paired) == ("tuned", "base", 12)
    # One more whole draft accepted per prompt: (9 * 2 + 3) / 10 against 2.
    assert one.mean_acceptance_length.value == pytest.approx(0.1)
    assert one.mean_acceptance_length.low is not None and one.mean_acceptance_length.low > 0
    assert [rate.value > 0 for rate in one.rates] == [True, True]
