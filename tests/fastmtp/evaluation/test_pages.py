"""What people look at: nothing of the report is lost, nothing is taken from elsewhere, nothing is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastmtp.evaluation.report import PAGE, PLOT, REPORT, TABLE, EvaluationReport, Gate, write
from tests.fastmtp.evaluation import example


def test_a_report_is_written_in_four_forms(tmp_path: Path) -> None:
    report = example.report()
    write(tmp_path, report)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([REPORT, TABLE, PLOT, PAGE])
    assert EvaluationReport.model_validate_json((tmp_path / REPORT).read_bytes()) == report
    assert (tmp_path / PLOT).read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / TABLE).read_text()
    assert table.startswith("**passed.** The gain of 0.946")
    assert "| gain over base | +0.211 (+0.191 to +0.231) |" in table
    for part in ("What the gate looked at", "Speed", "Losslessness", "Reference", "by K"):
        assert part in table


def test_the_page_stands_alone_and_escapes_what_it_is_given(tmp_path: Path) -> None:
    write(tmp_path, example.report())
    page = (tmp_path / PAGE).read_text()
    assert "&lt;b&gt;A warning&lt;/b&gt;" in page and "<b>A warning" not in page
    assert page.count("<svg") == 3 and "<script" not in page
    assert not re.search(r"(src|href)=[\"'](?!#)", page.replace("xlink:href", "href"))
    assert "2.308 -&gt; 3.254" in page and "1.60x" in page and "95 of 96" in page


def test_parts_that_were_not_measured_are_left_out(tmp_path: Path) -> None:
    report = example.report().model_copy(
        update={"speed": None, "reference": None, "lossless": [], "sweeps": [], "warnings": []}
    )
    write(tmp_path, report)
    page, table = (tmp_path / PAGE).read_text(), (tmp_path / TABLE).read_text()
    assert page.count("<svg") == 1
    for part in ("Speed", "Losslessness", "Reference", "To be looked at"):
        assert f"<h2>{part}" not in page and f"### {part}" not in table


def test_a_slow_down_is_not_hidden_behind_a_slower_head(tmp_path: Path) -> None:
    report = example.report()
    assert report.speed
    slower = [
        up.model_copy(update={"ratio": example.around(0.8)}) if up.over == "none" else up
        for up in report.speed.speedups
    ]
    write(tmp_path, report.model_copy(update={"speed": report.speed.model_copy(update={"speedups": slower})}))
    assert "0.80x" in (tmp_path / PAGE).read_text()


@pytest.mark.parametrize("verdict", ["no gain", "head not loaded or useless", "inconclusive"])
def test_a_no_says_so_first(tmp_path: Path, verdict: str) -> None:
    gate = Gate.model_validate({"passed": False, "verdict": verdict, "reason": "Because."})
    write(tmp_path, example.report().model_copy(update={"gate": gate}))
    assert f"<strong>Not passed: {verdict}</strong>" in (tmp_path / PAGE).read_text()
    assert (tmp_path / TABLE).read_text().startswith(f"**not passed: {verdict}.** Because.")


def test_several_sets_have_a_panel_each(tmp_path: Path) -> None:
    report = example.report()
    other = [example.acceptance(head, "traffic") for head in ("base", "tuned")]
    sets = report.sets | {"traffic": report.sets["gsm8k"]}
    write(tmp_path, report.model_copy(update={"acceptance": report.acceptance + other, "sets": sets}))
    page = (tmp_path / PAGE).read_text()
    assert page.count("<svg") == 4 and "Acceptance on traffic: 96 prompts" in page
