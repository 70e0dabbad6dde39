"""Answers of the batch API, which lie in files of their own, put to their requests by `custom_id`.

Only where recorded answers are used: requests wait in memory until every source is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastmtp.data.conversations import Conversation, Message, conversation
from fastmtp.data.formats import answer_of


class Batches:
    """Requests without an answer, and answers without a request, of one reading."""

    def __init__(self) -> None:
        self._asked: dict[str, list[Conversation]] = {}
        self._answers: dict[str, list[Message]] = {}

    def __bool__(self) -> bool:
        return bool(self._asked or self._answers)

    def waits(self, value: object, one: Conversation) -> bool:
        """Keep the conversation of a row until its answer is read; False where it has one, or none will come."""
        name = _name(value)
        if name is None or one.answer() is not None:
            return False
        self._asked.setdefault(name, []).append(one)
        return True

    def answers(self, value: object) -> bool:
        """Keep the answer that a row is; False where it is none."""
        name, answer = _name(value), answer_of(value)
        if name is None or answer is None:
            return False
        self._answers.setdefault(name, []).append(answer)
        return True

    def joined(self) -> Iterator[Conversation]:
        """Those that waited, with their answers; without where none came, or a name that two batches use tells none."""
        for name, asked in self._asked.items():
            answers = self._answers.get(name, [])
            for one in asked:
                known = len(asked) == len(answers) == 1
                messages = [*one.messages, *answers] if known else one.messages
                yield conversation(messages, one.tools, where=one.where, time=one.time)


def _name(value: object) -> str | None:
    name = value.get("custom_id") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None
