"""Whether a tuned head may be published: what was measured against what the job asks for.

Looks at everything and says all of it; the decisive reason is the first that fails in the order: a head that drafts
nothing, too few drafts, answers that change, no gain, a position that fell. Computes no interval itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastmtp.config import GateConfig
from fastmtp.evaluation import lossless
from fastmtp.evaluation.report import Acceptance, Gain, Gate, Head, Losslessness, Reason, Verdict

# Below these a head was not loaded, or is none.
USELESS_RATE = 0.05
USELESS_LENGTH = 1.05
_ORDER: tuple[Verdict, ...] = (
    "head not loaded or useless", "inconclusive", "not lossless", "no gain", "a position fell",
)  # fmt: skip
_CALLED = {"base": "the verifier as it came", "incumbent": "what is published", "tuned": "the tuned head"}


def useless(found: Acceptance) -> bool:
    """Whether a head drafts next to nothing that is accepted."""
    return found.drafts > 0 and (
        found.rates[0].value < USELESS_RATE or found.mean_acceptance_length.value < USELESS_LENGTH
    )


def judge(
    figures: Sequence[Acceptance], gains: Sequence[Gain], compared: Sequence[Losslessness], config: GateConfig
) -> Gate:
    """The decision.

    Args:
        figures: of every head and set at the temperature and K that decide.
        gains: of `tuned` over each other head, per set, of the same figures.
        compared: greedy answers with and without speculation; empty where that was not asked for.
    """
    looked: list[tuple[Verdict, Reason]] = [
        *_loaded(figures),
        *_enough(figures, config),
        *(_lossless(compared) if config.require_lossless else ()),
        *_gained(gains, config),
        *_fell(gains, config),
    ]
    reasons = [reason for _, reason in looked]
    for verdict in _ORDER:
        for kind, reason in looked:
            if kind == verdict and not reason.passed:
                return Gate(passed=False, verdict=verdict, reason=f"{verdict}: {reason.text}", reasons=reasons)
    return Gate(passed=True, verdict="passed", reason=_passed(gains), reasons=reasons)


def _loaded(figures: Sequence[Acceptance]) -> Iterator[tuple[Verdict, Reason]]:
    for found in figures:
        if found.head == "tuned":
            text = (
                f"vLLM accepts {found.rates[0].value:.3f} of its first drafts on {found.set},"
                f" mean acceptance length {found.mean_acceptance_length.value:.3f}"
            )
            yield _ORDER[0], Reason(passed=not useless(found), text=text, set=found.set)


def _enough(figures: Sequence[Acceptance], config: GateConfig) -> Iterator[tuple[Verdict, Reason]]:
    for found in figures:
        enough = found.drafts >= config.min_drafts
        text = f"{found.drafts} drafts of {found.head} on {found.set}, {config.min_drafts} are asked for"
        if not enough:
            text += "; evaluate more prompts"
        yield "inconclusive", Reason(passed=enough, text=text, set=found.set)


def _lossless(compared: Sequence[Losslessness]) -> Iterator[tuple[Verdict, Reason]]:
    for found in compared:
        # A verifier that answers otherwise under its own head is vLLM's fault; the tuned head is what is judged.
        if found.head == "tuned":
            yield "not lossless", Reason(passed=found.errors == 0, text=lossless.describe(found), set=found.set)


def _gained(gains: Sequence[Gain], config: GateConfig) -> Iterator[tuple[Verdict, Reason]]:
    for gain in gains:
        found = gain.mean_acceptance_length
        if found.low is None or found.high is None:
            # Without figures per request there is no interval, and a figure alone proves nothing.
            text = f"mean acceptance length over {_CALLED[gain.over]} on {gain.set} by {found.value:+.3f}, without an"
            text += " interval: vLLM gave no figures per request, or there is but one prompt"
            yield "inconclusive", Reason(passed=False, text=text, set=gain.set, over=gain.over)
            continue
        text = (
            f"mean acceptance length over {_CALLED[gain.over]} on {gain.set} by {found.value:+.3f}"
            f" [{found.low:+.3f}, {found.high:+.3f}], at least {config.min_gain:+.3f} is asked of the lower bound"
        )
        yield "no gain", Reason(passed=found.low >= config.min_gain, text=text, set=gain.set, over=gain.over)


def _fell(gains: Sequence[Gain], config: GateConfig) -> Iterator[tuple[Verdict, Reason]]:
    for gain in gains:
        worst = min(range(len(gain.rates)), key=lambda position: gain.rates[position].value)
        change, over = gain.rates[worst].value, _CALLED[gain.over]
        text = (
            f"the rate of position {worst} changed by {change:+.3f} against {over} on {gain.set}, no other"
            f" by less; {-config.position_tolerance:+.3f} is allowed"
        )
        passed = change >= -config.position_tolerance
        yield "a position fell", Reason(passed=passed, text=text, set=gain.set, over=gain.over)


def _passed(gains: Sequence[Gain]) -> str:
    over: list[Head] = list(dict.fromkeys(gain.over for gain in gains))
    parts = []
    for name in over:
        least = min((gain for gain in gains if gain.over == name), key=lambda gain: gain.mean_acceptance_length.value)
        found = least.mean_acceptance_length
        where = f" on {least.set}, its worst set" if sum(gain.over == name for gain in gains) > 1 else ""
        parts.append(f"by {found.value:.3f} [{found.low:.3f}, {found.high:.3f}] over {_CALLED[name]}{where}")
    return f"mean acceptance length grew {' and '.join(parts)}"
