"""A conversation: what somebody asked, in OpenAI's chat form, and what was answered if that was recorded.

Readers make these, the renderer turns them into tokens. Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

# OpenAI's chat form: role and content (always text), and where present name, tool_calls, tool_call_id and
# reasoning_content.
Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation, recorded turns of the assistant included.

    Attributes:
        key: digest of messages and tools.
        root: digest of the first user message, without regard to case and spacing. Conversations that grow out of one
            another share it: the held-out split goes by it.
        tools: what the assistant could call, in OpenAI's form.
        where: file and line, for messages to people.
        time: when it was logged, Unix seconds.
    """

    key: str
    root: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    where: str = ""
    time: float | None = None

    def prompt(self) -> tuple[Message, ...]:
        """The messages up to the recorded answer that ends it: what the verifier answers as its last turn."""
        return self.messages[:-1] if self.answer() else self.messages

    def answer(self) -> Message | None:
        """The recorded answer that ends it."""
        last = self.messages[-1]
        return last if last["role"] == "assistant" else None

    def prompt_key(self) -> str:
        """Digest of prompt and tools: the same for one prompt whatever was answered."""
        return key_of(self.prompt(), self.tools) if self.answer() else self.key


def conversation(
    messages: Sequence[Message], tools: Sequence[Tool] = (), *, where: str = "", time: float | None = None
) -> Conversation:
    """A conversation of these messages, with its digests. `messages` is not empty and every content is text.

    Raises:
        UnicodeEncodeError: half of a surrogate pair, which JSON can spell and no tokenizer takes.
    """
    return Conversation(key_of(messages, tools), _root_of(messages), tuple(messages), tuple(tools), where, time)


def key_of(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """sha256, in hex, of messages and tools."""
    spelled = b"".join(map(_spelled, messages))
    return hashlib.sha256(_canonical(tools) + spelled if tools else spelled).hexdigest()


def prefix_keys(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    """The key of the first message alone, of the first two, and so on up to all of them."""
    running = hashlib.sha256(_canonical(tools) if tools else b"")
    for message in messages:
        running.update(_spelled(message))
        yield running.hexdigest()


def _spelled(message: Message) -> bytes:
    """As bytes, with the content's length first, so that no two conversations spell the same."""
    role, content = message["role"].encode(), message["content"].encode()
    if len(message) == 2:
        return b"%s\0%d\0%s\0" % (role, len(content), content)
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    return b"%s\0%d\0%s%s\0" % (role, len(content), content, _canonical(rest))


def _root_of(messages: Sequence[Message]) -> str:
    first = next((message for message in messages if message["role"] == "user"), messages[0])
    text = first["content"]
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return hashlib.sha256(" ".join(text.casefold().split()).encode()).hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
