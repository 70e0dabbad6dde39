"""What people look at: acceptance.md, acceptance.png, and report.html, which needs nothing besides itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fastmtp.evaluation.report import PAGE, PLOT, TABLE, EvaluationReport
from fastmtp.evaluation.tables import deciding, deciding_gain, estimate, tables
from fastmtp.plots import evaluation_figure, evaluation_panels, png, svg

TEMPLATE = Path(__file__).with_name("page.html.jinja")


class Tile(NamedTuple):
    """A headline: what it is, the figure, and a word more."""

    name: str
    value: str
    more: str = ""


def write(directory: Path, report: EvaluationReport) -> None:
    """Write the three into an existing directory."""
    (directory / TABLE).write_text(markdown(report), encoding="utf-8")
    (directory / PLOT).write_bytes(png(evaluation_figure(report)))
    (directory / PAGE).write_text(page(report, [svg(one) for one in evaluation_panels(report)]), encoding="utf-8")


def markdown(report: EvaluationReport) -> str:
    """The tables, verdict first."""
    verdict = "passed" if report.gate.passed else f"not passed: {report.gate.verdict}"
    parts = [f"**{verdict}.** {report.gate.reason}", *(table.markdown() for table in tables(report))]
    parts += [f"- {warning}" for warning in report.warnings]
    return "\n\n".join(parts) + "\n"


def page(report: EvaluationReport, figures: Sequence[str]) -> str:
    """The page as HTML. `figures` are SVG elements."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    # The figures are made here; everything else is escaped.
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        report=report, title=title(report), tiles=_tiles(report), tables=tables(report), times=_times(report),
        figures=[Markup(figure) for figure in figures],  # noqa: S704
    )  # fmt: skip


def title(report: EvaluationReport) -> str:
    """What was measured, by the verifier's own name."""
    return f"MTP acceptance of {Path(report.model).name}"


def _tiles(report: EvaluationReport) -> list[Tile]:
    lengths = {one.head: one.mean_acceptance_length for one in deciding(report)}
    tiles = []
    if "base" in lengths and "tuned" in lengths:
        shown = f"{lengths['base'].value:.3f} -> {lengths['tuned'].value:.3f}"
        gain = deciding_gain(report)
        cell = estimate(gain.mean_acceptance_length, signed=True) if gain else None
        more = f"gain {cell.value}" + (f" ({cell.more})" if cell.more else "") if cell else ""
        tiles.append(Tile("Tokens per verification", shown, more))
    if report.speed:
        ups = [up for up in report.speed.speedups if up.arm == "tuned"]
        # Speculation that slows a server down must not hide behind a head that slows it down more.
        plain = [up for up in ups if up.over == "none"]
        best = max(plain or ups, key=lambda up: up.ratio.value, default=None)
        if best:
            over = "no speculation" if best.over == "none" else "the native head"
            tiles.append(Tile("Best speed-up", f"{best.ratio.value:.2f}x", f"over {over}, {best.concurrency} at once"))
    if report.lossless:
        same = sum(one.identical for one in report.lossless)
        of = sum(one.prompts for one in report.lossless)
        errors = sum(one.errors for one in report.lossless)
        ties = sum(one.ties for one in report.lossless)
        tiles.append(Tile("Answers unchanged", f"{same} of {of}", f"{ties} at numerical ties, {errors} errors"))
    drafts = {one.head: one.drafts for one in deciding(report)}
    tiles.append(
        Tile("Drafts verified", f"{sum(drafts.values()):,}", ", ".join(f"{n:,} {h}" for h, n in drafts.items()))
    )
    return tiles


def _times(report: EvaluationReport) -> str:
    times = report.timings
    parts = {
        "starts of vLLM": times.starts, "answers": times.answers, "comparison without speculation": times.lossless,
        "reference": times.reference, "speed": times.speed, "everything else": times.rest,
    }  # fmt: skip
    shown = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items() if seconds >= 0.5)
    return f"It took {times.total:.0f} s: {shown}."
