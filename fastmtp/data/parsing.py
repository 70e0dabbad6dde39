"""What the verifier wrote, back as a message: thinking split off, calls of tools parsed.

Two forms of calls are known, both inside <tool_call>: a JSON object with name and arguments (Qwen3, Qwen3-Next), and
<function=NAME> with one <parameter=KEY> for each argument (Qwen3-Coder, Qwen3.5). What does not parse stays in the
content as it was written. Loads no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from fastmtp.data.conversations import Message, Tool

OPEN, CLOSE = "<think>", "</think>"
EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def parse_answer(text: str, tools: Sequence[Tool] = (), *, thinking: bool = False) -> Message:
    """The assistant's message that this text says; `thinking`: the prompt had opened a thinking block."""
    reasoning, content = _split_thinking(text, thinking)
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = [_call(found[1], tools) for found in _CALL.finditer(content)]
    if calls and all(calls):
        message["content"] = _CALL.sub("", content).strip()
        message["tool_calls"] = [
            {"id": f"call_{number}", "type": "function", "function": call} for number, call in enumerate(calls)
        ]
    return message


def _split_thinking(text: str, thinking: bool) -> tuple[str, str]:
    opened = thinking or text.lstrip().startswith(OPEN)
    before, closed, after = text.partition(CLOSE)
    if closed:
        return before.lstrip().removeprefix(OPEN).strip("\n"), after.lstrip("\n")
    return (text.lstrip().removeprefix(OPEN).strip("\n"), "") if opened else ("", text)


def _call(text: str, tools: Sequence[Tool]) -> dict[str, str] | None:
    """Name, and arguments as JSON text; None when it is no call."""
    if found := _FUNCTION.fullmatch(text):
        name = found[1]
        types = _types(name, tools)
        arguments: Any = {key: _value(value, types.get(key, "string")) for key, value in _PARAMETER.findall(found[2])}
    else:
        try:
            value = json.loads(text)
        except ValueError:
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        name, arguments = value["name"], value.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": name, "arguments": written}


def _types(name: str, tools: Sequence[Tool]) -> dict[str, str]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: str(about.get("type", "string")) for key, about in properties.items()}
    return {}


def _value(text: str, kind: str) -> Any:  # noqa: ANN401 - any JSON value
    """An argument by the type that the tool declares; text where none is, or where it does not parse."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
