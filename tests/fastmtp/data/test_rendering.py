"""Whose each token is, with the templates of the Qwen families: masks made by hand, written as marks in the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmtp.data.conversations import Conversation, Message, conversation
from fastmtp.data.rendering import Rejected, Renderer
from fastmtp.errors import DataError
from tests.fastmtp.data.chat import DROPS, OPENS, PLAIN, marked, renderer, tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, thought: str = "") -> Message:
    return {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})


def talk(*messages: Message, tools: Sequence[dict[str, object]] = ()) -> Conversation:
    return conversation(messages, tools)


TWO = talk(user("a"), said("b"), user("c"), said("d"))
THOUGHT = talk(user("a"), said("b", "x"), user("c"), said("d", "y"), user("e"), said("f", "z"))
UNTHOUGHT = talk(user("a"), said("b"), user("c"), said("d"), user("e"), said("f"))


def texts(made: Renderer, talk: Conversation, turns: str = "all", **limits: int) -> list[str]:
    return [marked(made, row) for row in made.answered_rows(talk, turns, **limits)]  # type: ignore[arg-type]


def test_a_mask_made_by_hand() -> None:
    """Case D1: a template without generation tags, two turns: ones exactly on the answers and what ends them."""
    (row,) = renderer(PLAIN).answered_rows(TWO, "all")
    opened, asked = 1 + len("assistant\n"), 1 + len("user\na") + 1 + len("\n")
    assert row.mask == [False] * (asked + opened) + [True] * 2 + [False] * (1 + asked + opened) + [True] * 2
    assert (row.turns, row.turn, row.finish) == ((1, 3), 3, "stop")


def test_turns_that_only_grow_are_one_row() -> None:
    whole = (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[[d<|im_end|>]]"
    )
    assert texts(renderer(PLAIN), TWO) == [whole]
    assert texts(renderer(PLAIN), TWO, "last") == [whole.replace("[[b<|im_end|>]]", "b<|im_end|>")]


@pytest.mark.parametrize("template", [DROPS, OPENS])
def test_dropped_thinking_gives_a_row_for_each_turn(template: str) -> None:
    """Case D2: what a later rendering drops is still what the verifier said in its own turn."""
    opened = "<|im_start|>assistant\n" + ("[[<think>\n" if template == DROPS else "<think>\n[[")
    past = ["<|im_start|>user\na<|im_end|>\n"]
    past.append(past[0] + "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n")
    past.append(past[1] + "<|im_start|>assistant\nd<|im_end|>\n<|im_start|>user\ne<|im_end|>\n")
    own = ["x\n</think>\n\nb<|im_end|>]]", "y\n</think>\n\nd<|im_end|>]]", "z\n</think>\n\nf<|im_end|>]]"]
    expected = [before + opened + answer for before, answer in zip(past, own, strict=True)]
    made = renderer(template)
    assert texts(made, THOUGHT) == expected
    assert texts(made, THOUGHT, "last") == expected[-1:]
    assert [row.turn for row in made.answered_rows(THOUGHT, "all")] == [1, 3, 5]


@pytest.mark.parametrize("template", [DROPS, OPENS])
def test_empty_thinking_of_the_generation_prompt_is_never_supervised(template: str) -> None:
    """Case D2."""
    rows = texts(renderer(template, enable_thinking=False), UNTHOUGHT)
    assert [row.count("<think>\n\n</think>\n\n[[") for row in rows] == [1, 1, 1]
    assert [row.partition("[[")[2] for row in rows] == ["b<|im_end|>]]", "d<|im_end|>]]", "f<|im_end|>]]"]


def test_empty_thinking_that_the_template_adds_is_not_the_assistants() -> None:
    """Nothing was thought; the generation prompt says nothing about it, but the answered turn has an empty block."""
    (row,) = texts(renderer(DROPS), UNTHOUGHT, "last")
    assert row.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n[[f<|im_end|>]]")


def test_unstable_rendering_is_rejected_with_a_reason() -> None:
    """Case D2: the prompt opens a block, the answer closes it at once: the two line feeds are one token."""
    with pytest.raises(Rejected, match="tokens run across") as caught:
        renderer(OPENS).answered_rows(UNTHOUGHT, "last")
    assert caught.value.reason == "unstable rendering" and "enable_thinking" in caught.value.mend
    with pytest.raises(Rejected, match="otherwise than the prompt") as caught:
        renderer(PLAIN + "{% if add_generation_prompt %}Answer: {% endif %}").answered_rows(TWO, "last")
    assert caught.value.reason == "unstable rendering"


def test_a_call_and_its_result_stay_in_one_row() -> None:
    called = said("", "x") | {"tool_calls": [CALL]}
    made = talk(user("a"), called, {"role": "tool", "content": "2"}, said("b", "y"), tools=TOOLS)
    (row,) = texts(renderer(OPENS), made)
    assert row.startswith('<|im_start|>system\nYou can call:\n{"type": "function"')
    assert row.endswith(
        "<think>\n[[x\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        "<|im_end|>]]\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n[[y\n</think>\n\nb<|im_end|>]]"
    )
    (row,) = texts(renderer(PLAIN), made)
    assert '[[<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>]]' in row


def test_a_cut_answer_keeps_its_tokens() -> None:
    """Case D1: truncation inside an answer, and inside a later turn's prompt."""
    made, long = renderer(PLAIN), talk(user("a"), said("bcdef"), user("g"), said("h"))
    (row,) = made.answered_rows(long, "all")
    begin, end = row.spans[0]
    for length, own, finish in ((begin + 3, "bcd", "length"), (end + 4, "bcdef<|im_end|>", "stop")):
        (shorter,) = made.answered_rows(long, "all", length)
        assert len(shorter.ids) == min(length, end) and (shorter.turns, shorter.finish) == ((1,), finish)
        assert marked(made, shorter).endswith(f"[[{own}]]")
    with pytest.raises(Rejected) as caught:
        made.answered_rows(long, "all", begin)
    assert caught.value.reason == "prompt too long"


