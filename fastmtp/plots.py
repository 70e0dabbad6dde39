"""The two pictures people look for: how training went, and what acceptance was before and after."""

from __future__ import annotations

import functools
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastmtp.evaluation.report import Acceptance, EvaluationReport, SpeedUp

# Of Okabe and Ito's palette, told apart with any kind of colour vision.
COLOURS = {"base": "#0072B2", "tuned": "#D55E00", "incumbent": "#009E73", "none": "#666666"}


def plot_curves(metrics: Path, target: Path, best_step: int | None = None) -> None:
    """Loss per recursion step, and held-out acceptance per position where it was estimated, as a PNG.

    Args:
        best_step: where the result was taken; marked by a line.
    """
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    figure, (left, right) = _figure(2)
    for key in sorted({key for record in records for key in record if key.startswith(("loss_", "acceptance_"))}):
        points = [(record["step"], record[key]) for record in records if key in record]
        axes, marker = (left, "") if key.startswith("loss_") else (right, "o")
        position = key.rsplit("_", 1)[1]
        axes.plot(*zip(*points, strict=True), marker=marker, label=f"position {position}")
    if best_step is not None:
        right.axvline(best_step, color="grey", linestyle=":", label=f"best, step {best_step}")
    left.set(xlabel="step", ylabel="loss a token", title="Training loss")
    right.set(xlabel="step", ylabel="accepted / drafts", title="Held-out acceptance (walk)", ylim=(0, 1))
    _finish(figure, (left, right), target)


