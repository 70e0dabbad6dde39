"""The result of an evaluation: `report.json`, field by field, and how it is written beside the pages made of it.

Every figure says what it was taken with, so that two that were taken differently are not compared by accident. The JSON
schema is `EvaluationReport.model_json_schema()`. Loads no torch; computes nothing: who measures is `fastmtp.evaluate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from fastmtp.protocol import Measurement

REPORT = "report.json"
TABLE = "acceptance.md"
PLOT = "acceptance.png"
PAGE = "report.html"
SCHEMA_VERSION = 1

Head = Literal["base", "tuned", "incumbent"]
Arm = Literal["none", "base", "tuned"]
Verdict = Literal[
    "passed",
    "head not loaded or useless",
    "inconclusive",
    "not lossless",
    "no gain",
    "a position fell",
]


class Record(BaseModel):
    """A part of the report. An unknown field is an error: a reader must not miss what it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Estimate(Record):
    """A figure and, where it was estimated, the interval around it (of the report's `confidence`)."""

    value: float
    low: float | None = Field(None, description="Lower bound, in the unit of the value.")
    high: float | None = Field(None, description="Upper bound.")


class PromptSet(Record):
    """One set of prompts, the same for every head."""

    source: str = Field(description="Where they were read, as the job names it.")
    digest: str = Field(description="SHA-256 over the prompts' token ids, in order.")
    prompts: int = Field(description="How many were asked and counted.")
    prompt_tokens: int = Field(description="Tokens of all of them.")
    warmup: int = Field(0, description="Asked before these, and not counted.")


class ServerRun(Record):
    """One start of vLLM, or one connection to a server that ran already."""

    head: Arm | Head = Field(description="`none`: without speculation.")
    num_speculative_tokens: int = Field(description="Draft tokens per step, K, as read back; 0 without speculation.")
    method: str | None = Field(None, description="Speculative method as read back from the server; none: unknown.")
    vllm: str = Field(description="vLLM's version, from the server.")
    command: list[str] = Field(default_factory=list, description="Its command line; empty for one that ran already.")
    url: str = Field("", description="For one that ran already.")
    start_seconds: float = Field(0.0, description="From its start until it answered.")
    log: str = Field("", description="Its log, relative to the directory of the logs.")


class Acceptance(Record):
    """What vLLM counted for one head, one set, one temperature and one K."""

    head: Head
    set: str
    temperature: float
    num_speculative_tokens: int = Field(description="K.")
    draft_sampling: Literal["greedy", "probabilistic"]
    max_tokens: int = Field(description="Longest answer, tokens.")
    concurrency: int = Field(description="Requests in flight at once.")
    dtype: str = Field(description="vLLM's --dtype.")
    prefix_caching: bool
    vllm: str = Field(description="vLLM's version.")
    digest: str = Field(description="Of the prompts' token ids; as in `sets`.")
    drafts: int = Field(description="Drafts that were verified.")
    accepted: list[int] = Field(description="Accepted draft tokens at each position, 0 to K-1, out of `drafts`.")
    rates: list[Estimate] = Field(description="accepted / drafts at each position; cumulative, so never increasing.")
    mean_acceptance_length: Estimate = Field(description="Tokens per verification: 1 + sum of the rates.")
    answers: int = Field(description="Answers counted.")
    answer_tokens: int = Field(description="Tokens of these.")
    seconds: float = Field(description="From the first request to the last answer.")
    per_request: bool = Field(description="Whether vLLM gave figures per request, which intervals need.")
    server: int = Field(description="Index into `servers`.")

    def measurement(self) -> Measurement:
        """As the stage's manifest and the job's report carry it."""
        rates = [rate.value for rate in self.rates]
        length = self.mean_acceptance_length.value
        return Measurement(acceptance=rates, mean_acceptance_length=length, drafts=self.drafts)


