"""Prompts of every kind people have, through the one command, and every row accounted for."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import yaml

from fastmtp.data.wordproblems import generate
from tests.fastmtp.fixtures import write_checkpoint

QUESTIONS = [row["question"][:60] for row in generate(40, 5)]


def gsm8k(root: Path) -> str:
    """GSM8K's own files: question and answer."""
    rows = [{"question": question, "answer": "#### 4"} for question in QUESTIONS[:6]]
    (root / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    return str(root / "gsm8k.jsonl")


def sharegpt(root: Path) -> str:
    """One JSON array; the second row begins with an answer and asks nothing."""
    rows = [
        {"id": "a", "conversations": [{"from": "human", "value": QUESTIONS[6]}, {"from": "gpt", "value": "Four."},
                                      {"from": "human", "value": "Why?"}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "Hello."}]},
        {"id": "c", "conversations": [{"from": "system", "value": "Be short."}, {"from": "human", "value": "x 7"}]},
    ]  # fmt: skip
    (root / "sharegpt.json").write_text(json.dumps(rows))
    return str(root / "sharegpt.json")


def request_log(root: Path) -> str:
    """What a gateway stores, packed; one request had a picture."""
    folder = root / "logs" / "2026-11-29"
    folder.mkdir(parents=True)
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    records = [
        {"timestamp": "2026-11-29T10:00:00Z", "request": {"model": "m", "messages": [
            {"role": "user", "content": content}]}, "response": {"choices": [
                {"message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}]}}
        for content in (QUESTIONS[8], picture, QUESTIONS[9])
    ]  # fmt: skip
    with gzip.open(folder / "part-0.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in [*records, "no record"])
    return f"{root}/logs/*/*.jsonl.gz"


def dataset(root: Path) -> str:
    """As the hub has it: a card that names splits, and Parquet files."""
    folder = root / "dataset" / "data"
    folder.mkdir(parents=True)
    for split, questions in (("train", QUESTIONS[10:14]), ("test", QUESTIONS[14:16])):
        table = pyarrow.table({"messages": [[{"role": "user", "content": question}] for question in questions]})
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    card += "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in ("train", "test")) + "---\n"
    (root / "dataset" / "README.md").write_text(card)
    return f"hf:{root}/dataset:default:train"


REJECTED = {"duplicate", "no user or tool message to answer", "content that is not text", "not an object"}
# How it is made, rows in it, and rows that are used.
KINDS = ((gsm8k, 7, 6), (sharegpt, 3, 2), (request_log, 4, 2), (dataset, 4, 4))


def test_all_kinds_are_prepared_by_one_command(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "something else"}) + "\n")
    job = {
        "model": str(write_checkpoint(tmp_path / "model")),
        "data": {
            "prompts": [make(tmp_path) for make, _, _ in KINDS],
            "max_length": 160,
            "max_new_tokens": 12,
            "holdout": 0.0,
        },
        "evaluate": {"prompts": str(tmp_path / "test.jsonl")},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "fastmtp", "prepare", "job.yaml", "--out", "data", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)["summary"]
    rows_in, used = (sum(kind[place] for kind in KINDS) for place in (1, 2))
    assert (summary["rows_in"], summary["rows"]) == (rows_in, used)
    assert used + sum(summary["rejected"].values()) == rows_in
    assert summary["rejected"] == dict.fromkeys(REJECTED, 1)
