"""The gate: each way to say no, in the words that people read, and what decides where several things are wrong."""

from __future__ import annotations

import pytest

from fastmtp.config import GateConfig
from fastmtp.evaluation.gate import judge, useless
from fastmtp.evaluation.report import Gain, Losslessness
from tests.fastmtp.evaluation.figures import acceptance, gain

GATE = GateConfig(min_gain=0.02, min_drafts=2000)
BOTH = [acceptance("base", [0.7, 0.5]), acceptance("tuned", [0.8, 0.6])]


def compared(identical: int = 64, ties: int = 0) -> Losslessness:
    return Losslessness(
        head="tuned", set="prompts", prompts=64, identical=identical, ties=ties, tie_margin=0.25,
        differences=[{"prompt": 3, "position": 7, "plain": 11, "speculative": 12, "margin": 4.0, "tie": False}]
        if identical + ties < 64 else [],
    )  # fmt: skip


def test_a_clear_gain_passes() -> None:
    found = judge(BOTH, [gain(0.2, 0.15)], [compared(62, ties=2)], GATE)
    assert found.passed and found.verdict == "passed"
    assert found.reason == "mean acceptance length grew by 0.200 [0.150, 0.250] over the verifier as it came"
    assert all(reason.passed for reason in found.reasons) and len(found.reasons) == 6


def test_the_lower_bound_decides_and_not_the_figure() -> None:
    found = judge(BOTH, [gain(0.03, 0.01)], [], GATE)
    assert not found.passed and found.verdict == "no gain"
    assert found.reason == (
        "no gain: mean acceptance length over the verifier as it came on prompts by +0.030 [+0.010, +0.050],"
        " at least +0.020 is asked of the lower bound"
    )


def test_a_gain_is_asked_over_what_is_published_and_on_every_set() -> None:
    gains = [gain(0.2, 0.15), gain(0.001, -0.01, over="incumbent")]
    assert "over what is published on prompts by +0.001" in judge(BOTH, gains, [], GATE).reason
    gains = [gain(0.2, 0.15), gain(0.0, -0.01, name="traffic")]
    found = judge(BOTH, gains, [], GATE)
    assert found.verdict == "no gain" and "on traffic" in found.reason
    assert [reason.passed for reason in found.reasons if reason.over == "base"] == [True, False, True, True]


def test_several_sets_pass_by_the_worst() -> None:
    found = judge(BOTH, [gain(0.2, 0.15), gain(0.1, 0.05, name="traffic")], [], GATE)
    assert found.reason.endswith("by 0.100 [0.050, 0.150] over the verifier as it came on traffic, its worst set")


def test_a_position_that_fell() -> None:
    found = judge(BOTH, [gain(0.1, 0.05, rates=[0.15, -0.05])], [], GATE)
    assert found.verdict == "a position fell"
    assert found.reason == (
        "a position fell: the rate of position 1 changed by -0.050 against the verifier as it came on prompts, no other"
        " by less; -0.020 is allowed"
    )
    assert judge(
        BOTH, [gain(0.1, 0.05, rates=[0.15, -0.05])], [], GATE.model_copy(update={"position_tolerance": 0.06})
    ).passed


def test_few_drafts_are_inconclusive_however_good() -> None:
    few = [BOTH[0], acceptance("tuned", [0.9, 0.9], drafts=1999)]
    found = judge(few, [gain(0.6, 0.5)], [], GATE)
    assert not found.passed and found.verdict == "inconclusive"
    assert found.reason == ("inconclusive: 1999 drafts of tuned on prompts, 2000 are asked for; evaluate more prompts")


def test_no_interval_is_inconclusive() -> None:
    found = judge(BOTH, [gain(0.5, None)], [], GATE)
    assert found.verdict == "inconclusive" and "vLLM gave no figures per request" in found.reason


def test_answers_that_change() -> None:
    found = judge(BOTH, [gain(0.2, 0.15)], [compared(60, ties=3)], GATE)
    assert found.verdict == "not lossless"
    assert found.reason == (
        "not lossless: 60 of 64 greedy answers of tuned on prompts are those of vLLM without speculation, 3 part at a"
        " tie (at most 0.25 nats), 1 part by more: answer 3, token 7: 11 without, 12 with speculation, 4.000 nats apart"
    )
    assert judge(BOTH, [gain(0.2, 0.15)], [compared(60)], GATE.model_copy(update={"require_lossless": False})).passed


@pytest.mark.parametrize("rates", [[0.0, 0.0], [0.049, 0.03], [0.05, 0.0]])
def test_a_head_that_drafts_nothing_comes_first(rates: list[float]) -> None:
    """Also where there are few drafts, and whatever else is wrong."""
    heads = [BOTH[0], acceptance("tuned", rates, drafts=100)]
    found = judge(heads, [gain(-1.2, -1.3, rates=[-0.7, -0.5])], [compared(0)], GATE)
    assert not found.passed and found.verdict == ("inconclusive" if rates[0] == 0.05 else "head not loaded or useless")
    if rates[0] < 0.05:
        assert found.reason.startswith(f"head not loaded or useless: vLLM accepts {rates[0]:.3f} of its first drafts")


def test_useless() -> None:
    assert useless(acceptance("base", [0.04, 0.03])) and useless(acceptance("base", [0.049, 0.0]))
    assert not useless(acceptance("base", [0.06, 0.0]))
    assert not useless(acceptance("base", [0.0, 0.0], drafts=0))


def test_a_base_without_a_trained_head_does_not_stand_in_the_way() -> None:
    heads = [acceptance("base", [0.01, 0.0]), BOTH[1]]
    gains: list[Gain] = [gain(1.3, 1.2)]
    assert judge(heads, gains, [], GATE).passed
