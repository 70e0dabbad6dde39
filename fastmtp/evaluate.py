"""Acceptance per draft position under vLLM, verifier as it came against stitched, and whether to publish.

Every head answers the same prompts on a server of its own, one after the other; the figures are differences of vLLM's
counters around the answers. A head already published at the destination is measured in the same way, since figures
taken on other prompts, or by another vLLM, cannot be compared.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fastmtp.acceptance import measurement
from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import EvaluateConfig, GateConfig
from fastmtp.data.prompts import read_prompts
from fastmtp.data.tokens import encode_prompts
from fastmtp.errors import DataError, ServingError
from fastmtp.extract import fingerprint
from fastmtp.families.base import text_config
from fastmtp.plots import plot_acceptance
from fastmtp.progress import Reporter
from fastmtp.protocol import Measurement
from fastmtp.serving import Answer, serve
from fastmtp.stage import Manifest, digest_of, run_stage
from fastmtp.table import acceptance_table

REPORT = "evaluation.json"
TABLE = "acceptance.md"
PLOT = "acceptance.png"
_USELESS = 0.05  # below this at position 0 the head was not loaded, or is none


@dataclass(frozen=True)
class _Measured:
    figures: Measurement
    answers: list[Answer]
    seconds: float
    vllm: str


def evaluate(
    heads: Mapping[str, Path],
    config: EvaluateConfig,
    gate: GateConfig,
    target: Path,
    reporter: Reporter,
    *,
    replace: bool = False,
) -> Manifest:
    """Measure checkpoints (`base`, `tuned`, and `incumbent` where one is published) into `target`.

    vLLM's logs lie beside the result, in `target` with `-logs` appended to its name: they outlive a failure.

    Raises:
        DataError: no usable prompt.
        ServingError: vLLM failed, or drafts nothing worth accepting from the verifier as it came.
    """
    prompts = read_prompts(config.prompts, limit=config.num_prompts)
    fingerprints = {name: fingerprint(open_checkpoint(path)) for name, path in heads.items()}
    inputs = fingerprints | {"prompts": digest_of([prompt.key for prompt in prompts])}
    tokenizer = AutoTokenizer.from_pretrained(heads["base"])
    encoded = encode_prompts(tokenizer, prompts)
    # Room for a whole draft after the last token: where vLLM must cut a draft short at its length limit the rates would
    # sink, and 0.32's CPU kernel for gated delta nets fails.
    longest = max(len(ids) for ids in encoded) + config.max_tokens + config.num_speculative_tokens + 1
    limit = text_config(open_checkpoint(heads["base"]).config).get("max_position_embeddings")
    if limit and longest > limit:
        raise DataError(
            f"A prompt and {config.max_tokens} tokens need {longest} positions; the model has {limit}.",
            mend="Lower evaluate.max_tokens, or leave out the longest prompts.",
            pointer="/evaluate/max_tokens",
        )
    logs = target.with_name(f"{target.name}-logs")
    return run_stage(
        "evaluate", target, config={"evaluate": config.model_dump(), "gate": gate.model_dump()}, inputs=inputs,
        reporter=reporter, replace=replace,
        body=lambda directory: _evaluate(heads, encoded, longest, config, gate, directory, logs, reporter),
    )  # fmt: skip


def _evaluate(
    heads: Mapping[str, Path],
    prompts: list[list[int]],
    longest: int,
    config: EvaluateConfig,
    gate: GateConfig,
    directory: Path,
    logs: Path,
    reporter: Reporter,
) -> dict[str, Any]:
    measured = {
        name: _measure(name, path, prompts, longest, config, logs / f"vllm-{name}.log", reporter)
        for name, path in heads.items()
    }
    figures = {name: found.figures for name, found in measured.items()}
    same = sum(
        a.token_ids == b.token_ids for a, b in zip(measured["base"].answers, measured["tuned"].answers, strict=True)
    )
    identical = (same, len(prompts)) if config.temperature == 0 else None
    summary: dict[str, Any] = {name: found.model_dump() for name, found in figures.items()}
    summary |= {
        "greedy_identical": identical,
        "gate": judge(figures, gate),
        "answer_seconds": {name: round(found.seconds, 2) for name, found in measured.items()},
        "answer_tokens": {name: sum(len(a.token_ids) for a in found.answers) for name, found in measured.items()},
        "vllm": measured["base"].vllm,
        "num_speculative_tokens": config.num_speculative_tokens,
        "temperature": config.temperature,
        "prompts": len(prompts),
    }
    (directory / REPORT).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (directory / TABLE).write_text(acceptance_table(figures) + "\n", encoding="utf-8")
    plot_acceptance(figures, directory / PLOT)
    return summary


def _measure(
    name: str,
    checkpoint: Path,
    prompts: list[list[int]],
    longest: int,
    config: EvaluateConfig,
    log: Path,
    reporter: Reporter,
) -> _Measured:
    reporter.phase(f"{name}: vLLM starts")
    with serve(checkpoint, config, max_model_len=longest, log=log) as server:
        reporter.phase(f"{name}: vLLM answers", len(prompts), "prompts")
        before, begun = server.counters(), time.monotonic()
        answers = server.generate(prompts, config, reporter.advance)
        seconds = time.monotonic() - begun
        counted = server.counters().since(before)
        found = measurement(counted.drafts, counted.accepted)
        vllm = server.version()
    metrics = {f"acceptance_{place}": rate for place, rate in enumerate(found.acceptance)}
    metrics |= {"mean_acceptance_length": found.mean_acceptance_length, "drafts": float(found.drafts)}
    reporter.advance(len(prompts), metrics=metrics, note=f"{name}: length {found.mean_acceptance_length:.3f}")
    if name == "base" and found.drafts and found.acceptance[0] < _USELESS:
        raise ServingError(
            f"vLLM accepts {found.acceptance[0]:.3f} of the first drafts of the verifier as it came: its head was not "
            f"loaded, or is useless. {_skipped(log)}"
        )
    return _Measured(found, answers, seconds, vllm)


def _skipped(log: Path) -> str:
    """What vLLM's log says of parameters it skipped or did not find."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if "mtp" in line and any(word in line.lower() for word in ("skip", "not found", "unexpected", "missing")):
            return f"Its log: {line.strip()[:300]}"
    return f"See {os.fspath(log)}."


def judge(figures: Mapping[str, Measurement], gate: GateConfig) -> dict[str, Any]:
    """Whether `tuned` is better enough than `base` and any `incumbent`: {"passed": bool, "reason": str}."""
    few = {name: found.drafts for name, found in figures.items() if found.drafts < gate.min_drafts}
    if few:
        name, drafts = next(iter(few.items()))
        return {
            "passed": False,
            "reason": f"inconclusive: {drafts} drafts of {name}, fewer than {gate.min_drafts}: evaluate more prompts",
        }
    tuned = figures["tuned"].mean_acceptance_length
    for name in ("incumbent", "base"):
        if name in figures:
            gain = tuned - figures[name].mean_acceptance_length
            if gain < gate.min_gain:
                what = "what is published" if name == "incumbent" else "the verifier as it came"
                return {
                    "passed": False,
                    "reason": f"no better than {what}: mean acceptance length {tuned:.3f} against "
                    f"{figures[name].mean_acceptance_length:.3f}, a gain of {gate.min_gain} is asked for",
                }
    gain = tuned - figures["base"].mean_acceptance_length
    return {"passed": True, "reason": f"mean acceptance length grew by {gain:.3f} to {tuned:.3f}"}
