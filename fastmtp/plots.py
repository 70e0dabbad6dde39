"""The two pictures people look for: how training went, and what acceptance was before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastmtp.protocol import Measurement


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


def plot_acceptance(measured: Mapping[str, Measurement], target: Path) -> None:
    """Acceptance per draft position, a bar per head and position, mean acceptance lengths in the legend, as a PNG."""
    figure, (axes,) = _figure(1)
    width = 0.8 / len(measured)
    for place, (name, found) in enumerate(measured.items()):
        label = f"{name}: mean acceptance length {found.mean_acceptance_length:.3f}, {found.drafts} drafts"
        positions = [position + (place - (len(measured) - 1) / 2) * width for position in range(len(found.acceptance))]
        bars = axes.bar(positions, found.acceptance, width, label=label)
        axes.bar_label(bars, fmt="%.3f", padding=2, fontsize=9)
    ticks = range(max(len(found.acceptance) for found in measured.values()))
    axes.set(xlabel="draft position", ylabel="accepted / drafts", title="Acceptance under vLLM", ylim=(0, 1.08))
    axes.set_xticks(list(ticks))
    _finish(figure, (axes,), target)


def _figure(columns: int) -> Any:  # noqa: ANN401 - matplotlib's types
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The object interface, not pyplot: no global state, no display.
    figure = Figure(figsize=(6.4 * columns, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _finish(figure: Any, axes: Any, target: Path) -> None:  # noqa: ANN401 - matplotlib's types
    for one in axes:
        one.grid(alpha=0.3)
        if one.get_legend_handles_labels()[0]:
            one.legend(loc="best", fontsize=9)
    figure.savefig(target, dpi=120)
