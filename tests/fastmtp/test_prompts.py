"""Prompt files in the forms people have them; every line is used or counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from fastmtp.data.prompts import read_prompts
from fastmtp.data.wordproblems import generate
from fastmtp.errors import DataError

ROWS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
    {"prompt": "p", "completion": "c"},
    {"question": "q", "answer": "r"},
    {"text": "t"},
    {"question": "q", "answer": "another answer to the same question"},
    {"messages": []},
    {"messages": [{"role": "assistant", "content": "alone"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"prompt": "   "},
    {"label": 1},
    [1, 2],
]


def test_forms_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join([*(json.dumps(row) for row in ROWS), "{broken", ""]) + "\n")
    rejected: Counter[str] = Counter()
    prompts = read_prompts(str(file), rejected=rejected)
    assert [(prompt.messages[-1]["content"], prompt.answer) for prompt in prompts] == [
        ("a", "b"), ("a", None), ("p", "c"), ("q", "r"), ("t", None),
    ]  # fmt: skip
    assert len(prompts) + rejected.total() == len(ROWS) + 2
    assert rejected["duplicate"] == 1 and rejected["not JSON"] == 1 and rejected["blank line"] == 1
    assert read_prompts(f"file://{file}", limit=2) == prompts[:2]


@pytest.mark.parametrize("content", ["", "\n\n", "{}\n{}\n", '{"prompt": 3}\n'])
def test_no_usable_row(tmp_path: Path, content: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match="no usable row"):
        read_prompts(str(file))


def test_unreadable(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, reason in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "directory"),
        (tmp_path / "binary", "UTF-8"),
    ):
        with pytest.raises(DataError, match=reason):
            read_prompts(str(path))
    with pytest.raises(DataError, match="hf:DATASET"):
        read_prompts("hf:gsm8k")


def test_generated_problems_are_right_and_repeatable() -> None:
    rows = generate(200, 3)
    assert rows == generate(200, 3) != generate(200, 4)
    assert len({row["question"] for row in rows}) == 200
    for row in rows:
        for shown in row["answer"].split("<<")[1:]:
            formula, _, rest = shown.partition("=")
            assert eval(formula.replace("/", "//")) == int(rest.split(">>")[0])  # our own digits
        assert row["answer"].splitlines()[-2].split(" has ")[1].split()[0] == row["answer"].rsplit("#### ", 1)[1]
