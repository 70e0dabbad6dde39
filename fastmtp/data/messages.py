"""Messages and tools in OpenAI's chat form, out of the spellings that data sets and clients have.

Content is text: parts of text are joined by line breaks, as vLLM does for templates that take text. Fields other than
role, content, name, tool_calls, tool_call_id and reasoning_content are left out. Loads no torch.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from fastmtp.data.conversations import Message, Tool

_KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content")
_TEXT = ("text", "input_text", "output_text")
_SPEAKERS = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant", "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool", "function": "tool",
}  # fmt: skip


class Unusable(ValueError):
    """A row that is no conversation. Its text is a short reason to count rows by."""


def messages_of(value: object) -> list[Message]:
    """Messages in OpenAI's form or ShareGPT's: a list, or a list per field as `datasets` has it. Raises Unusable."""
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        value = [
            {name: item for name, item in zip(value, row, strict=True) if item is not None}
            for row in itertools.zip_longest(*value.values())
        ]
    if not isinstance(value, list) or not value:
        raise Unusable("messages is no list, or empty")
    return [message_of(raw) for raw in value]


def message_of(raw: object) -> Message:
    """One message. Raises Unusable."""
    if not isinstance(raw, dict):
        raise Unusable("a message that is no object")
    role, content = raw.get("role"), raw.get("content")
    if type(content) is str and type(role) is str and role and len(raw) == 2:
        return raw
    if role is None and "from" in raw:
        return _spoken(raw)
    if not isinstance(role, str) or not role:
        raise Unusable("a message without a role")
    kept = {name: raw[name] for name in _KEPT if raw.get(name)}
    # What newer servers and clients call it.
    if "reasoning_content" not in kept and isinstance(raw.get("reasoning"), str) and raw["reasoning"]:
        kept["reasoning_content"] = raw["reasoning"]
    if isinstance(raw.get("function_call"), dict) and "tool_calls" not in kept:
        kept["tool_calls"] = [{"type": "function", "function": raw["function_call"]}]
    if content is None and not (role == "assistant" and kept):
        raise Unusable("a message without content")
    if not all(isinstance(kept.get(name, ""), str) for name in ("name", "tool_call_id", "reasoning_content")):
        raise Unusable("a message with a field that is not text")
    if "tool_calls" in kept:
        _require_calls(kept["tool_calls"])
    return {"role": role, "content": _text(content), **kept}


def assistant(message: Message) -> Message | None:
    """The message, if it says something or calls a tool."""
    return message if message["content"] or "tool_calls" in message or "reasoning_content" in message else None


def tools_of(value: object) -> tuple[Tool, ...]:
    """Tools in OpenAI's form; bare functions are wrapped. Raises Unusable."""
    if value is None or value == "":
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Unusable("tools is no list of objects")
    return tuple(
        {"type": "function", "function": tool} if "name" in tool and "function" not in tool else tool for tool in value
    )


def _spoken(raw: dict[str, Any]) -> Message:
    """One turn in ShareGPT's form."""
    speaker = raw["from"]
    role = _SPEAKERS.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise Unusable("an unknown speaker")
    text = _text(raw.get("value", raw.get("content")))
    if speaker == "function_call":
        try:
            call = json.loads(text)
        except ValueError:
            call = None
        calls = call if isinstance(call, list) else [call]
        wrapped = [{"type": "function", "function": one} for one in calls]
        _require_calls(wrapped)
        return {"role": role, "content": "", "tool_calls": wrapped}
    return {"role": role, "content": text}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise Unusable("content that is not text")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") in _TEXT else part
        if not isinstance(text, str):
            raise Unusable("content that is not text")
        texts.append(text)
    return "\n".join(texts)


def _require_calls(calls: object) -> None:
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unusable("a tool call without a function")
