"""Acceptance of one head as vLLM counts it: prompts answered, counters read before and after, figures with intervals.

vLLM's counters are the figures; what it reports per request gives their intervals, and must add up to the counters.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fastmtp.acceptance import measurement
from fastmtp.config import EvaluateConfig, SamplingConfig
from fastmtp.evaluation.intervals import Histograms, interval, paired
from fastmtp.evaluation.report import Acceptance, Estimate, Gain, Head
from fastmtp.progress import Reporter
from fastmtp.serving import Answer, Counters, Request, Server

_WARMUP_TOKENS = 16


@dataclass(frozen=True)
class Prompts:
    """One prompt set as token ids. `digest` is of them, in order."""

    name: str
    source: str
    ids: tuple[tuple[int, ...], ...]
    digest: str


@dataclass(frozen=True)
class Measured:
    """What one head did on one set at one temperature.

    Attributes:
        seconds: from the first request to the last answer.
        histograms: [n, K + 1] per answer, where the server gives them and they add up to its counters.
        warning: why there are none.
    """

    figures: Acceptance
    answers: list[Answer] = field(repr=False)
    seconds: float
    histograms: Histograms | None = field(repr=False)
    warning: str = ""


def warm_up(server: Server, prompts: Prompts, config: EvaluateConfig) -> None:
    """Answer the first prompts shortly, uncounted: the first requests find caches and kernels unprepared."""
    requests = [Request(ids, min(config.max_tokens, _WARMUP_TOKENS)) for ids in prompts.ids[: config.warmup]]
    if requests:
        server.generate(requests, SamplingConfig(), config.concurrency)


def ask(
    server: Server, prompts: Prompts, temperature: float, config: EvaluateConfig, reporter: Reporter
) -> tuple[list[Answer], float]:
    """Answer a prompt set. The seed of a request is its place: the same for every head.

    Returns:
        The answers in the order of the prompts, and the seconds they took.
    """
    requests = [Request(ids, config.max_tokens, seed=place) for place, ids in enumerate(prompts.ids)]
    done = 0

    def count(_place: int, _answer: Answer) -> None:
        nonlocal done
        done += 1
        reporter.advance(done)

    begun = time.monotonic()
    answers = server.generate(requests, SamplingConfig(temperature=temperature), config.concurrency, count)
    return answers, time.monotonic() - begun


def measure(
    head: Head,
    server: Server,
    number: int,
    prompts: Prompts,
    temperature: float,
    num_speculative_tokens: int,
    config: EvaluateConfig,
    confidence: float,
    reporter: Reporter,
) -> Measured:
    """Answer a prompt set with a head drafting, and count.

    Args:
        number: of the server in the report.

    Raises:
        ServingError: the server refused a request, died, or does not speculate.
    """
    before = server.counters()
    answers, seconds = ask(server, prompts, temperature, config, reporter)
    found = _histograms(answers, num_speculative_tokens)
    counted = server.settled(before.drafts + (int(found.sum()) if found is not None else 0)).since(before)
    warning = _disagreement(head, prompts.name, found, counted)
    if warning:
        found = None
    bounds = interval(found, confidence) if found is not None and counted.drafts else None
    plain = measurement(counted.drafts, counted.accepted)
    figures = Acceptance(
        head=head, set=prompts.name, temperature=temperature, num_speculative_tokens=num_speculative_tokens,
        draft_sampling=config.draft_sampling, max_tokens=config.max_tokens, concurrency=config.concurrency,
        dtype=config.dtype, prefix_caching=config.prefix_caching, vllm=server.effective.version or server.version(),
        digest=prompts.digest, drafts=counted.drafts, accepted=list(counted.accepted),
        rates=bounds.rates if bounds else [Estimate(value=rate) for rate in plain.acceptance],
        mean_acceptance_length=bounds.length if bounds else Estimate(value=plain.mean_acceptance_length),
        answers=len(answers), answer_tokens=sum(len(answer.token_ids) for answer in answers), seconds=seconds,
        per_request=found is not None, server=number,
    )  # fmt: skip
    return Measured(figures, answers, seconds, found, warning)


def gain(after: Measured, before: Measured, confidence: float) -> Gain:
    """How much longer drafts are accepted; with an interval where both have figures per request."""
    one, other = after.figures, before.figures
    if after.histograms is not None and before.histograms is not None:
        found = paired(after.histograms, before.histograms, confidence)
        length, rates, pairs = found.length, found.rates, len(after.histograms)
    else:
        length = Estimate(value=one.mean_acceptance_length.value - other.mean_acceptance_length.value)
        rates = [Estimate(value=a.value - b.value) for a, b in zip(one.rates, other.rates, strict=True)]
        pairs = 0
    return Gain(
        head=one.head, over=other.head, set=one.set, temperature=one.temperature,
        num_speculative_tokens=one.num_speculative_tokens, mean_acceptance_length=length, rates=rates, paired=pairs,
    )  # fmt: skip


def _histograms(answers: Sequence[Answer], num_speculative_tokens: int) -> Histograms | None:
    """[n, K + 1], or None where the server reports none. An answer of one token has no draft and may have no report."""
    if all(answer.histogram is None for answer in answers):
        return None
    nothing = (0,) * (num_speculative_tokens + 1)
    return np.array([answer.histogram or nothing for answer in answers], dtype=np.int64)


def _disagreement(head: str, name: str, found: Histograms | None, counted: Counters) -> str:
    """Why there is nothing to take intervals from; empty where there is."""
    if found is None:
        return f"vLLM gave no figures per request for {head} on {name}: there are no intervals."
    reached = np.flip(np.cumsum(np.flip(found.sum(0))))
    summed = Counters(int(reached[0]), tuple(int(count) for count in reached[1:]))
    if summed == counted:
        return ""
    return (
        f"vLLM's figures per request for {head} on {name} add up to {summed.drafts} drafts, accepted"
        f" {list(summed.accepted)}; its counters say {counted.drafts} and {list(counted.accepted)}: there are no"
        " intervals. Somebody else may be asking this server."
    )
