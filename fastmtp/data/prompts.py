"""Conversations out of any source, in any form: every row is used, or counted by the reason why not.

Loads no torch: the API looks at the first rows of what a job names.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fastmtp.config import DataConfig
from fastmtp.data.batches import Batches
from fastmtp.data.conversations import Conversation
from fastmtp.data.formats import conversation_of
from fastmtp.data.messages import Unusable
from fastmtp.data.selection import select
from fastmtp.data.sources.lines import Unread
from fastmtp.data.sources.opening import open_source
from fastmtp.data.window import Window
from fastmtp.errors import DataError

__all__ = ["first_conversations", "look_at", "read_conversations", "roots_of", "select"]

# A look that turns nothing up in so many rows ends.
_LOOKED = 2000


def read_conversations(
    source: DataConfig | str | Sequence[str],
    *,
    limit: int | None = None,
    rejected: Counter[str] | None = None,
) -> Iterator[Conversation]:
    """Conversations in the order of sources, files (by name) and rows; one that occurs again is given again.

    Args:
        source: data's settings, whose sources, format, columns and window count; or sources alone, in any form.
        limit: stop after so many.
        rejected: counts rows that are none, by reason.

    Raises:
        DataError: a source does not read, or has no usable row; raised where that is found out.
    """
    counts: Counter[str] = Counter() if rejected is None else rejected
    config = source if isinstance(source, DataConfig) else DataConfig(prompts=_several(source))
    window = Window.of(config.since, config.until)
    batches = Batches() if config.responses == "keep" else None
    found = itertools.chain.from_iterable(_of_source(name, config, window, counts, batches) for name in config.sources)
    return itertools.islice(found if batches is None else itertools.chain(found, batches.joined()), limit)


def first_conversations(
    source: DataConfig | str, count: int, rejected: Counter[str] | None = None
) -> list[Conversation]:
    """The first `count` conversations of a source whose prompts differ, in their order. Raises DataError."""
    found: dict[str, Conversation] = {}
    for one in read_conversations(source, rejected=rejected):
        if found.setdefault(one.prompt_key(), one) is not one and rejected is not None:
            rejected["duplicate"] += 1
        if len(found) >= count:
            break
    return list(found.values())


def roots_of(sources: Iterable[DataConfig | str], count: int) -> frozenset[str]:
    """Roots of the first `count` conversations of each source: what is measured on them must not be trained on."""
    return frozenset(one.root for source in sources for one in first_conversations(source, count))


def look_at(config: DataConfig, source: str) -> str | None:
    """Read the first rows of one source of `config`. Returns a warning where they tell nothing.

    Raises:
        DataError: it does not read, or has no usable row.
    """
    tally, window, batches = _Tally(Counter()), Window.of(config.since, config.until), Batches()
    for count, found in enumerate(_rows(source, config, window, tally, batches), start=1):
        if found is not None or batches:
            return None
        if count == _LOOKED:
            return f"None of the first {count} rows of {source} is usable: {tally.why()}."
    raise _nothing(source, tally, window)


class _Tally:
    """Rows of one source that are no conversation, by reason; and where the first of them lies."""

    def __init__(self, of_all: Counter[str]) -> None:
        self._of_all = of_all
        self.rejected: Counter[str] = Counter()
        self.first = ""

    def count(self, reason: str, where: str) -> None:
        self._of_all[reason] += 1
        self.rejected[reason] += 1
        self.first = self.first or where

    def why(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.rejected.most_common(3))
        return f"{reasons} (the first is {self.first})"


def _of_source(
    source: str, config: DataConfig, window: Window, counts: Counter[str], batches: Batches | None
) -> Iterator[Conversation]:
    tally, used = _Tally(counts), False
    for found in _rows(source, config, window, tally, batches):
        if found is not None:
            used = True
            yield found
    if not used and not batches:
        raise _nothing(source, tally, window)


def _rows(
    source: str, config: DataConfig, window: Window, tally: _Tally, batches: Batches | None
) -> Iterator[Conversation | None]:
    """The conversation of each row, or None for one that is counted, or waits for its answer."""
    for name, rows in open_source(source, window.since):
        for number, value in rows:
            where = f"{name}:{number}"
            try:
                one = _conversation(value, config, window, where)
            except Unusable as error:
                answers = batches is not None and batches.answers(value)
                tally.count("the answer of another row" if answers else str(error), where)
                yield None
            else:
                yield None if batches is not None and batches.waits(value, one) else one


def _conversation(value: object, config: DataConfig, window: Window, where: str) -> Conversation:
    if isinstance(value, Unread):
        raise Unusable(value)
    found = conversation_of(value, config.format, config.columns, where)
    if not window.open:
        if found.time is None:
            raise Unusable("no time")
        if not window.holds(found.time):
            raise Unusable("outside the window")
    return found


def _nothing(source: str, tally: _Tally, window: Window) -> DataError:
    if tally.rejected:
        mend = 'A row is an object with "messages", "conversations", "prompt", "question", "text" or a stored request;'
        return DataError(f"{source} has no usable row: {tally.why()}.", mend=f"{mend} data.columns names others.")
    if window.since is not None:
        return DataError(f"{source} has no row that was written since data.since.", mend="Widen the window.")
    return DataError(f"{source} has no usable row: it is empty.", mend="Name a source that holds prompts.")


def _several(source: str | Sequence[str]) -> str | tuple[str, ...]:
    return source if isinstance(source, str) else tuple(source)