class Gain(Record):
    """How much better `head` is than `over`, pairwise over the same prompts."""

    head: Head
    over: Head
    set: str
    temperature: float
    num_speculative_tokens: int
    mean_acceptance_length: Estimate = Field(description="Difference of the lengths, tokens per verification.")
    rates: list[Estimate] = Field(description="Difference of the rates at each position.")
    paired: int = Field(description="Prompts that were drawn in pairs; 0 where there are no figures per request.")


class Sweep(Record):
    """What K does for one head and set at one temperature, and which serves it best."""

    head: Head
    set: str
    temperature: float
    lengths: dict[int, float] = Field(description="K -> mean acceptance length under vLLM.")
    walked: dict[int, float] = Field(default_factory=dict, description="K -> mean acceptance length by the walk.")
    best: int = Field(description="The K to serve with.")
    reason: str = Field(description="By what measure it is best, in a sentence.")


class FirstDifference(Record):
    """Where a greedy answer with speculation first parts from the one without."""

    prompt: int = Field(description="Place of the prompt in its set, from 0.")
    position: int = Field(description="Token of the answer, from 0.")
    plain: int | None = Field(description="Token id without speculation; none: that answer ended here.")
    speculative: int | None = Field(description="Token id with speculation; none: that answer ended here.")
    margin: float | None = Field(description="Difference of the two tokens' logits, nats; none: not known.")
    tie: bool = Field(description="The margin is within rounding of the dtype: either token is right.")


class Losslessness(Record):
    """Greedy answers of one head and set compared, token for token, with those of vLLM without speculation."""

    head: Head
    set: str
    prompts: int = Field(description="Answers compared.")
    identical: int = Field(description="Of these, the same to the last token.")
    ties: int = Field(description="Of the others, those that part at a numerical tie.")
    tie_margin: float = Field(description="Largest margin that counts as a tie, nats.")
    differences: list[FirstDifference] = Field(description="Of each answer that differs, the worst first.")

    @property
    def errors(self) -> int:
        """Answers that differ by more than a tie."""
        return self.prompts - self.identical - self.ties


class SpeedRun(Record):
    """One measurement by vLLM's bench client: one server, one concurrency, one round."""

    arm: Arm = Field(description="`none`: without speculation; `base`, `tuned`: with that head drafting.")
    concurrency: int = Field(description="Requests in flight at once.")
    round: int = Field(description="From 0.")
    output_tokens: int = Field(description="Tokens of all answers.")
    seconds: float = Field(description="From the first request to the last answer.")
    output_tokens_per_second: float
    itl_median_ms: float = Field(description="Between pieces of an answer as they arrive, milliseconds.")
    itl_p95_ms: float
    ttft_median_ms: float = Field(description="From request to first piece, milliseconds.")
    ttft_p95_ms: float
    tpot_median_ms: float = Field(description="Per output token after the first, milliseconds.")


class SpeedFigure(Record):
    """One server at one concurrency: medians over the rounds; bounds are the least and the greatest round."""

    arm: Arm
    concurrency: int
    output_tokens_per_second: Estimate
    itl_median_ms: Estimate
    itl_p95_ms: Estimate
    ttft_median_ms: Estimate
    ttft_p95_ms: Estimate
    tpot_median_ms: Estimate


class SpeedUp(Record):
    """Output tokens per second of `arm` over those of `over` in the same round: median, least and greatest round."""

    arm: Arm
    over: Arm
    concurrency: int
    ratio: Estimate


class SpeedReport(Record):
    """Speed without speculation, with the head as it came, and with the tuned one."""

    set: str = Field(description="Which prompts.")
    prompts: int = Field(description="Requests of one measurement.")
    max_tokens: int
    temperature: float
    num_speculative_tokens: int
    rounds: int
    mode: Literal["together", "in turn"] = Field(
        description="together: all servers up, one asked at a time. in turn: each started for itself in every round."
    )
    client: list[str] = Field(description="Command line of vLLM's bench client, the last one run.")
    figures: list[SpeedFigure]
    speedups: list[SpeedUp]
    runs: list[SpeedRun]
    seconds: float = Field(description="All of it, starts of servers included where they are started in turn.")


