"""Generated tokens back to messages, and that such a message renders as what was generated."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastmtp.data.conversations import Message
from fastmtp.data.rendering import Renderer
from tests.fastmtp.data.chat import DROPS, OPENS, PLAIN, renderer

ASKED: list[Message] = [{"role": "user", "content": "a"}]
PARAMETERS = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "object"}}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "2"}}\n</tool_call>'
FUNCTION_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
FUNCTION_CALL += "</function>\n</tool_call>"


def message(made: Renderer, text: str, prompt: list[int] | None = None) -> Message:
    ids = made.tokenizer(text, add_special_tokens=False)["input_ids"]
    return made.message_of(ids, TOOLS, prompt_ids=prompt or [])


def test_plain_text_is_the_content() -> None:
    """Also where it was cut, and not where it only looks like something else."""
    made = renderer(PLAIN)
    for text in ("b", " b\n", "1 < 2", "<tool_call>\nno call\n</tool_call>", '<tool_call>\n{"a": 1}\n</tool_call>'):
        assert message(made, text) == message(made, f"{text}<|im_end|>") == {"role": "assistant", "content": text}


@pytest.mark.parametrize("call", [JSON_CALL, FUNCTION_CALL])
def test_calls_are_parsed(call: str) -> None:
    found = message(renderer(PLAIN), f"Let me see.\n{call}\n{call}<|im_end|>")
    assert found["content"] == "Let me see."
    assert [one["id"] for one in found["tool_calls"]] == ["call_0", "call_1"]
    for one in found["tool_calls"]:
        assert (one["type"], one["function"]["name"]) == ("function", "add")
        assert json.loads(one["function"]["arguments"]) == {"a": 1, "b": "2"}


def test_one_call_that_does_not_parse_leaves_all_as_written() -> None:
    text = f"{JSON_CALL}\n<tool_call>\n{{broken\n</tool_call>"
    assert message(renderer(PLAIN), text) == {"role": "assistant", "content": text}


def test_an_argument_that_is_not_of_its_type_stays_text() -> None:
    call = FUNCTION_CALL.replace("\n1\n", "\none\n").replace("<parameter=b>", "<parameter=unknown>")
    found = message(renderer(PLAIN), call)
    assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == {"a": "one", "unknown": "2"}


def test_thinking_is_split_off() -> None:
    """Opened by the answer, by the prompt, and never closed."""
    opens, drops = renderer(OPENS), renderer(DROPS)
    prompt = opens.prompt_ids(ASKED)
    thought = {"role": "assistant", "content": "b", "reasoning_content": "x\ny"}
    assert message(drops, "<think>\nx\ny\n</think>\n\nb<|im_end|>") == thought
    assert message(opens, "x\ny\n</think>\n\nb<|im_end|>", prompt) == thought
    assert message(opens, "x\ny", prompt) == thought | {"content": ""}
    assert message(drops, "<think>\nx\ny") == thought | {"content": ""}
    closed = renderer(OPENS, enable_thinking=False).prompt_ids(ASKED)
    assert message(opens, "b<|im_end|>", closed) == {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (PLAIN, "b"),
        (PLAIN, f"b\n{JSON_CALL}"),
        (DROPS, "<think>\nx\n</think>\n\nb"),
        (OPENS, "x\n</think>\n\nb"),
        (OPENS, f"x\n</think>\n\nb\n{FUNCTION_CALL}"),
    ],
)
def test_a_message_renders_as_it_was_generated(template: str, answer: str) -> None:
    """What is answered next is asked on the very tokens that were said."""
    made = renderer(template)
    prompt = made.prompt_ids(ASKED, TOOLS)
    ids = made.tokenizer(f"{answer}<|im_end|>", add_special_tokens=False)["input_ids"]
    after = [*ASKED, made.message_of(ids, TOOLS, prompt_ids=prompt)]
    if "<tool_call>" in answer:
        after.append({"role": "tool", "content": "3"})
        assert made.prompt_ids(after, TOOLS)[: len(prompt + ids)] == prompt + ids
    elif template == PLAIN:
        assert made.prompt_ids([*after, *ASKED], TOOLS)[: len(prompt + ids)] == prompt + ids
    else:
        assert made.tokenizer.decode(made.prompt_ids([*after, *ASKED], TOOLS)).count("<think>\nx") == 0
