"""Which conversations are used, and for what: each once, a seeded sample of them, and a share that is held out.

Every choice goes by digests, so that it stays as it is when conversations are added. Loads no torch.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from fastmtp.config import DataConfig
from fastmtp.data.conversations import Conversation, prefix_keys

Split = Literal["train", "holdout"]
EVALUATED = "in the evaluation set"  # the reason why a conversation is left out


def select(
    conversations: Iterable[Conversation],
    config: DataConfig,
    rejected: Counter[str],
    *,
    evaluated: Collection[str] = (),
) -> list[tuple[Conversation, Split]]:
    """The conversations to use, in their order, each with its split; `rejected` counts the others by reason.

    Args:
        evaluated: roots of conversations that the head is measured on. They are left out.
    """
    usable = _usable(conversations, config, rejected, evaluated)
    if config.deduplicate:
        usable = _distinct(usable, config, rejected)
    if config.turns == "all":
        usable = iter(_longest(list(usable), config, rejected))
    chosen = sample(usable, config.max_samples, config.seed, rejected)
    return [(one, split_of(one.root, config.holdout)) for one in chosen]


def split_of(root: str, holdout: float) -> Split:
    """The split of all conversations of a root: by the root alone, whatever the seed and whatever else there is."""
    return "holdout" if _unit("split", root) < holdout else "train"


def sample(
    conversations: Iterable[Conversation], size: int | None, seed: int, rejected: Counter[str]
) -> list[Conversation]:
    """At most `size` of them, those whose digest with the seed is lowest, in their order; all for None.

    What is chosen out of more is among what was chosen before, or new. Each conversation counts for itself: by root,
    all those that begin with a common greeting would be in, or out, together. Keeps `size` in memory.
    """
    if size is None:
        return list(conversations)
    # Greatest first: heapq keeps the least of what it compares.
    heap: list[tuple[float, int, Conversation]] = []
    for place, one in enumerate(conversations):
        item = (-_unit(f"sample:{seed}", one.prompt_key()), -place, one)
        if len(heap) < size:
            heapq.heappush(heap, item)
        else:
            heapq.heappushpop(heap, item)
            rejected["not sampled"] += 1
    return [one for _, _, one in sorted(heap, key=lambda item: -item[1])]


def _usable(
    conversations: Iterable[Conversation], config: DataConfig, rejected: Counter[str], evaluated: Collection[str]
) -> Iterator[Conversation]:
    roots = frozenset(evaluated)
    for one in conversations:
        if one.root in roots:
            rejected[EVALUATED] += 1
        elif config.responses == "keep" and not _answered(one, config):
            rejected["no answer was recorded"] += 1
        else:
            yield one


def _answered(one: Conversation, config: DataConfig) -> bool:
    if config.turns == "last":
        return one.answer() is not None
    return any(message["role"] == "assistant" for message in one.messages)


def _distinct(
    conversations: Iterable[Conversation], config: DataConfig, rejected: Counter[str]
) -> Iterator[Conversation]:
    """Each once, the first. What was answered tells them apart only where it is used."""
    seen: set[bytes] = set()
    for one in conversations:
        key = bytes.fromhex(one.key if config.responses == "keep" else one.prompt_key())
        if key in seen:
            rejected["duplicate"] += 1
        else:
            seen.add(key)
            yield one


def _longest(conversations: list[Conversation], config: DataConfig, rejected: Counter[str]) -> list[Conversation]:
    """Without those that another one goes on from: its turns have them already, as a log grows by request."""
    begun: set[str] = set()
    for one in conversations:
        messages = one.messages if config.responses == "keep" else one.prompt()
        *begins, _ = prefix_keys(messages, one.tools)
        begun.update(begins)
    kept = []
    for one in conversations:
        if (one.key if config.responses == "keep" else one.prompt_key()) in begun:
            rejected["part of a longer conversation"] += 1
        else:
            kept.append(one)
    return kept


def _unit(salt: str, key: str) -> float:
    """A number in [0, 1) that depends on salt and key alone."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{key}".encode()).digest()[:8]) / 2**64
