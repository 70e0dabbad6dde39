"""Conversations as token ids by the model's own chat template, and whose each token is.

Prompts of training and evaluation are rendered here and nowhere else. Which tokens of a recorded answer are the
assistant's own is found by rendering prefixes: what `messages[:j]` with the generation prompt already says is not, what
`messages[: j + 1]` adds up to the token that ends the turn is. Templates may rewrite earlier turns, as those do that
drop old thinking: then every turn becomes a row of its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fastmtp.data.conversations import Conversation, Message, Tool
from fastmtp.data.masks import Span, answer_span, cut, mask_of, starts_with
from fastmtp.data.parsing import EMPTY_THINKING, OPEN, parse_answer
from fastmtp.errors import DataError

Turns = Literal["last", "all"]
_AT_ONCE = 512  # conversations whose texts are tokenised in one call
_TAIL = 8  # tokens of a prompt that are enough to see whether it opens a thinking block


class Rejected(DataError):
    """A conversation that cannot be used. `reason` is the same for all of a kind; rejected ones are counted by it."""

    def __init__(self, reason: str, what: str = "", *, mend: str = "") -> None:
        super().__init__(what or f"{reason}.", mend=mend)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row of training.

    Attributes:
        ids: its tokens.
        spans: the assistant's own tokens, with those that end its turns.
        turns: place in the conversation of each span's message.
        finish: stop, or length when the row was cut inside its last answer.
    """

    ids: list[int]
    spans: tuple[Span, ...]
    turns: tuple[int, ...]
    finish: str = "stop"

    @property
    def turn(self) -> int:
        """Place of the last supervised message."""
        return self.turns[-1]

    @property
    def mask(self) -> list[bool]:
        """True where a token is supervised."""
        return mask_of(self.spans, len(self.ids))


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant's turn as text: what stands before its own words, and everything up to its end."""

    place: int
    before: str
    whole: str


