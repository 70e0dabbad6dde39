"""Rows in the forms people have them, as conversations; whatever else a row is gets a reason and no exception."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmtp.data.conversations import Conversation, conversation, key_of, prefix_keys
from fastmtp.data.formats import conversation_of
from fastmtp.data.messages import Unusable
from fastmtp.data.window import Window, moment_of

RELAXED = settings(deadline=None, derandomize=True)
ASKED = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWERED = {"id": "x", "created": 1_795_000_000, "choices": [{"index": 0, "message": SAID}]}


def read(row: object, form: str = "auto", **columns: str) -> Conversation:
    return conversation_of(row, form, columns, "f:1")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, SAID]},
        [ASKED, SAID],
        {"messages": json.dumps([ASKED, SAID])},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}], "id": 7}, SAID]},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"messages": {"role": ["user", "assistant"], "content": ["2+2?", "4"], "name": [None, None]}},
        {"conversations": [{"role": "user", "content": "2+2?"}, {"from": "GPT", "value": "4"}]},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [ASKED], "completion": [SAID]},
        {"question": "2+2?", "answer": "4"},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"input": "2+2?", "output": "4"},
        {"query": "2+2?", "response": "4"},
        {"text": "2+2?", "completion": "4"},
        # Request logs: chat completions as gateways keep them, nested or not, as JSON or as text of it.
        {"request": {"model": "m", "messages": [ASKED]}, "response": ANSWERED},
        {"request": {"body": {"messages": [ASKED]}}, "response": {"status_code": 200, "body": ANSWERED}},
        {"request": json.dumps({"messages": [ASKED]}), "response": json.dumps(ANSWERED)},
        {"messages": [ASKED], "response": ANSWERED},
        {"messages": [ASKED], "response": "4"},
        {"input": {"messages": [ASKED]}, "output": SAID},
        {"input": [ASKED], "output": SAID},
        {"request": {"model": "m", "input": "2+2?"}, "output": "4"},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [ASKED]},
         "response": {"status_code": 200, "body": ANSWERED}},
    ],
)  # fmt: skip
def test_every_form_gives_the_same_conversation(row: object) -> None:
    found = read(row)
    assert found.messages == (ASKED, SAID)
    assert found == conversation([ASKED, SAID], where="f:1", time=found.time)
    assert found.prompt() == (ASKED,) and found.answer() == SAID
    assert found.prompt_key() == conversation([ASKED]).key != found.key


def test_a_request_without_its_response_is_a_prompt() -> None:
    for row in (
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [ASKED]}},
        {"request": {"messages": [ASKED]}, "response": {"error": {"message": "overloaded"}}},
        {"request": {"messages": [ASKED]}, "response": 'data: {"choices": [{"delta": {"content": "4"}}]}'},
        {"request": {"messages": [ASKED]}, "response": {"choices": [{"message": {"role": "assistant"}}]}},
    ):
        found = read(row)
        assert found.messages == (ASKED,) and found.answer() is None and found.prompt_key() == found.key


def test_tools_reasoning_and_system_prompts_are_kept() -> None:
    turns = [ASKED, CALLS, {"role": "tool", "tool_call_id": "c1", "content": "4"}]
    answer = {"role": "assistant", "content": "4", "reasoning": "two and two", "refusal": None, "annotations": []}
    row = {
        "request": {"messages": turns, "tools": [TOOL], "system": "Be brief."},
        "response": {"choices": [{"message": answer}]},
    }  # noqa: E501
    found = read(row)
    assert found.messages == (
        {"role": "system", "content": "Be brief."}, ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    )  # fmt: skip
    assert found.tools == (TOOL,)
    bare = read({"messages": [ASKED], "tools": json.dumps([TOOL["function"]])})
    assert bare.tools == (TOOL,) and bare.key != read({"messages": [ASKED]}).key
    spoken = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'}
    chat = {
        "system": "s",
        "tools": "",
        "conversations": [{"from": "human", "value": "2+2?"}, spoken, {"from": "observation", "value": "4"}],
    }  # noqa: E501
    assert [message["role"] for message in read(chat).messages] == ["system", "user", "assistant", "tool"]
    assert read(chat).messages[2]["tool_calls"][0]["function"]["name"] == "add"


def test_columns_name_what_is_elsewhere() -> None:
    row = {
        "a": "2+2?",
        "b": "4",
        "deep": {"turns": [ASKED, SAID]},
        "sys": "s",
        "at": "2026-11-30T00:00:00Z",
        "text": "t",
    }
    assert read(row, prompt="a", completion="b").messages == (ASKED, SAID)
    assert read({**row, "messages": "no chat"}, prompt="a", completion="b").messages == (ASKED, SAID)
    found = read(row, messages="deep.turns", system="sys", time="at")
    assert found.messages == ({"role": "system", "content": "s"}, ASKED, SAID)
    assert found.time == datetime(2026, 11, 30, tzinfo=UTC).timestamp()
    assert read(row, "text").messages == ({"role": "user", "content": "t"},)
    with pytest.raises(Unusable, match="no column c"):
        read(row, prompt="c")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (3, "not an object"),
        ({"label": 1}, "no prompt field"),
        ({"prompt": "  "}, "no prompt text"),
        ({"prompt": 3}, "no prompt text"),
        ({"messages": []}, "messages is no list, or empty"),
        ({"messages": "hello"}, "messages is no list, or empty"),
        ({"messages": [3]}, "a message that is no object"),
        ({"messages": [{"content": "a"}]}, "a message without a role"),
        ({"messages": [{"role": "user", "content": None}]}, "a message without content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
         "content that is not text"),
        ({"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}, ASKED]},
         "a tool call without a function"),
        ({"messages": [ASKED], "tools": [1]}, "tools is no list of objects"),
        ({"messages": [SAID]}, "no user or tool message to answer"),
        ({"messages": [ASKED, SAID, SAID]}, "no user or tool message to answer"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "text that is no Unicode"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "an unknown speaker"),
        ({"custom_id": "1", "response": {"status_code": 200, "body": ANSWERED}}, "an answer without its request"),
        ({"custom_id": "1", "body": {"model": "m", "prompt": "once upon"}}, "no chat request"),
        ({"url": "/v1/embeddings", "body": {"model": "m", "input": "once upon"}}, "no chat request"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_has_a_reason(row: object, reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        read(row)
    assert str(caught.value) == reason


NAMES = st.sampled_from(
    [
        "messages", "conversations", "prompt", "completion", "text", "role", "content", "from", "value", "tools",
        "tool_calls", "function", "name", "request", "body", "input", "response", "output", "choices", "message",
        "time", "custom_id", "model", "instruction",
    ]
)  # fmt: skip
WORDS = st.sampled_from(["user", "assistant", "human", "gpt", "tool", "[", '{"messages": 1}', "2+2?", ""])
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)


@RELAXED
@given(JSON, st.sampled_from(["auto", "messages", "sharegpt", "completion", "text", "log"]))
def test_any_row_is_a_conversation_or_has_a_reason(row: object, form: str) -> None:
    try:
        found = read(row, form)
    except Unusable as error:
        assert 0 < len(str(error)) < 60
        return
    assert found.prompt() and all(isinstance(message["content"], str) for message in found.messages)
    assert found == conversation(found.messages, found.tools, where="f:1", time=found.time)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=3)
ROLES = st.sampled_from(["user", "assistant", "tool"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES, "content": TEXTS}, optional={"name": TEXTS}), min_size=1, max_size=4
)


@RELAXED
@given(MESSAGES, MESSAGES)
def test_digests_tell_conversations_apart_and_prefixes_have_their_own(one: list[Any], other: list[Any]) -> None:
    assert (key_of(one, ()) == key_of(other, ())) == (one == other)
    assert list(prefix_keys(one, [TOOL])) == [key_of(one[: end + 1], [TOOL]) for end in range(len(one))]


def test_roots_go_by_the_first_thing_asked() -> None:
    system = {"role": "system", "content": "s"}
    begun = read({"messages": [system, {"role": "user", "content": "How  ARE you\uff1f"}]})
    later = read({"messages": [{"role": "user", "content": "how are\nyou?"}, SAID, ASKED]})
    assert begun.root == later.root != read({"messages": [ASKED]}).root


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1_795_000_000, 1_795_000_000.0),
        (1_795_000_000_500, 1_795_000_000.5),
        (1_795_000_000_500_000, 1_795_000_000.5),
        (1_795_000_000_000_000_000, 1_795_000_000.0),
        ("1795000000", 1_795_000_000.0),
        ("2026-11-18T09:46:40Z", 1_794_995_200.0),
        ("2026-11-18 10:46:40+01:00", 1_794_995_200.0),
        ("2026-11-18T09:46:40", 1_794_995_200.0),
        (datetime(2026, 11, 18, 9, 46, 40), 1_794_995_200.0),
        (3.2, None), (True, None), ("soon", None), (None, None), (float("inf"), None), (1e30, None),
    ],
)  # fmt: skip
def test_times_as_logs_write_them(value: object, seconds: float | None) -> None:
    assert moment_of(value) == seconds


def test_windows() -> None:
    now = 1_795_000_000.0
    week = Window.of("7d", None, now)
    assert week.holds(now - 7 * 86400) and not week.holds(now - 7 * 86400 - 1) and not week.open
    day = Window.of("2026-11-18", "2026-11-19")
    assert day.holds(moment_of("2026-11-18T00:00:00Z") or 0) and not day.holds(moment_of("2026-11-19T00:00:00Z") or 0)
    assert Window.of(None, None).open
    for since, until in (("2026-13-01", None), ("2026-11-19", "2026-11-19"), ("1d", "7d")):
        with pytest.raises(ValueError, match=r"no date|not before"):
            Window.of(since, until)
