"""One row, in any of the forms people have, as a conversation; or the reason why it is none.

    messages     OpenAI's chat form: {"messages": [{"role", "content"}, ...], "tools": [...]}
    sharegpt     {"conversations": [{"from": "human", "value"}, ...]}
    completion   {"prompt", "completion"}, {"question", "answer"}, {"instruction", "input", "output"}, ...
    text         {"text"}: what a user says
    log          a stored request, below "request", "body", "input" or at the top, and its response beside it if kept;
                 lines of the batch API are such

Loads no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastmtp.data.conversations import Conversation, Message, Tool, conversation
from fastmtp.data.messages import Unusable, assistant, message_of, messages_of, tools_of
from fastmtp.data.window import moment_of

# Our names of what pairs of prompt and answer are called; the first that a row has counts.
_PROMPTS = ("prompt", "question", "instruction", "query", "input")
_ANSWERS = ("completion", "answer", "response", "output")
_TIMES = (
    "time", "timestamp", "created", "created_at", "createdAt", "ts", "@timestamp", "datetime", "date", "logged_at",
    "request_time", "start_time", "startTime",
)  # fmt: skip
_CHATS = ("conversations", "conversation")
# What a log keeps a request below; the first are the names that nothing else has.
_BODIES = ("request", "body", "request_body")
_REQUESTS = (*_BODIES, "input", "payload", "params", "kwargs")
_ENDPOINTS = ("url", "path", "endpoint")
_NO_CHAT = ("/embeddings", "/rerank", "/score", "/pooling", "/classify", "/tokenize", "/moderations")
_RESPONSES = ("response", "output", "response_body", "body", "result")
_DEPTH = 4

Row = dict[str, Any]
_Parts = tuple[list[Message], Sequence[Tool], float | None]


def conversation_of(value: object, form: str, columns: Mapping[Any, str], where: str) -> Conversation:
    """The conversation of a row.

    Args:
        form: one of the names above, or auto: told from the row.
        columns: our name of a column -> the row's; a dot leads into it (`request.messages`).
        where: file and line.

    Raises:
        Unusable: with the reason.
    """
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise Unusable("not an object")
    row = _renamed(value, columns) if columns else value
    if form == "auto":
        # Who names a column means that one, whatever else a row has.
        form = "completion" if "prompt" in columns else _told(row)
    messages, tools, time = _FORMS[form](row)
    last = messages[-2 if messages[-1]["role"] == "assistant" and len(messages) > 1 else -1]["role"]
    if last not in ("user", "tool", "function"):
        raise Unusable("no user or tool message to answer")
    try:
        return conversation(messages, tools, where=where, time=time)
    except UnicodeEncodeError as error:
        raise Unusable("text that is no Unicode") from error


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """The row with the columns under our names. Raises Unusable where it has none of those that hold prompts."""
    found = {ours: _at(row, theirs) for ours, theirs in columns.items()}
    for ours in ("messages", "prompt"):
        if ours in found and found[ours] is None:
            raise Unusable(f"no column {columns[ours]}")
    return {**row, **{ours: value for ours, value in found.items() if value is not None}}


def _at(row: Row, path: str) -> Any:  # noqa: ANN401 - JSON
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        value = _json(value)
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _told(row: Row) -> str:
    """The form of a row."""
    if "messages" in row:
        return "log" if any(isinstance(row.get(name), dict | str) for name in ("response", "output")) else "messages"
    if any(name in row for name in _CHATS):
        return "sharegpt"
    kept = any(isinstance(_json(row.get(name)), dict) for name in _BODIES)
    if kept or "custom_id" in row or _find(row, _REQUESTS, _is_request) is not None:
        return "log"
    return "text" if "text" in row and not any(name in row for name in _PROMPTS) else "completion"


def _from_messages(row: Row) -> _Parts:
    if "messages" not in row:
        raise Unusable("no messages")
    messages = _with_system(messages_of(_json(row["messages"])), row.get("system"))
    return messages, tools_of(_json(_tools(row))), time_of(row)


def _from_sharegpt(row: Row) -> _Parts:
    turns = next((row[name] for name in ("messages", *_CHATS) if name in row), None)
    if turns is None:
        raise Unusable("no conversations")
    return _with_system(messages_of(_json(turns)), row.get("system")), tools_of(_json(_tools(row))), time_of(row)


def _from_completion(row: Row) -> _Parts:
    field = next((name for name in _PROMPTS if row.get(name) is not None), None)
    if field is None:
        raise Unusable("no prompt field")
    prompt = row[field]
    if isinstance(prompt, list):
        messages = messages_of(prompt)
    elif not isinstance(prompt, str) or not prompt.strip():
        raise Unusable("no prompt text")
    else:
        if field == "instruction" and isinstance(row.get("input"), str) and row["input"].strip():
            prompt = f"{prompt}\n{row['input']}"
        messages = [{"role": "user", "content": prompt}]
    answer = next((row[name] for name in _ANSWERS if row.get(name) is not None), None)
    if isinstance(answer, list):
        messages = messages + messages_of(answer)
    elif isinstance(answer, str):
        messages = [*messages, {"role": "assistant", "content": answer}]
    return _with_system(messages, row.get("system")), tools_of(_json(_tools(row))), time_of(row)


def _from_text(row: Row) -> _Parts:
    text = row.get("prompt", row.get("text"))
    if not isinstance(text, str) or not text.strip():
        raise Unusable("no prompt text")
    answer = row.get("completion")
    said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else []
    return _with_system([{"role": "user", "content": text}, *said], row.get("system")), (), time_of(row)


def _from_log(row: Row) -> _Parts:
    request = row if _is_request(row) else _find(row, _REQUESTS, _is_request)
    if request is None:
        answered = _find(row, _RESPONSES, _is_response) is not None
        raise Unusable("an answer without its request" if answered else "no chat request")
    if any(str(row.get(name, "")).partition("?")[0].rstrip("/").endswith(_NO_CHAT) for name in _ENDPOINTS):
        raise Unusable("no chat request")
    if isinstance(request, list):
        request = {"messages": request}
    system = request.get("system", request.get("instructions"))
    asked = _json(request.get("messages", request.get("input")))
    said = [{"role": "user", "content": asked}] if isinstance(asked, str) else messages_of(asked)
    messages = _with_system(said, system)
    response = _find(row, _RESPONSES, _is_response)
    answer = _answer(response) if response else _said(row)
    if answer is not None and messages[-1]["role"] != "assistant":
        messages = [*messages, answer]
    time = time_of(row) or time_of(request) or time_of(response)
    return messages, tools_of(_json(_tools(request))), time


_FORMS: dict[str, Callable[[Row], _Parts]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "completion": _from_completion,
    "text": _from_text,
    "log": _from_log,
}


def _with_system(messages: list[Message], system: object) -> list[Message]:
    """With the row's system prompt before them, where they have none of their own."""
    if not isinstance(system, str) or not system.strip() or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _tools(row: Row) -> Any:  # noqa: ANN401 - JSON
    return row.get("tools") or row.get("functions")


