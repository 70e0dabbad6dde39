"""Overhead of an evaluation: what is neither a start of vLLM nor an answer of it, against 5 % of the whole.

The small verifier against itself on its own prompts. The walk without vLLM is a measurement of its own and reported
beside it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fastmtp.config import EvaluateConfig, GateConfig
from fastmtp.evaluate import evaluate
from fastmtp.evaluation.report import EvaluationReport, Head
from fastmtp.progress import Reporter
from fastmtp.tiny import Recipe, build
from tests.benchmarks.measure import Metric, metric

SHARE = 0.05
VERIFIER = Path(".bench/evaluate/verifier")


def run() -> dict[str, Metric]:
    """Shares of the wall time: everything else, without the walk and with it."""
    if not VERIFIER.is_dir():
        build(VERIFIER, Recipe(), Reporter("preflight", quiet=True))
    verifier = VERIFIER.resolve()
    heads: dict[Head, Path] = {"base": verifier, "tuned": verifier}
    config = EvaluateConfig(prompts=str(verifier / "prompts-test.jsonl"), num_prompts=96, max_tokens=192)
    with tempfile.TemporaryDirectory() as place, Reporter("evaluate", label="evaluate") as reporter:
        out = Path(place) / "evaluation"
        evaluate(heads, config, GateConfig(), out, reporter)
        took = EvaluationReport.model_validate_json((out / "report.json").read_bytes()).timings
    return {
        "overhead": metric(took.rest / took.total, "share", limit=SHARE, goal=1.0),
        "overhead_and_walk": metric((took.rest + took.reference) / took.total, "share", limit=SHARE),
        "wall": metric(took.total, "s", limit=took.starts + took.answers + took.lossless),
    }
