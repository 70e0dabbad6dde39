"""The figures of an evaluation as tables, for the Markdown file and the page: the same cells in both.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastmtp.evaluation.report import Acceptance, Estimate, EvaluationReport, Gain


class Cell(NamedTuple):
    """A value, and what stands in small type below it."""

    value: str
    more: str = ""


@dataclass(frozen=True)
class Table:
    """A title, a header and rows of cells; `text` are the columns that hold words."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    text: frozenset[int] = field(default_factory=lambda: frozenset({0}))

    def markdown(self) -> str:
        """As a Markdown table below its title."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        body = [line([f"{cell.value} ({cell.more})" if cell.more else cell.value for cell in row]) for row in self.rows]
        head = [line(self.header), line(["---"] * len(self.header))]
        return "\n".join([f"### {self.title}", "", *([self.note, ""] if self.note else []), *head, *body])


def tables(report: EvaluationReport) -> list[Table]:
    """All that the report has something for, what decides first."""
    found = [*_acceptance(report), _gate(report), *_sweep(report), *_speed(report), *_lossless(report)]
    return [*found, *_reference(report)]


def estimate(found: Estimate, *, signed: bool = False, digits: int = 3) -> Cell:
    """A figure above its interval."""
    sign = "+" if signed else ""
    shown = f"{found.value:{sign}.{digits}f}"
    if found.low is None or found.high is None:
        return Cell(shown)
    return Cell(shown, f"{found.low:{sign}.{digits}f} to {found.high:{sign}.{digits}f}")


def _acceptance(report: EvaluationReport) -> Iterator[Table]:
    groups: dict[tuple[str, float, int], list[Acceptance]] = {}
    for found in report.acceptance:
        groups.setdefault((found.set, found.temperature, found.num_speculative_tokens), []).append(found)
    for (name, temperature, k), found_of in groups.items():
        header = ["head", *(f"position {place}" for place in range(k)), "mean acceptance length", "drafts"]
        rows = [
            [Cell(one.head), *map(estimate, one.rates), estimate(one.mean_acceptance_length), Cell(f"{one.drafts:,}")]
            for one in found_of
        ]
        rows += [
            [Cell(f"gain over {gain.over}"), *(estimate(rate, signed=True) for rate in gain.rates),
             estimate(gain.mean_acceptance_length, signed=True), Cell("")]
            for gain in report.gains
            if (gain.set, gain.temperature, gain.num_speculative_tokens) == (name, temperature, k)
        ]  # fmt: skip
        prompts = report.sets[name].prompts
        title = f"Acceptance on {name}: {prompts} prompts, temperature {temperature:g}, K={k}"
        yield Table(title, header, rows, _conditions(found_of[0]))


def _conditions(one: Acceptance) -> str:
    """What figures that are to be compared with these must have been taken with, besides what the title says."""
    caching = "on" if one.prefix_caching else "off"
    return (
        f"vLLM {one.vllm}, {one.dtype}, draft sampling {one.draft_sampling}, prefix caching {caching}, answers of up to"
        f" {one.max_tokens} tokens, {one.concurrency} requests at once; prompts {one.digest[:12]}."
    )


def _gate(report: EvaluationReport) -> Table:
    rows = [
        [Cell("yes" if reason.passed else "NO"), Cell(reason.set or ""), Cell(reason.text)]
        for reason in report.gate.reasons
    ]
    return Table("What the gate looked at", ["holds", "set", "reason"], rows, text=frozenset({0, 1, 2}))


def _sweep(report: EvaluationReport) -> Iterator[Table]:
    if not report.sweeps:
        return
    ks = sorted({k for sweep in report.sweeps for k in sweep.lengths})
    rows = []
    for sweep in report.sweeps:
        lengths = [Cell(f"{sweep.lengths[k]:.3f}" if k in sweep.lengths else "") for k in ks]
        rows.append([Cell(sweep.head), Cell(sweep.set), *lengths, Cell(f"K={sweep.best}"), Cell(sweep.reason)])
    header = ["head", "set", *(f"K={k}" for k in ks), "best", "by"]
    yield Table("Mean acceptance length by K", header, rows, text=frozenset({0, 1, len(header) - 1}))


def _speed(report: EvaluationReport) -> Iterator[Table]:
    speed = report.speed
    if speed is None:
        return
    ratios = {(one.arm, one.over, one.concurrency): one.ratio for one in speed.speedups}
    names = {"none": "no speculation", "base": "native head", "tuned": "tuned head"}
    rows = []
    for one in speed.figures:
        over = [ratios.get((one.arm, base, one.concurrency)) for base in ("none", "base")]
        rows.append(
            [Cell(names[one.arm]), Cell(str(one.concurrency)), estimate(one.output_tokens_per_second, digits=0),
             *(estimate(ratio, digits=2) if ratio else Cell("") for ratio in over),
             *(Cell(f"{found.value:.1f}") for found in (one.itl_median_ms, one.itl_p95_ms, one.tpot_median_ms,
                                                        one.ttft_median_ms))]
        )  # fmt: skip
    header = [
        "served with", "concurrency", "output tokens/s", "over none", "over native", "ITL median, ms", "ITL p95, ms",
        "per token, ms", "first token, ms",
    ]  # fmt: skip
    note = (
        f"{speed.prompts} requests of up to {speed.max_tokens} tokens on {speed.set}, temperature"
        f" {speed.temperature:g}, K={speed.num_speculative_tokens}; medians of {speed.rounds} rounds, servers"
        f" {speed.mode}. ITL is between pieces of an answer, which with speculation hold several tokens."
    )
    yield Table("Speed, by vLLM's bench client", header, rows, note)


def _lossless(report: EvaluationReport) -> Iterator[Table]:
    if not report.lossless:
        return
    rows = []
    for one in report.lossless:
        worst = next((found for found in one.differences if not found.tie), next(iter(one.differences), None))
        first = ""
        if worst is not None:
            margin = "unknown" if worst.margin is None else f"{worst.margin:.3f}"
            first = (
                f"prompt {worst.prompt}, token {worst.position}: {worst.plain} without, {worst.speculative} with;"
                f" margin {margin}"
            )
        rows.append(
            [Cell(one.head), Cell(one.set), Cell(f"{one.identical} of {one.prompts}"), Cell(str(one.ties)),
             Cell(str(one.errors)), Cell(first)]
        )  # fmt: skip
    header = ["head", "set", "identical", "ties", "errors", "first difference of the worst"]
    tie = report.lossless[0].tie_margin
    note = (
        f"Greedy answers against those of vLLM without speculation. A margin of up to {tie:g} nats is a numerical tie."
    )
    yield Table("Losslessness", header, rows, note, frozenset({0, 1, 5}))


def _reference(report: EvaluationReport) -> Iterator[Table]:
    if report.reference is None:
        return
    rows = []
    for walk in report.reference.walks:
        pairs = [
            Cell(f"{rate:.3f}", f"vLLM {walk.counted.acceptance[place]:.3f}" if walk.counted else "")
            for place, rate in enumerate(walk.walked.acceptance)
        ]
        lengths = Cell(
            f"{walk.walked.mean_acceptance_length:.3f}",
            f"vLLM {walk.counted.mean_acceptance_length:.3f}" if walk.counted else "",
        )
        rows.append([Cell(walk.head), Cell(walk.set), *pairs, lengths, Cell("APART" if walk.alarm else "agrees")])
    k = report.reference.walks[0].num_speculative_tokens if report.reference.walks else 0
    header = ["head", "set", *(f"position {place}" for place in range(k)), "length", ""]
    note = (
        "The walk over the same greedy answers, without vLLM's drafter; an alarm where they are more than"
        f" {report.reference.tolerance:g} apart."
    )
    yield Table("Reference", header, rows, note, frozenset({0, 1}))


def deciding(report: EvaluationReport) -> list[Acceptance]:
    """Figures of the first set, temperature and K: what headlines speak of."""
    first = report.acceptance[0]
    key = (first.set, first.temperature, first.num_speculative_tokens)
    return [one for one in report.acceptance if (one.set, one.temperature, one.num_speculative_tokens) == key]


def deciding_gain(report: EvaluationReport) -> Gain | None:
    """Gain of the tuned head over the base among these."""
    first = report.acceptance[0]
    return next(
        (gain for gain in report.gains if gain.over == "base" and (gain.set, gain.temperature,
         gain.num_speculative_tokens) == (first.set, first.temperature, first.num_speculative_tokens)), None,
    )  # fmt: skip