class ReferenceWalk(Record):
    """One head and set at temperature 0 without vLLM's drafter: the walk over its answers, beside vLLM's counters."""

    head: Head
    set: str
    num_speculative_tokens: int
    walked: Measurement = Field(description="By the walk; states of a forward pass in transformers.")
    counted: Measurement | None = Field(None, description="By vLLM, over the same answers; none where it did not run.")
    apart: list[float] = Field(default_factory=list, description="walked - counted, rate at each position.")
    alarm: bool = Field(False, description="They part by more than `tolerance` at a position.")
    lengths: dict[int, float] = Field(default_factory=dict, description="K -> mean acceptance length by the walk.")


class Reference(Record):
    """The cross-check without vLLM."""

    tolerance: float = Field(0.02, description="Largest difference of a rate that raises no alarm.")
    walks: list[ReferenceWalk]
    seconds: float = Field(description="Forward pass, heads and walks; loading the verifier included.")

    @property
    def alarm(self) -> bool:
        """Whether any walk parts from vLLM."""
        return any(walk.alarm for walk in self.walks)


class Reason(Record):
    """One thing that the gate looked at."""

    passed: bool
    text: str = Field(description="A sentence with the figures.")
    set: str | None = None
    over: Head | None = None


class Gate(Record):
    """Whether the result may be published, and why."""

    passed: bool
    verdict: Verdict
    reason: str = Field(description="The decisive one, in a sentence.")
    reasons: list[Reason] = Field(default_factory=list, description="All that was looked at.")


class Timings(Record):
    """Where the time went, seconds."""

    total: float
    starts: float = Field(description="Starts of vLLM.")
    answers: float = Field(description="Answers that are counted, and warm-up.")
    lossless: float = Field(0.0, description="Answers without speculation, and comparing them.")
    reference: float = 0.0
    speed: float = 0.0
    rest: float = Field(0.0, description="Everything else: overhead.")


class EvaluationReport(Record):
    """The evaluation's `report.json`."""

    schema_version: Literal[1] = 1
    model: str = Field(description="Path of the verifier as it came.")
    heads: dict[Head, str] = Field(description="Head -> digest of its checkpoint.")
    sets: dict[str, PromptSet]
    confidence: float = Field(description="Of every interval, 0 to 1 (bootstrap over prompts).")
    seed: int = Field(0, description="Of sampling and of the bootstrap.")
    vllm: str = Field(description="vLLM's version.")
    fastmtp: str = Field(description="Version of this package.")
    torch: str = Field("", description="torch that the reference ran with.")
    hardware: str = Field("", description="What the servers ran on, for people.")
    created: str = Field(description="UTC, ISO 8601.")
    servers: list[ServerRun]
    acceptance: list[Acceptance] = Field(description="The figures that the gate decides on first.")
    gains: list[Gain]
    sweeps: list[Sweep] = Field(default_factory=list)
    lossless: list[Losslessness] = Field(default_factory=list)
    reference: Reference | None = None
    speed: SpeedReport | None = None
    gate: Gate
    warnings: list[str] = Field(default_factory=list, description="Sentences for people, such as a reference's alarm.")
    timings: Timings

    def first(self, head: Head) -> Acceptance | None:
        """The first figures of a head: those of the first set at the first temperature with the job's own K."""
        return next((found for found in self.acceptance if found.head == head), None)


def write(directory: Path, report: EvaluationReport) -> None:
    """Write report.json, acceptance.md, acceptance.png and report.html into an existing directory."""
    from fastmtp.evaluation.pages import write as write_pages

    text = report.model_dump_json(indent=1) + "\n"
    (directory / REPORT).write_text(text, encoding="utf-8")
    write_pages(directory, report)