def evaluation_figure(report: EvaluationReport) -> Any:  # noqa: ANN401 - matplotlib's types
    """All panels of `evaluation_panels` in one picture."""
    panels = _panels(report)
    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    figure, axes = _figure(columns, -(-len(panels) // columns))
    for draw, one in itertools.zip_longest(panels, axes):
        _draw(draw, one)
    return figure


def evaluation_panels(report: EvaluationReport) -> list[Any]:
    """Acceptance per position with intervals, for each prompt set; mean length against K; speed-up against concurrency:
    a picture each, those of which the report has something."""
    figures = []
    for draw in _panels(report):
        figure, (axes,) = _figure(1, width=4.8)
        _draw(draw, axes)
        figures.append(figure)
    return figures


Draw = Callable[[Any], None]


def _draw(draw: Draw | None, axes: Any) -> None:  # noqa: ANN401 - matplotlib's types
    if draw is None:
        axes.set_axis_off()
        return
    draw(axes)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="best", fontsize=8.5)


def _panels(report: EvaluationReport) -> list[Draw]:
    first = report.acceptance[0]
    sets = list(dict.fromkeys(one.set for one in report.acceptance))
    panels: list[Draw] = []
    for name in sets:
        shown = [
            one for one in report.acceptance
            if (one.set, one.temperature, one.num_speculative_tokens)
            == (name, first.temperature, first.num_speculative_tokens)
        ]  # fmt: skip
        panels.append(functools.partial(_positions, shown=shown, title=name))
    curves = _length_curves(report, first.set)
    if any(len(points) > 1 for points, _ in curves.values()):
        panels.append(functools.partial(_lengths, curves=curves))
    if report.speed is not None:
        panels.append(functools.partial(_speedups, speedups=report.speed.speedups))
    return panels


def png(figure: Any) -> bytes:  # noqa: ANN401 - matplotlib's types
    """The picture, 120 dots to the inch."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def svg(figure: Any) -> str:  # noqa: ANN401 - matplotlib's types
    """The picture as an SVG element, its text as text."""
    import matplotlib as mpl

    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastmtp"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _positions(axes: Any, *, shown: Sequence[Acceptance], title: str) -> None:  # noqa: ANN401
    width = 0.8 / len(shown)
    for place, one in enumerate(shown):
        rates = [rate.value for rate in one.rates]
        spots = [position + (place - (len(shown) - 1) / 2) * width for position in range(len(rates))]
        label = f"{one.head}: mean acceptance length {one.mean_acceptance_length.value:.3f}"
        axes.bar(spots, rates, width * 0.94, label=label, color=COLOURS[one.head])
        below = [rate.value - (rate.value if rate.low is None else rate.low) for rate in one.rates]
        above = [(rate.value if rate.high is None else rate.high) - rate.value for rate in one.rates]
        axes.errorbar(spots, rates, yerr=[below, above], fmt="none", ecolor="#222222", elinewidth=1, capsize=3)
        for spot, rate, more in zip(spots, rates, above, strict=True):
            axes.annotate(
                f"{rate:.3f}", (spot, rate + more), ha="center", va="bottom", fontsize=8, xytext=(0, 2),
                textcoords="offset points",
            )  # fmt: skip
    axes.set(xlabel="draft position", ylabel="accepted / drafts", ylim=(0, 1.25))
    axes.set_title(f"Acceptance under vLLM: {title}", fontsize=10.5)
    axes.set_xticks(range(max(len(one.rates) for one in shown)))
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def _length_curves(report: EvaluationReport, name: str) -> dict[str, tuple[dict[int, float], str]]:
    """Label -> (K -> mean acceptance length, style): as vLLM counted, and as the walk says."""
    curves: dict[str, tuple[dict[int, float], str]] = {}
    first = report.acceptance[0]
    for one in report.acceptance:
        if (one.set, one.temperature) == (name, first.temperature):
            points, _ = curves.setdefault(one.head, ({}, "o-"))
            points[one.num_speculative_tokens] = one.mean_acceptance_length.value
    for walk in report.reference.walks if report.reference else ():
        if walk.set == name and first.temperature == 0:
            curves[f"{walk.head}, by the walk"] = (walk.lengths, ":")
    return curves


def _lengths(axes: Any, *, curves: Mapping[str, tuple[dict[int, float], str]]) -> None:  # noqa: ANN401
    for label, (points, style) in curves.items():
        colour = COLOURS[label.split(",")[0]]
        axes.plot(*zip(*sorted(points.items()), strict=True), style, label=label, color=colour, markersize=5)
    axes.set(xlabel="draft tokens per step, K", ylabel="mean acceptance length, tokens")
    axes.set_title("What a longer draft brings", fontsize=10.5)
    axes.set_xticks(sorted({k for points, _ in curves.values() for k in points}))


def _speedups(axes: Any, *, speedups: Sequence[SpeedUp]) -> None:  # noqa: ANN401
    for arm in ("base", "tuned"):
        found = sorted(
            (one for one in speedups if one.arm == arm and one.over == "none"), key=lambda up: up.concurrency
        )
        if not found:
            continue
        ratios = [one.ratio for one in found]
        low, high = zip(*((one.low or one.value, one.high or one.value) for one in ratios), strict=True)
        at = [one.concurrency for one in found]
        axes.plot(at, [one.value for one in ratios], "o-", label=f"{arm} head", color=COLOURS[arm])
        axes.fill_between(at, low, high, color=COLOURS[arm], alpha=0.15, linewidth=0)
    axes.axhline(1, color="#666666", linewidth=1, linestyle="--", label="no speculation")
    axes.set(xlabel="requests at once", ylabel="output tokens/s, as a ratio")
    axes.set_title("Speed-up over no speculation", fontsize=10.5)
    axes.set_xscale("log", base=2)
    ticks = sorted({one.concurrency for one in speedups})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _figure(columns: int, lines: int = 1, width: float = 6.4) -> Any:  # noqa: ANN401 - matplotlib's types
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface, not pyplot: no global state, no display.
    figure = Figure(figsize=(max(width, 4.5 * columns), 3.9 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(lines, columns, squeeze=False).ravel()


def _finish(figure: Any, axes: Any, target: Path) -> None:  # noqa: ANN401 - matplotlib's types
    for one in axes:
        one.grid(alpha=0.3)
        if one.get_legend_handles_labels()[0]:
            one.legend(loc="best", fontsize=9)
    figure.savefig(target, dpi=120)