def test_what_cannot_be_rendered_is_rejected_and_the_others_are_not() -> None:
    made = renderer(DROPS)
    many = [THOUGHT, talk({"role": "system", "content": "s"}), talk(said("b")), TWO]
    found = list(made.all_answered_rows(many, "last"))
    assert [one.reason for one in found if isinstance(one, Rejected)] == [
        "no answer recorded", "refused by the chat template",
    ]  # fmt: skip
    assert [found[0], found[3]] == [made.answered_rows(one, "last") for one in (THOUGHT, TWO)]
    prompts = list(made.prompts_ids([(one.messages[:1], one.tools) for one in many]))
    assert [isinstance(one, Rejected) for one in prompts] == [False, True, True, False]
    assert prompts[0] == made.prompt_ids(THOUGHT.messages[:1])
    assert made.tokenizer.decode(prompts[0]) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(DataError, match="has no chat template"):
        Renderer(tokenizer(""))


def test_a_model_is_read_with_all_that_ends_its_answers(tmp_path: Path) -> None:
    """Case D1: the tokenizer's own token alone would miss the end of a turn that another one ends."""
    with pytest.raises(DataError, match="has no tokenizer that loads"):
        Renderer.of(tmp_path)
    tokenizer(PLAIN).save_pretrained(tmp_path)
    first = Renderer.of(tmp_path).ends
    other = tokenizer(PLAIN).convert_tokens_to_ids("<|endoftext|>")
    for eos in (other, [other, *first]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert Renderer.of(tmp_path).ends == first | {other}


_WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>|", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(st.tuples(_WORDS, _WORDS), min_size=1, max_size=4))
def test_any_conversation_is_supervised_at_its_answers_alone(turns: list[tuple[str, str]]) -> None:
    messages = [message for asked, answer in turns for message in (user(asked), said(answer))]
    try:
        (row,) = _PLAIN.answered_rows(talk(*messages), "all")
    except Rejected as rejected:
        assert rejected.reason == "unstable rendering"
        assert any(answer.startswith("\n") for _, answer in turns)
        return
    own = [_PLAIN.tokenizer.decode(row.ids[begin:end]) for begin, end in row.spans]
    assert own == [f"{answer}<|im_end|>" for _, answer in turns]
    assert row.ids[: len(_PLAIN.prompt_ids(messages[:-1]))] == _PLAIN.prompt_ids(messages[:-1])


_PLAIN = renderer(PLAIN)
