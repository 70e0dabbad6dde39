"""What is used, and for what, stays as it is when more comes in; no split leaks into another; everything is counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmtp.config import DataConfig
from fastmtp.data.conversations import Conversation, conversation
from fastmtp.data.selection import select, split_of


def chat(*turns: str) -> Conversation:
    """What the user and the assistant say in turn."""
    return conversation(
        [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]
    )


def config(**changes: Any) -> DataConfig:
    return DataConfig.model_validate({"prompts": "p", **changes})


RELAXED = settings(deadline=None, derandomize=True)

# Few first questions, so that many conversations share one.
CHATS = st.builds(
    lambda first, rest: chat(first, *rest),
    st.sampled_from("abcdef"),
    st.lists(st.sampled_from("xyz"), max_size=3),
)
SETTINGS = st.builds(
    lambda turns, size, seed, holdout: config(turns=turns, max_samples=size, seed=seed, holdout=holdout),
    st.sampled_from(["last", "all"]),
    st.none() | st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.3, 0.9]),
)


@RELAXED
@given(st.lists(CHATS, max_size=30), SETTINGS)
def test_everything_is_used_or_counted(chats: list[Conversation], wanted: DataConfig) -> None:
    rejected: Counter[str] = Counter()
    found = select(chats, wanted, rejected)
    assert len(found) + rejected.total() == len(chats)
    places = [next(place for place, one in enumerate(chats) if one is chosen) for chosen, _ in found]
    assert places == sorted(set(places))


@RELAXED
@given(st.lists(CHATS, max_size=25), st.lists(CHATS, max_size=25), SETTINGS)
def test_more_data_moves_nothing(old: list[Conversation], new: list[Conversation], wanted: DataConfig) -> None:
    """What is chosen out of more was chosen before, or is new; and it is in the split that it was in."""
    before = {one.prompt_key(): split for one, split in select(old, wanted, Counter())}
    known = {one.prompt_key() for one in old}
    for order in (old + new, new + old):
        for one, split in select(order, wanted, Counter()):
            if one.prompt_key() in before:
                assert before[one.prompt_key()] == split
            elif wanted.turns == "last":
                assert one.prompt_key() not in known


@RELAXED
@given(st.lists(CHATS, max_size=30), SETTINGS, st.integers(0, 9))
def test_no_root_is_in_both_splits_whatever_the_seed(chats: list[Conversation], wanted: DataConfig, seed: int) -> None:
    found = select(chats, wanted, Counter()) + select(chats, wanted.model_copy(update={"seed": seed}), Counter())
    assert len({(one.root, split) for one, split in found}) == len({one.root for one, _ in found})


def test_shares_and_samples_are_what_was_asked_for() -> None:
    chats = [chat(f"question {number}") for number in range(4000)]
    held = sum(split_of(one.root, 0.05) == "holdout" for one in chats)
    assert 150 < held < 250
    assert {split_of(one.root, 0.0) for one in chats} == {"train"}
    one, other = (select(chats, config(max_samples=1000, seed=seed), Counter()) for seed in (0, 1))
    assert len(one) == len(other) == 1000
    # Two independent choices of a quarter share a quarter.
    both = {found.key for found, _ in one} & {found.key for found, _ in other}
    assert 190 < len(both) < 310


def test_a_common_greeting_does_not_fill_the_sample() -> None:
    chats = [chat("hi", "hello", f"question {number}") for number in range(900)]
    chats += [chat(f"other {number}") for number in range(900)]
    for seed in range(3):
        greeted = sum(len(one.messages) > 1 for one, _ in select(chats, config(max_samples=200, seed=seed), Counter()))
        assert 60 < greeted < 140


def test_logs_that_grow_by_request() -> None:
    """For the last turn each request is a prompt of its own; for all turns only the longest is needed."""
    log = [chat("a"), chat("a", "b"), chat("a", "b", "c"), chat("a", "B"), chat("a", "b", "c", "d"), chat("z", "y")]
    rejected: Counter[str] = Counter()
    last = [one for one, _ in select(log, config(), rejected)]
    assert last == [log[0], log[2], log[5]] and rejected == {"duplicate": 3}
    rejected.clear()
    every = [one for one, _ in select(log, config(turns="all"), rejected)]
    assert every == [log[2], log[5]] and rejected == {"duplicate": 3, "part of a longer conversation": 1}
    rejected.clear()
    kept = [one for one, _ in select(log, config(turns="all", responses="keep"), rejected)]
    assert kept == [log[3], log[4], log[5]]
    assert rejected == {"no answer was recorded": 1, "part of a longer conversation": 2}


def test_recorded_answers_count_only_where_they_are_used() -> None:
    log = [chat("a", "b"), chat("a", "c"), chat("a"), chat("a", "b")]
    for responses, wanted, counted in (
        ("self", log[:1], {"duplicate": 3}),
        ("keep", log[:2], {"duplicate": 1, "no answer was recorded": 1}),
    ):
        rejected: Counter[str] = Counter()
        assert [one for one, _ in select(log, config(responses=responses), rejected)] == wanted
        assert rejected == counted
    assert len(select(log, config(deduplicate=False), Counter())) == 4


def test_what_is_measured_is_not_trained_on() -> None:
    log = [chat("a"), chat("A ", "b", "c"), chat("d")]
    rejected: Counter[str] = Counter()
    found = select(log, config(), rejected, evaluated=[chat("a", "other").root])
    assert [one for one, _ in found] == log[2:] and rejected == {"in the evaluation set": 2}


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_sample_keeps_the_order(size: int) -> None:
    chats = [chat(f"q{number}") for number in range(50)]
    places = [chats.index(one) for one, _ in select(chats, config(max_samples=size), Counter())]
    assert places == sorted(places) and len(places) == min(size, 50)
