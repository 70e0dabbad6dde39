"""Conversations that the verifier answers, turn by turn, its own earlier answers being the history.

Round r asks for the r-th answer of every conversation at once. A conversation ends early where its next recorded
message does not go on from what the verifier said: the result of a tool that it did not call, or anything after an
answer that was cut off.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastmtp.config import DataConfig
from fastmtp.data.answers import Engine, Journal, row_id, seed_of
from fastmtp.data.conversations import Conversation, Message
from fastmtp.data.rendering import Rejected, Renderer
from fastmtp.progress import Reporter
from fastmtp.servers.client import Answer, Request

if TYPE_CHECKING:
    from torch import Tensor

MIN_ANSWER = 3  # a row whose answer is shorter gives no second draft to learn


@dataclass(frozen=True)
class Turn:
    """An answered turn: place of the answer in the conversation, what was asked, what the verifier said.

    Attributes:
        message: the answer as a message, reasoning and calls of tools split off.
        states: [n, H] of prompt and answer, where the engine had room to keep them.
    """

    place: int
    prompt: tuple[int, ...]
    answer: Answer
    message: Message
    states: Tensor | None

    @property
    def finish(self) -> str:
        """stop, length or tool_calls."""
        return "tool_calls" if self.answer.finish == "stop" and self.message.get("tool_calls") else self.answer.finish


@dataclass
class Dialogue:
    """One conversation on its way.

    Attributes:
        name: of the prompt, for the identity of its rows; a prompt that is there again has another.
        places: of the answers that are still to come.
        history: messages before the next of them.
        turns: answered so far.
        left_out: why turns were not, or why it ended.
    """

    conversation: Conversation
    split: str
    name: str
    places: list[int]
    history: list[Message]
    turns: list[Turn] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def follow(self, turn: Turn) -> None:
        """Take an answer, and go on to the next turn that is to be answered if there is one."""
        if len(turn.answer.token_ids) < MIN_ANSWER:
            self.left_out.append("answer too short")
        else:
            self.turns.append(turn)
        del self.places[0]
        if not self.places:
            return
        recorded, end = self.conversation.messages, self.places[0]
        if turn.answer.finish == "length":
            self.end("after an answer that was cut off")
        elif recorded[turn.place + 1]["role"] == "tool" and _called(turn.message) != _called(recorded[turn.place]):
            self.end("result of a tool that was not called")
        else:
            self.history += [turn.message, *recorded[turn.place + 1 : end]]

    def end(self, reason: str) -> None:
        """Answer no more of it."""
        self.left_out += [reason] * len(self.places)
        self.places = []


def begin(chosen: Sequence[tuple[Conversation, str]], *, every_turn: bool) -> list[Dialogue]:
    """Dialogues of some (conversation, split), with every turn to answer or the last."""
    seen: Counter[str] = Counter()
    dialogues = []
    for conversation, split in chosen:
        key = conversation.prompt_key()
        messages = conversation.messages
        places = answer_places(messages) if every_turn else [len(conversation.prompt())]
        history = list(messages[: places[0]]) if places else []
        dialogues.append(Dialogue(conversation, split, f"{key}:{seen[key]}", places, history))
        seen[key] += 1
    return dialogues


def answer_places(messages: Sequence[Message]) -> list[int]:
    """Places in a conversation where the assistant answers: its recorded turns, and the end if a turn is due there."""
    asks = ("user", "tool")
    return [
        place
        for place in range(1, len(messages) + 1)
        if messages[place - 1]["role"] in asks
        and (place == len(messages) or messages[place]["role"] == "assistant")
    ]  # fmt: skip


def _called(message: Message) -> list[str]:
    return [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]


class Asking:
    """Asks an engine for the answers of many dialogues, and keeps each in a journal as it comes.

    Args:
        states_bytes: most bytes of states to keep in memory for later.
    """

    def __init__(
        self, renderer: Renderer, config: DataConfig, journal: Journal, reporter: Reporter, states_bytes: int
    ) -> None:
        self._renderer, self._config, self._journal, self._reporter = renderer, config, journal, reporter
        self._room = states_bytes
        self._states: dict[str, Tensor] = {}
        self._spent, self._since = 0.0, math.inf
        self._done = self._rows = self._tokens = 0

    def run(self, dialogues: Sequence[Dialogue], engine: Engine, on_sized: Callable[[int, int], None]) -> None:
        """Answer every turn of all. Where an answer is in the journal already, nobody is asked.

        Args:
            on_sized: hears how many tokens the rows of the first round have at least and at most, before it begins.
        """
        total = sum(len(dialogue.places) for dialogue in dialogues)
        self._reporter.phase(f"the verifier answers ({engine.name})", total, "prompts")
        going = [dialogue for dialogue in dialogues if dialogue.places]
        while going:
            asked = [(dialogue, ids) for dialogue, ids in self._rendered(going) if ids]
            if self._done == 0:
                lengths = [len(ids) for _, ids in asked]
                on_sized(
                    sum(length + MIN_ANSWER for length in lengths),
                    sum(length + room_for(length, self._config) for length in lengths),
                )
            self._round(asked, engine)
            going = [dialogue for dialogue, _ in asked if dialogue.places]
            self._done = total - sum(len(dialogue.places) for dialogue in going)
            self._advance()

    def figures(self) -> dict[str, float]:
        """Rows and tokens answered by this run, and per second of answering; starting an engine is not counted."""
        seconds = max(self._spent + max(0.0, time.monotonic() - self._since), 1e-9)
        return {
            "rows_answered": self._rows, "answer_rows_per_second": round(self._rows / seconds, 2),
            "answer_tokens_per_second": round(self._tokens / seconds, 1),
        }  # fmt: skip

    def _rendered(self, going: Sequence[Dialogue]) -> list[tuple[Dialogue, list[int]]]:
        """Each dialogue with the ids of its next prompt; one whose prompt cannot be used ends, with no ids."""
        prompts = [(dialogue.history, dialogue.conversation.tools) for dialogue in going]
        found: list[tuple[Dialogue, list[int]]] = []
        for dialogue, ids in zip(going, self._renderer.prompts_ids(prompts), strict=True):
            reason = ids.reason if isinstance(ids, Rejected) else length_fault(len(ids), self._config)
            if reason:
                dialogue.end(reason)
            found.append((dialogue, [] if reason or isinstance(ids, Rejected) else ids))
        return found

    def _round(self, asked: Sequence[tuple[Dialogue, list[int]]], engine: Engine) -> None:
        rows = [row_id(dialogue.name, dialogue.places[0], ids) for dialogue, ids in asked]
        open_ones = {row: ids for row, (_, ids) in zip(rows, asked, strict=True) if row not in self._journal.known}
        names = list(open_ones)
        self._done += len(asked) - len(names)
        requests = [
            Request(tuple(ids), room_for(len(ids), self._config), seed_of(self._config.seed, row))
            for row, ids in open_ones.items()
        ]

        def keep(place: int, answer: Answer, states: Tensor | None) -> None:
            self._journal.add(names[place], answer)
            if states is not None and self._room >= states.nbytes:
                self._room -= states.nbytes
                self._states[names[place]] = states
            self._rows, self._tokens = self._rows + 1, self._tokens + len(answer.token_ids)
            self._done += 1
            self._advance()

        if requests:
            engine.start()
            self._since = time.monotonic()
            engine.answer(requests, keep)
            self._spent, self._since = self._spent + time.monotonic() - self._since, math.inf
        for row, (dialogue, ids) in zip(rows, asked, strict=True):
            answer = self._journal.known[row]
            message = self._renderer.message_of(answer.token_ids, dialogue.conversation.tools, prompt_ids=ids)
            dialogue.follow(Turn(dialogue.places[0], tuple(ids), answer, message, self._states.get(row)))

    def _advance(self) -> None:
        figures = self.figures()
        note = f"{figures['answer_rows_per_second']:.1f} rows/s, {figures['answer_tokens_per_second']:,.0f} tokens/s"
        self._reporter.advance(self._done, note=note)


def room_for(prompt: int, config: DataConfig) -> int:
    """Most tokens of the answer to a prompt of so many."""
    return min(config.max_new_tokens, config.max_length - prompt)


def length_fault(prompt: int, config: DataConfig) -> str:
    """Why a prompt of so many tokens is not used; empty where it is."""
    if prompt < config.min_prompt_tokens:
        return "prompt too short"
    longest = min(config.max_prompt_tokens or prompt, config.max_length - MIN_ANSWER)
    return "prompt too long" if prompt > longest else ""


def count_reasons(dialogues: Sequence[Dialogue], rejected: Counter[str]) -> Counter[str]:
    """Count each dialogue without a row as rejected, by its first reason. Returns turns left out of the others."""
    left_out: Counter[str] = Counter()
    for dialogue in dialogues:
        if dialogue.turns:
            left_out.update(dialogue.left_out)
        else:
            rejected[dialogue.left_out[0] if dialogue.left_out else "no user message to answer"] += 1
    return left_out
