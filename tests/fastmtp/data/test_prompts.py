"""Prompts as people have them, read by one call: a problem set, chats, request logs and dataset directories."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fastmtp.config import DataConfig
from fastmtp.data.prompts import first_conversations, look_at, read_conversations, roots_of, select
from fastmtp.errors import DataError

DAY = 86400.0
NOON = 1_795_000_000.0  # a day in November 2026


def lines(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def problems(root: Path) -> tuple[str, int]:
    """As GSM8K comes."""
    rows = [
        {"question": f"Ann has {n} pens and buys {n}.", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}"}
        for n in range(40)
    ]  # noqa: E501
    return lines(root / "train.jsonl", [*rows, rows[0]]), 41


def chats(root: Path) -> tuple[str, int]:
    """As ShareGPT comes: one array; some conversations begin with the assistant, or are of images."""
    talk = [
        {
            "id": f"c{n}",
            "conversations": [{"from": "human", "value": f"What of {n}?"}, {"from": "gpt", "value": "Much."}],
        }
        for n in range(30)
    ]
    odd = [{"id": "x", "conversations": []}, {"id": "y", "conversations": [{"from": "gpt", "value": "I went on."}]}]
    (root / "sharegpt.json").write_text(json.dumps([*talk, *odd], indent=1))
    return str(root / "sharegpt.json"), 32


def log(root: Path) -> tuple[str, int]:
    """As a gateway keeps it, a file per day: conversations that grow by request, failures, images, other endpoints."""
    for day in range(3):
        rows: list[dict[str, Any]] = []
        for user in range(10):
            turns = [{"role": "user", "content": f"User {user} asks."}]
            for turn in range(2):
                said = {"role": "assistant", "content": f"Answer {turn} of {day}."}
                body = {"model": "m", "messages": list(turns), "tools": [], "temperature": 0.7}
                response = {"object": "chat.completion", "choices": [{"message": said, "finish_reason": "stop"}]}
                time = NOON + day * DAY + user
                rows.append({"timestamp": time, "request": {"body": body}, "response": {"body": response}})
                turns += [said, {"role": "user", "content": f"And {turn}?"}]
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
        rows.append({"timestamp": NOON + day * DAY, "request": {"body": {"messages": image}}})
        rows.append({"timestamp": NOON + day * DAY, "request": {"body": {"model": "e", "prompt": "Once upon"}}})
        lines(root / f"logs/2026-11-{18 + day}/0.jsonl", rows)
    return f"{root}/logs/2026-11-*/*.jsonl", 66


def dataset(root: Path) -> tuple[str, int]:
    """As the hub lays it out, with columns of its own."""
    rows = [{"frage": f"Was ist {n}?", "antwort": "Eine Zahl."} for n in range(20)]
    for split, part in (("train", rows[:15]), ("test", rows[15:])):
        path = root / "set" / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), path)
    (root / "set/README.md").write_text("# Numbers\n")
    return f"hf:{root}/set", 15


@pytest.mark.parametrize(
    ("made", "changes", "used", "reasons"),
    [
        (problems, {}, 40, {"duplicate": 1}),
        (problems, {"responses": "keep", "max_samples": 15}, 15, {"duplicate": 1, "not sampled": 25}),
        (chats, {}, 30, {"messages is no list, or empty": 1, "no user or tool message to answer": 1}),
        (log, {}, 40, {"content that is not text": 3, "no chat request": 3, "duplicate": 20}),
        (log, {"turns": "all"}, 30,
         {"content that is not text": 3, "no chat request": 3, "duplicate": 20, "part of a longer conversation": 10}),
        (dataset, {"columns": {"prompt": "frage", "completion": "antwort"}}, 15, {}),
    ],
)  # fmt: skip
def test_in_is_used_and_rejected(
    made: Callable[[Path], tuple[str, int]], changes: dict[str, Any], used: int, reasons: dict[str, int], tmp_path: Path
) -> None:
    source, count = made(tmp_path)
    config, rejected = DataConfig.model_validate({"prompts": source, **changes}), Counter[str]()
    found = select(read_conversations(config, rejected=rejected), config, rejected)
    assert len(found) == used and rejected == reasons
    assert len(found) + rejected.total() == count


def test_several_sources_in_one_job(tmp_path: Path) -> None:
    made = [made(tmp_path) for made in (problems, chats, log)]
    config, rejected = DataConfig(prompts=tuple(source for source, _ in made)), Counter[str]()
    found = select(read_conversations(config, rejected=rejected), config, rejected)
    assert len(found) + rejected.total() == sum(count for _, count in made)
    places = [one.where.rpartition("/")[2].partition(":")[0] for one, _ in found]
    assert list(dict.fromkeys(places)) == ["train.jsonl", "sharegpt.json", "0.jsonl"]
    assert found[0][0].where == f"{tmp_path}/train.jsonl:1" and found[40][0].where == f"{tmp_path}/sharegpt.json:1"


def test_a_window_of_a_log(tmp_path: Path) -> None:
    source, _ = log(tmp_path)
    rejected: Counter[str] = Counter()
    config = DataConfig(prompts=source, since="2026-11-19T00:00Z", until="2026-11-20")
    found = list(read_conversations(config, rejected=rejected))
    assert {one.where.split("/")[-2] for one in found} == {"2026-11-19"} and len(found) == 20
    assert rejected == {"outside the window": 40, "content that is not text": 3, "no chat request": 3}
    untimed = lines(
        tmp_path / "untimed.jsonl", [{"question": "2+2?"}, {"question": "2+3?", "time": "2026-11-19 12:00"}]
    )
    rejected.clear()
    assert len(list(read_conversations(config.model_copy(update={"prompts": untimed}), rejected=rejected))) == 1
    assert rejected == {"no time": 1}
    os.utime(untimed, (NOON - 9 * DAY, NOON - 9 * DAY))
    with pytest.raises(DataError, match=r"no row that was written since data\.since"):
        list(read_conversations(config.model_copy(update={"prompts": untimed})))


def test_answers_of_a_batch_find_their_requests(tmp_path: Path) -> None:
    """They come in a file of their own, in another order; a name that two batches use tells nothing."""
    asked = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "m", "messages": [{"role": "user", "content": f"What of {n}?"}]}}
        for n in range(5)
    ]  # fmt: skip
    answered = [
        {"id": f"b{n}", "custom_id": f"r{n}", "error": None,
         "response": {"status_code": 200, "body": {"choices": [{"message": {"content": f"{n}."}}]}}}
        for n in (3, 1, 0)
    ]  # fmt: skip
    failed = {"id": "b2", "custom_id": "r2", "response": {"status_code": 500, "body": {"error": {}}}}
    twice = answered[2]
    output = lines(tmp_path / "output.jsonl", [*answered, failed, twice])
    sources = (output, lines(tmp_path / "input.jsonl", asked))
    for order in (sources, sources[::-1]):
        rejected: Counter[str] = Counter()
        config = DataConfig(prompts=order, responses="keep")
        found = select(read_conversations(config, rejected=rejected), config, rejected)
        answers = {one.prompt()[0]["content"]: (one.answer() or {})["content"] for one, _ in found}
        assert answers == {"What of 1?": "1.", "What of 3?": "3."}
        assert rejected == {"the answer of another row": 4, "no chat request": 1, "no answer was recorded": 3}
        assert len(found) + rejected.total() == 10
    assert look_at(config, output) is None
    rejected = Counter()
    found = select(read_conversations(sources[1], rejected=rejected), DataConfig(prompts="p"), rejected)
    assert len(found) == 5 and not rejected
    with pytest.raises(DataError, match="4 an answer without its request"):
        list(read_conversations(output))


def test_reading_stops_where_it_is_told_to(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"text": "a"}, 3, {"text": "a"}, {"text": "b"}, {"text": "c"}])
    rejected: Counter[str] = Counter()
    assert [one.messages[0]["content"] for one in read_conversations(source, limit=2, rejected=rejected)] == ["a", "a"]
    assert rejected == {"not an object": 1}
    rejected.clear()
    first = first_conversations(source, 2, rejected)
    assert [one.messages[0]["content"] for one in first] == ["a", "b"]
    assert rejected == {"not an object": 1, "duplicate": 1}
    assert roots_of([source], 2) == {one.root for one in first}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it is empty"),
        ("\n\n", r"2 blank line \(the first is .*a.jsonl:1\)"),
        ('\n{"x": 1}\n{"x": 2}\n', r"2 no prompt field, 1 blank line"),
    ],
)
def test_where_nothing_is_usable_the_first_fault_is_named(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    good = lines(tmp_path / "good.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match=f"a.jsonl has no usable row: {reason}"):
        list(read_conversations((good, str(tmp_path / "a.jsonl"))))
    with pytest.raises(DataError, match=reason):
        look_at(DataConfig(prompts=good), str(tmp_path / "a.jsonl"))


def test_a_look_ends_after_some_rows(tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", [{"x": 1}] * 5000 + [{"text": "a"}])
    config = DataConfig(prompts=source)
    warning = look_at(config, source)
    assert warning and "None of the first 2000 rows" in warning and "no prompt field" in warning
    assert len(list(read_conversations(config))) == 1
    assert look_at(config, lines(tmp_path / "b.jsonl", [{"x": 1}, {"text": "a"}])) is None
