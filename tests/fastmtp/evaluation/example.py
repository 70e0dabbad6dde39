"""A report with something in every part, made up: for what is made of reports."""

from __future__ import annotations

from fastmtp.evaluation.report import (
    Acceptance,
    Arm,
    Estimate,
    EvaluationReport,
    FirstDifference,
    Gain,
    Gate,
    Head,
    Losslessness,
    PromptSet,
    Reason,
    Reference,
    ReferenceWalk,
    ServerRun,
    SpeedReport,
    SpeedRun,
    Sweep,
    Timings,
)
from fastmtp.evaluation.speed import figures, speedups
from fastmtp.protocol import Measurement

RATES = {"base": [0.651, 0.427, 0.230], "tuned": [0.862, 0.747, 0.645]}


def around(value: float, by: float = 0.02) -> Estimate:
    return Estimate(value=value, low=value - by, high=value + by)


def acceptance(head: Head, name: str = "gsm8k", temperature: float = 0.0) -> Acceptance:
    rates = RATES[head]
    return Acceptance(
        head=head, set=name, temperature=temperature, num_speculative_tokens=3, draft_sampling="greedy",
        max_tokens=192, concurrency=64, dtype="bfloat16", prefix_caching=False, vllm="0.32.0", digest="d" * 64,
        drafts=5235, accepted=[int(rate * 5235) for rate in rates], rates=[around(rate) for rate in rates],
        mean_acceptance_length=around(1 + sum(rates), 0.05), answers=96, answer_tokens=12000, seconds=40.0,
        per_request=True, server=0,
    )  # fmt: skip


def gain(name: str = "gsm8k") -> Gain:
    rates = [after - before for before, after in zip(RATES["base"], RATES["tuned"], strict=True)]
    return Gain(
        head="tuned", over="base", set=name, temperature=0.0, num_speculative_tokens=3,
        mean_acceptance_length=around(sum(rates), 0.04), rates=[around(rate) for rate in rates], paired=96,
    )  # fmt: skip


def walk(head: Head) -> ReferenceWalk:
    rates = RATES[head]
    found = Measurement(acceptance=rates, mean_acceptance_length=1 + sum(rates), drafts=5235)
    return ReferenceWalk(
        head=head, set="gsm8k", num_speculative_tokens=3, walked=found, counted=found, apart=[0.0] * 3,
        lengths={k: 1 + sum(rates[:k]) + max(0, k - 3) * 0.2 for k in range(1, 6)},
    )  # fmt: skip


def speed() -> SpeedReport:
    base: dict[Arm, float] = {"none": 100.0, "base": 130.0, "tuned": 160.0}
    runs = [
        SpeedRun(
            arm=arm, concurrency=concurrency, round=number, output_tokens=4000, seconds=9.0,
            output_tokens_per_second=rate * concurrency**0.6 + number, itl_median_ms=9.0, itl_p95_ms=14.0,
            ttft_median_ms=30.0, ttft_p95_ms=55.0, tpot_median_ms=6.0,
        )
        for arm, rate in base.items() for concurrency in (1, 8, 32) for number in range(3)
    ]  # fmt: skip
    return SpeedReport(
        set="gsm8k", prompts=64, max_tokens=192, temperature=0.0, num_speculative_tokens=3, rounds=3, mode="together",
        client=["vllm", "bench", "serve"], figures=figures(runs), speedups=speedups(runs), runs=runs, seconds=120.0,
    )  # fmt: skip


def report() -> EvaluationReport:
    """Everything there, and passed."""
    return EvaluationReport(
        model="/models/Qwen3-Next-80B-A3B-Instruct", heads={"base": "a" * 64, "tuned": "b" * 64},
        sets={"gsm8k": PromptSet(source="hf:openai/gsm8k:main:test", digest="d" * 64, prompts=96, prompt_tokens=9000)},
        confidence=0.95, vllm="0.32.0", fastmtp="0.1", hardware="2 CPU cores", created="2026-11-30T23:00:00+00:00",
        servers=[ServerRun(head="base", num_speculative_tokens=3, method="mtp", vllm="0.32.0", start_seconds=41.0,
                           command=["vllm", "serve"])],
        acceptance=[acceptance("base"), acceptance("tuned")], gains=[gain()],
        sweeps=[Sweep(head="tuned", set="gsm8k", temperature=0.0, lengths={1: 1.862, 3: 3.254, 5: 3.9}, best=3,
                      reason="most tokens per byte of weights read")],
        lossless=[Losslessness(head="tuned", set="gsm8k", prompts=96, identical=95, ties=1, tie_margin=0.25,
                               differences=[FirstDifference(prompt=7, position=31, plain=5, speculative=9, margin=0.06,
                                                            tie=True)])],
        reference=Reference(walks=[walk("base"), walk("tuned")], seconds=8.0), speed=speed(),
        gate=Gate(passed=True, verdict="passed", reason="The gain of 0.946 (0.906 to 0.986) reaches 0.02.",
                  reasons=[Reason(passed=True, text="The gain of 0.946 (0.906 to 0.986) reaches 0.02.", set="gsm8k",
                                  over="base")]),
        warnings=["<b>A warning</b> of no account."],
        timings=Timings(total=300.0, starts=120.0, answers=90.0, lossless=40.0, reference=8.0, speed=30.0, rest=12.0),
    )  # fmt: skip