def time_of(row: object) -> float | None:
    """When a row was logged, Unix seconds; None where nothing tells."""
    if not isinstance(row, dict):
        return None
    for name in _TIMES:
        if name in row and (moment := moment_of(row[name])) is not None:
            return moment
    return None


def answer_of(row: object) -> Message | None:
    """The answer that a row records, if it does."""
    return _answer(_find(row, _RESPONSES, _is_response))


def _is_request(value: object) -> bool:
    """Whether this is what a client sends: to chat completions, to the responses API, or messages alone."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict) and "role" in value[0]
    if not isinstance(value, dict):
        return False
    return "messages" in value or ("model" in value and isinstance(value.get("input"), list | str))


def _is_response(value: object) -> bool:
    if isinstance(value, dict):
        return bool(value.get("choices")) or value.get("role") == "assistant"
    return False


def _answer(response: Any) -> Message | None:  # noqa: ANN401 - JSON
    """The first choice's message, if it is whole and says something."""
    if not isinstance(response, dict):
        return None
    choices = response.get("choices")
    found = choices[0].get("message") if isinstance(choices, list) and isinstance(choices[0], dict) else response
    if not isinstance(found, dict):
        return None
    try:
        return assistant(message_of({**found, "role": "assistant"}))
    except Unusable:
        return None


def _said(row: Row) -> Message | None:
    """An answer kept as plain text; not one kept as the events of a stream."""
    said = next((row[name] for name in ("response", "output") if isinstance(row.get(name), str)), "")
    return {"role": "assistant", "content": said} if said.strip() and not said.startswith("data:") else None


def _find(value: object, names: Sequence[str], wanted: Callable[[object], bool], depth: int = _DEPTH) -> Any:  # noqa: ANN401
    """The first value below `names`, at any depth up to four, that is what is wanted; None where there is none."""
    if not isinstance(value, dict) or not depth:
        return None
    for name in names:
        if name in value:
            inner = _json(value[name])
            found = inner if wanted(inner) else _find(inner, names, wanted, depth - 1)
            if found is not None:
                return found
    return None


def _json(value: Any) -> Any:  # noqa: ANN401 - JSON
    """The value, or what it spells where it is JSON in a string, as tables and logs often keep it."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
