"""Acceptance per draft position under vLLM, the verifier as it came against the stitched one, and whether to publish.

Every head answers the same prompts on a server of its own, one after the other; the figures are differences of vLLM's
counters around the answers. A head already published at the destination is measured in the same way, since figures
taken on other prompts, or by another vLLM, cannot be compared.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastmtp
from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import EvaluateConfig, GateConfig
from fastmtp.evaluation import further
from fastmtp.evaluation import report as reports
from fastmtp.evaluation.comparable import require_comparable
from fastmtp.evaluation.gate import judge
from fastmtp.evaluation.measure import Prompts, gain
from fastmtp.evaluation.promptsets import load_sets, max_model_len
from fastmtp.evaluation.report import (
    Acceptance,
    EvaluationReport,
    Gain,
    Gate,
    Head,
    Losslessness,
    PromptSet,
    Timings,
)
from fastmtp.evaluation.session import Session
from fastmtp.extract import fingerprint
from fastmtp.progress import Reporter
from fastmtp.serving import has_gpu
from fastmtp.stage import Manifest, run_stage


def evaluate(
    heads: Mapping[Head, Path],
    config: EvaluateConfig,
    gate: GateConfig,
    target: Path,
    reporter: Reporter,
    *,
    urls: Mapping[str, str] | None = None,
    replace: bool = False,
) -> Manifest:
    """Measure checkpoints (`base`, `tuned`, and `incumbent` where one is published) into `target`.

    vLLM's logs lie beside the result, in `target` with `-logs` appended to its name: they outlive a failure.

    Args:
        urls: servers that run already, by head, and `plain` for one without speculation. Then nothing is started.

    Raises:
        DataError: no usable prompt.
        ServingError: vLLM failed, or does not serve what was asked.
    """
    begun = time.monotonic()
    sets, warnings = load_sets(heads["base"], config)
    fingerprints = {name: fingerprint(open_checkpoint(path)) for name, path in heads.items()}
    logs = target.with_name(f"{target.name}-logs")
    session = Session(
        heads, urls or {}, sets, config, logs, max_model_len(sets, config), gate.confidence, reporter
    )  # fmt: skip
    session.warnings += warnings
    asked = {"evaluate": config.model_dump(), "gate": gate.model_dump(), "urls": dict(urls or {})}
    return run_stage(
        "evaluate", target, config=asked,
        inputs=dict(fingerprints) | {f"prompts of {prompts.name}": prompts.digest for prompts in sets},
        reporter=reporter, replace=replace,
        body=lambda directory: _evaluate(session, fingerprints, gate, directory, reporter, begun),
    )  # fmt: skip


def _evaluate(
    session: Session,
    fingerprints: Mapping[Head, str],
    gate: GateConfig,
    directory: Path,
    reporter: Reporter,
    begun: float,
) -> dict[str, Any]:
    config, own = session.config, session.config.num_speculative_tokens
    for head in session.heads:
        session.measure(head, own, session.temperatures())
    compared = further.losslessness(session)
    walked = further.cross_check(session, reporter)
    sweeps = further.sweeps(session, walked)
    speed = further.speed(session, reporter)
    gains = gains_of(session, gate)
    figures = _ordered(session)
    report = EvaluationReport(
        model=str(session.heads["base"]), heads=dict(fingerprints),
        sets={prompts.name: _described(prompts, config) for prompts in session.sets},
        confidence=gate.confidence, vllm=figures[0].vllm, fastmtp=fastmtp.__version__, hardware=_hardware(),
        created=datetime.now(UTC).isoformat(timespec="seconds"), servers=session.servers,
        acceptance=figures, gains=gains, sweeps=sweeps, lossless=compared, reference=walked,
        speed=speed, gate=decide(session, gains, compared, gate), warnings=session.warnings,
        timings=_timings(session, begun),
    )  # fmt: skip
    for warning in session.warnings:
        reporter.say(f"warning: {warning}")
    reports.write(directory, report)
    return _summary(report, session)


def gains_of(session: Session, gate: GateConfig) -> list[Gain]:
    """Of `tuned` over every other head, for each set, temperature and K that both were measured with.

    Those that the gate decides on come first.
    """
    gains = []
    for (head, name, temperature, k), after in session.found.items():
        for other in session.heads if head == "tuned" else ():
            before = session.found.get((other, name, temperature, k))
            if other != "tuned" and before is not None:
                require_comparable(after.figures, before.figures)
                gains.append(gain(after, before, gate.confidence))
    return sorted(gains, key=lambda one: not _decides(one, session.config))


def decide(session: Session, gains: Sequence[Gain], compared: Sequence[Losslessness], gate: GateConfig) -> Gate:
    """The gate's decision, on figures at the first temperature and the job's own K."""
    figures = [found.figures for found in session.found.values() if _decides(found.figures, session.config)]
    return judge(figures, [one for one in gains if _decides(one, session.config)], compared, gate)


def _decides(found: Acceptance | Gain, config: EvaluateConfig) -> bool:
    """Whether the gate decides on these figures."""
    return (found.temperature, found.num_speculative_tokens) == (config.temperatures[0], config.num_speculative_tokens)


def _ordered(session: Session) -> list[Acceptance]:
    """All figures, those that the gate decides on first."""
    figures = [found.figures for found in session.found.values()]
    return sorted(figures, key=lambda one: not _decides(one, session.config))


def _described(prompts: Prompts, config: EvaluateConfig) -> PromptSet:
    tokens = sum(len(ids) for ids in prompts.ids)
    return PromptSet(
        source=prompts.source,
        digest=prompts.digest,
        prompts=len(prompts.ids),
        prompt_tokens=tokens,
        warmup=config.warmup,
    )


def _timings(session: Session, begun: float) -> Timings:
    total = time.monotonic() - begun
    return Timings(total=total, rest=total - sum(session.seconds.values()), **session.seconds)


def _hardware() -> str:
    if not has_gpu():
        return f"{os.cpu_count()} CPU cores"
    import torch

    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}" if count else "a GPU that torch does not see"


def _summary(report: EvaluationReport, session: Session) -> dict[str, Any]:
    """What the manifest says, and with it pipeline, flows and API."""
    config = session.config
    summary: dict[str, Any] = {}
    for head in session.heads:
        figures = report.first(head)
        assert figures
        summary[head] = figures.measurement().model_dump()
    return summary | {
        "gate": report.gate.model_dump(),
        "greedy_identical": _same_answers(session),
        "vllm": report.vllm,
        "num_speculative_tokens": config.num_speculative_tokens,
        "temperature": config.temperatures[0],
        "draft_sampling": config.draft_sampling,
        "prefix_caching": config.prefix_caching,
        "prompts": sum(len(prompts.ids) for prompts in session.sets),
        "warnings": report.warnings,
    }


def _same_answers(session: Session) -> tuple[int, int] | None:
    """Greedy answers of the tuned head that are those of the base, of how many; none unless some were greedy."""
    k = session.config.num_speculative_tokens
    same, total = 0, 0
    for prompts in session.sets:
        one, other = (session.found.get((head, prompts.name, 0.0, k)) for head in ("base", "tuned"))
        if one is None or other is None:
            continue
        pairs: Sequence[bool] = [
            a.token_ids == b.token_ids for a, b in zip(one.answers, other.answers, strict=True)
        ]  # fmt: skip
        same, total = same + sum(pairs), total + len(pairs)
    return (same, total) if total else None
