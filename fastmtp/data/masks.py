"""Which tokens of a row are the assistant's own: spans of them, and what is wrong with a set of rows that has none.

A span is a half-open range of places in a row. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from fastmtp.errors import DataError

Span = tuple[int, int]


class Supervised(Protocol):
    """A row as far as it is counted."""

    @property
    def length(self) -> int: ...
    @property
    def supervised(self) -> int: ...


def starts_with(ids: Sequence[int], prefix: Sequence[int]) -> bool:
    """Whether the tokens of a prefix of a text are a prefix of the text's tokens."""
    return len(prefix) <= len(ids) and ids[: len(prefix)] == prefix


def answer_span(ids: Sequence[int], begin: int, ends: Collection[int]) -> Span | None:
    """From `begin` to the first token that ends an answer, that one included. None: nothing ends it, or it is empty."""
    for place in range(begin, len(ids)):
        if ids[place] in ends:
            return begin, place + 1
    return None


def cut(spans: Iterable[Span], length: int) -> tuple[Span, ...]:
    """What is left of spans in the first `length` tokens."""
    return tuple((begin, min(end, length)) for begin, end in spans if begin < length)


def mask_of(spans: Iterable[Span], length: int) -> list[bool]:
    """[length], true where a token is supervised."""
    mask = [False] * length
    for begin, end in spans:
        mask[begin:end] = [True] * (end - begin)
    return mask


def require_supervision(rows: Iterable[Supervised]) -> None:
    """Raise DataError when no token of a set of rows is supervised, or every one: no mask of real rows is like that."""
    tokens = supervised = 0
    for row in rows:
        tokens, supervised = tokens + row.length, supervised + row.supervised
    if supervised == 0:
        raise DataError("No token is supervised: there is nothing to train on.", mend="Prepare more prompts.")
    if supervised == tokens:
        raise DataError(
            f"All {tokens} tokens are supervised, prompts too: the rows' masks are not the assistant's tokens.",
            mend="Prepare the data again; a row begins with its prompt.",
        )