class Renderer:
    """The chat template and tokenizer of a model.

    Args:
        template_args: more arguments of the template, such as enable_thinking.
        ends: tokens that end an answer beside the tokenizer's own; see `Renderer.of`.

    Raises:
        DataError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_args: Mapping[str, Any] | None = None,
        *,
        ends: Collection[int] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                f"{tokenizer.name_or_path} has no chat template.", mend="Add chat_template.jinja to the model."
            )
        self.tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self.ends = frozenset(ends) | frozenset([own] if isinstance(own, int) else own or ())
        self._arguments = dict(template_args or {})

    @classmethod
    def of(cls, model: Path, template_args: Mapping[str, Any] | None = None) -> Renderer:
        """That of a checkpoint directory, with every token that its generation config says ends an answer."""
        file = model / "generation_config.json"
        found = json.loads(file.read_bytes()).get("eos_token_id") if file.is_file() else None
        ends = found if isinstance(found, list) else [] if found is None else [found]
        return cls(load_tokenizer(model), template_args, ends=ends)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """Tokens up to where the assistant begins, the generation prompt included. Raises Rejected."""
        return self._tokens([self._text(messages, tools, prompt=True)])[0]

    def prompts_ids(
        self, prompts: Sequence[tuple[Sequence[Message], Sequence[Tool]]]
    ) -> Iterator[list[int] | Rejected]:
        """`prompt_ids` of many (messages, tools), in order; a rejection stands in the place of its prompt."""
        for begin in range(0, len(prompts), _AT_ONCE):
            texts = [self._text_or_not(messages, tools) for messages, tools in prompts[begin : begin + _AT_ONCE]]
            ids = iter(self._tokens([text for text in texts if isinstance(text, str)]))
            yield from (next(ids) if isinstance(text, str) else text for text in texts)

    def answered_rows(
        self, conversation: Conversation, turns: Turns = "last", max_length: int | None = None
    ) -> list[Rendered]:
        """Rows of the answers that a conversation records: the last one, or all of them.

        Args:
            max_length: longer rows are cut there, and keep what is left of their answers.

        Raises:
            Rejected: nothing was answered, the template refuses it, or its rendering is unstable.
        """
        (found,) = self.all_answered_rows([conversation], turns, max_length)
        if isinstance(found, Rejected):
            raise found
        return found

    def all_answered_rows(
        self, conversations: Sequence[Conversation], turns: Turns = "last", max_length: int | None = None
    ) -> Iterator[list[Rendered] | Rejected]:
        """`answered_rows` of many, in order; a rejection stands in the place of its conversation."""
        for begin in range(0, len(conversations), _AT_ONCE):
            texts = [self._turns_or_not(one, turns) for one in conversations[begin : begin + _AT_ONCE]]
            distinct = dict.fromkeys(
                text for found in texts if not isinstance(found, Rejected) for turn in found
                for text in (turn.before, turn.whole)
            )  # fmt: skip
            ids = dict(zip(distinct, self._tokens(list(distinct)), strict=True))
            for found in texts:
                yield found if isinstance(found, Rejected) else self._rows_or_not(found, ids, max_length)

    def message_of(
        self, answer_ids: Sequence[int], tools: Sequence[Tool] = (), *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        """Generated tokens as a message of the assistant: thinking split off, calls of tools parsed.

        Args:
            prompt_ids: what was answered; needed where the generation prompt may open the thinking block.
        """
        kept = list(answer_ids)
        while kept and kept[-1] in self.ends:
            kept.pop()
        opened = self._decode(prompt_ids[-_TAIL:]).rstrip().endswith(OPEN)
        return parse_answer(self._decode(kept), tools, thinking=opened)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # The template writes every special token itself.
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return ids

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages], tools=list(tools) or None, tokenize=False,
                add_generation_prompt=prompt, **self._arguments,
            )  # fmt: skip
        except Exception as error:  # jinja raises whatever a template's author chose
            said = " ".join(str(error).split())
            raise Rejected(
                "refused by the chat template", f"The chat template refuses a conversation: {said}"
            ) from error
        return str(text)

    def _text_or_not(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str | Rejected:
        try:
            return self._text(messages, tools, prompt=True)
        except Rejected as rejected:
            return rejected

    def _turns_or_not(self, conversation: Conversation, turns: Turns) -> list[_Turn] | Rejected:
        places = [place for place, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        try:
            if not places:
                raise Rejected("no answer recorded")
            return [self._turn(conversation, place) for place in (places if turns == "all" else places[-1:])]
        except Rejected as rejected:
            return rejected

    def _turn(self, conversation: Conversation, place: int) -> _Turn:
        messages, tools = conversation.messages, conversation.tools
        before = self._text(messages[:place], tools, prompt=True)
        whole = self._text(messages[: place + 1], tools, prompt=False)
        if not whole.startswith(before):
            raise _unstable("the template renders an answered turn otherwise than the prompt for it")
        if not messages[place].get("reasoning_content") and (block := EMPTY_THINKING.match(whole, len(before))):
            before = whole[: block.end()]  # the template's words, not the assistant's
        return _Turn(place, before, whole)

    def _rows_or_not(
        self, turns: Sequence[_Turn], ids: Mapping[str, list[int]], max_length: int | None
    ) -> list[Rendered] | Rejected:
        try:
            whole = self._one_row(turns, ids)
            rows = [whole] if whole else [self._row_of_turn(turn, ids) for turn in turns]
        except Rejected as rejected:
            return rejected
        kept = [shorter for row in rows if (shorter := _shortened(row, max_length)).spans]
        return kept or Rejected("prompt too long")

    def _one_row(self, turns: Sequence[_Turn], ids: Mapping[str, list[int]]) -> Rendered | None:
        """All turns in one row, or None where a later rendering does not go on from an earlier one."""
        last = turns[-1]
        row = ids[last.whole]
        spans: list[Span] = []
        for turn in turns:
            before = ids[turn.before]
            span = answer_span(row, len(before), self.ends)
            if not last.whole.startswith(turn.whole) or not starts_with(row, before) or span is None:
                return None
            if spans and spans[-1][1] > len(before):  # nothing ended the turn before
                return None
            spans.append(span)
        return Rendered(row[: spans[-1][1]], tuple(spans), tuple(turn.place for turn in turns))

    def _row_of_turn(self, turn: _Turn, ids: Mapping[str, list[int]]) -> Rendered:
        before, row = ids[turn.before], ids[turn.whole]
        if not starts_with(row, before):
            raise _unstable("tokens run across the place where the answer begins")
        span = answer_span(row, len(before), self.ends) or (len(before), len(row))
        if span[0] == span[1]:
            raise Rejected("empty answer")
        return Rendered(row[: span[1]], (span,), (turn.place,))


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """That of a checkpoint directory or hub id. Raises DataError when there is none that loads."""
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # transformers and tokenizers raise anything
        said = " ".join(str(error).split())[:300]
        raise DataError(
            f"{model} has no tokenizer that loads: {said}", mend="Add tokenizer.json and tokenizer_config.json."
        ) from error
    return found


def _unstable(why: str) -> Rejected:
    return Rejected(
        "unstable rendering",
        f"The chat template gives no stable prefix: {why}.",
        mend="Set data.template_args as the answers were made, such as {enable_thinking: false}.",
    )


def _shortened(row: Rendered, max_length: int | None) -> Rendered:
    if max_length is None or len(row.ids) <= max_length:
        return row
    spans = cut(row.spans, max_length)
    # The row ends with its last answer: prompt tokens after it would be computed for nothing.
    end = spans[-1][1] if spans else 0
    whole = spans == row.spans[: len(spans)]
    return Rendered(row.ids[:end], spans, row.turns[: len(spans)], "stop" if whole else "length")


def _for_template(message: Message) -> Message:
    """As vLLM hands messages to templates: arguments of calls as objects, which templates iterate over."""
    if not message.get("tool_calls"):
        return message
    calls = [call | {"function": _with_object(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return function
    return function | {"arguments": arguments or {}}
