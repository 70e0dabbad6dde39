"""Varied arithmetic word problems with worked answers: text for the small verifier, so that no data set is needed.

Every problem is a chain of one to four operations told as a story; its answer works the chain out line by line and ends
with `#### N`, the form GSM8K made common. Deterministic for a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

NAMES = (
    "Ada", "Ben", "Cara", "Dev", "Ella", "Finn", "Gus", "Hana", "Ivan", "Jude", "Kira", "Liam", "Mona", "Nils", "Olga",
    "Pia", "Quinn", "Rosa", "Sven", "Tara", "Uma", "Vik",
)  # fmt: skip
THINGS = (
    "apples", "books", "candles", "coins", "cookies", "cups", "eggs", "flowers", "keys", "lamps", "marbles", "melons",
    "pens", "plates", "shells", "stamps",
)  # fmt: skip
BOXES = ["bags", "baskets", "boxes", "crates", "jars", "rows", "shelves", "trays"]
PLACES = (
    "at the market", "on the farm", "in the shop", "at school", "in the garden", "at the harbour", "in the library",
)  # fmt: skip


def generate(count: int, seed: int) -> list[dict[str, str]]:
    """`count` problems as {"question", "answer"}; no question appears twice."""
    rng = random.Random(seed)  # noqa: S311
    rows: dict[str, str] = {}
    while len(rows) < count:
        question, answer = _problem(rng)
        rows.setdefault(question, answer)
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


def _problem(rng: random.Random) -> tuple[str, str]:
    name, friend = rng.sample(NAMES, 2)
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    told, worked, value = _opening(rng, name, thing, place)
    for step in rng.sample(_STEPS, rng.randint(1, 3)):
        sentence, line, value = step(rng, name, friend, thing, value)
        told.append(sentence)
        worked.append(line)
    told.append(f"How many {thing} does {name} have now?")
    worked.append(f"So {name} has {value} {thing} now.")
    return " ".join(told), "\n".join([*worked, f"#### {value}"])


def _opening(rng: random.Random, name: str, thing: str, place: str) -> tuple[list[str], list[str], int]:
    if rng.random() < 0.4:
        value = rng.randint(4, 40)
        return [f"{name} has {value} {thing} {place}."], [f"{name} starts with {value} {thing}."], value
    boxes, many, each = rng.choice(BOXES), rng.randint(2, 9), rng.randint(2, 12)
    told = f"{place[0].upper()}{place[1:]}, {name} has {many} {boxes} with {each} {thing} in each."
    return [told], [f"{name} has {many} * {each} = <<{many}*{each}={many * each}>>{many * each} {thing}."], many * each


def _buys(rng: random.Random, name: str, _friend: str, thing: str, value: int) -> tuple[str, str, int]:
    more = rng.randint(2, 30)
    total = value + more
    return (
        f"Then {name} buys {more} more {thing}.",
        f"After buying {more} there are {value} + {more} = <<{value}+{more}={total}>>{total} {thing}.",
        total,
    )


def _gives(rng: random.Random, name: str, friend: str, thing: str, value: int) -> tuple[str, str, int]:
    fewer = rng.randint(1, max(1, value - 1))
    left = value - fewer
    return (
        f"{name} gives {fewer} {thing} to {friend}.",
        f"After giving {fewer} to {friend} there are {value} - {fewer} = <<{value}-{fewer}={left}>>{left} {thing}.",
        left,
    )


def _doubles(_rng: random.Random, name: str, friend: str, thing: str, value: int) -> tuple[str, str, int]:
    return (
        f"{friend} brings as many {thing} as {name} already has.",
        f"{friend} doubles them, which makes {value} * 2 = <<{value}*2={value * 2}>>{value * 2} {thing}.",
        value * 2,
    )


def _halves(_rng: random.Random, name: str, _friend: str, thing: str, value: int) -> tuple[str, str, int]:
    half = value // 2
    return (
        f"{name} loses half of the {thing}, rounded up.",
        f"Half of them stay, which leaves {value} / 2 = <<{value}/2={half}>>{half} {thing}.",
        half,
    )


_STEPS: list[Callable[[random.Random, str, str, str, int], tuple[str, str, int]]] = [_buys, _gives, _doubles, _halves]
