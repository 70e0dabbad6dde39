"""`fastmtp data inspect`: what it says of a prepared directory, to people and to programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fastmtp.__main__ import app
from fastmtp.data.commands import sample_text
from fastmtp.data.inspect import inspect_data
from fastmtp.data.online import write_ids
from fastmtp.data.shards import Verifier
from fastmtp.data.store import RowEntry, RowWriter
from fastmtp.errors import DataError, InputError
from fastmtp.progress import Reporter
from fastmtp.stage import run_stage
from tests.fastmtp.data.chat import PLAIN, renderer
from tests.fastmtp.data.test_rendering import said, talk, user
from tests.fastmtp.data.test_store import states

VERIFIER = Verifier("abc", layers=2, hidden_size=6)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file, and in runs/job/data what was prepared for it: 9 rows of growing answers, one of two turns."""
    made = renderer(PLAIN)
    made.tokenizer.save_pretrained(tmp_path / "model")
    talks = [talk(user("a"), said("b" * (5 * count))) for count in range(1, 9)]
    talks.append(talk(user("a"), said("b"), user("c"), said("d" * 50)))
    rows = []
    for number, one in enumerate(talks):
        (row,) = made.answered_rows(one, "all")
        split, finish = ("holdout" if number == 3 else "train"), ("length" if number == 7 else "stop")
        entry = RowEntry(one.key, split, len(row.ids), row.spans[0][0], finish, spans=row.spans)
        rows.append((entry, row.ids))

    def body(directory: Path) -> dict[str, Any]:
        with RowWriter(directory, VERIFIER, rows) as writer:
            for index, (_, ids) in enumerate(rows):
                writer.put(index, ids, states(ids))
            writer.close()
        return {"rows_in": 14, "rejected": {"duplicate": 3, "prompt too long": 2}, "hidden_states": "post_final_norm"}

    data = tmp_path / "runs" / "job" / "data"
    run_stage("prepare", data, config={}, inputs={}, body=body, reporter=Reporter("prepare", quiet=True))
    file = tmp_path / "job.yaml"
    prompts = {"prompts": "unused.jsonl"}
    file.write_text(yaml.safe_dump({"model": str(tmp_path / "model"), "data": prompts, "evaluate": prompts}))
    monkeypatch.chdir(tmp_path)
    return file


def inspect(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["data", "inspect", *arguments], env={"COLUMNS": "100"}, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_what_people_see(job: Path) -> None:
    shown = inspect("job.yaml")
    for line in (
        "14 in: 9 used, 5 rejected", "3 duplicate", "2 prompt too long", "9, 1 of them held out",
        "1 ended by length, 8 ended by stop", "states: post_final_norm",
    ):  # fmt: skip
        assert line in shown
    assert "do not add up" not in shown
    shortest = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[[bbbbb<|im_end|>]]\n"
    assert shortest in shown
    assert f"assistant\n[[b<|im_end|>]]\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[[{'d' * 50}" in shown
    assert shown.count("row ") == 3
    assert (job.parent / "runs/job/data-tokens.png").read_bytes().startswith(b"\x89PNG")


def test_what_programs_see(job: Path) -> None:
    data = job.parent / "runs/job/data"
    found = json.loads(inspect(str(data), "--json", "--model", str(job.parent / "model"), "--plot", "p.png"))
    assert (found["rows_in"], found["conversations"], found["rejected"], found["adds_up"]) == (
        14, 9, {"duplicate": 3, "prompt too long": 2}, True,
    )  # fmt: skip
    assert found["share_supervised"] == found["tokens_supervised"] / found["tokens"]
    assert (found["shortest"], found["median"], found["longest"]) == (26, 46, 94)
    assert sum(one["rows"] for one in found["histogram"]) == found["rows"] == 9
    (shortest, _, longest) = found["samples"]
    assert [part["supervised"] for part in shortest["parts"]] == [False, True]
    assert [part["supervised"] for part in longest["parts"]] == [False, True, False, True]
    assert Path("p.png").is_file()


def test_without_a_model_the_rows_are_ids(job: Path) -> None:
    found = json.loads(inspect("runs/job/data", "--json"))
    assert [len(sample["token_ids"]) for sample in found["samples"]] == [26, 46, 94]
    assert "needs a tokenizer: give --model" in inspect("runs/job/data")


def test_rows_without_states_are_shown_too(job: Path) -> None:
    data = job.parent / "runs/job/data"
    ids = json.loads(inspect("runs/job/data", "--json"))["samples"][0]["token_ids"]
    entry = RowEntry("key", "train", len(ids), 20, "stop")
    write_ids(data, VERIFIER, [(entry, ids)])
    (sample,) = json.loads(inspect("runs/job/data", "--json"))["samples"]
    assert sample["token_ids"] == ids


def test_help_shows_an_example() -> None:
    assert "Example: fastmtp data inspect job.yaml" in inspect("--help")


def test_the_model_of_a_working_directory_is_known(job: Path) -> None:
    job.rename("runs/job/job.yaml")
    assert "[[bbbbb<|im_end|>]]" in inspect("runs/job/data")


def test_a_manifest_that_does_not_add_up_is_said(job: Path) -> None:
    path = job.parent / "runs/job/data/manifest.json"
    path.write_text(path.read_text().replace('"rows_in": 14', '"rows_in": 15'))
    assert "do not add up" in inspect("job.yaml")


def test_what_is_no_prepared_data_is_refused(job: Path) -> None:
    with pytest.raises(InputError, match="is no job file and no directory"):
        inspect("nothing.yaml")
    with pytest.raises(InputError, match="holds no manifest"):
        inspect("model")
    path = job.parent / "runs/job/data/manifest.json"
    path.write_text(path.read_text().replace('"stage": "prepare"', '"stage": "train"'))
    with pytest.raises(DataError, match="is a result of train"):
        inspect("job.yaml")


def test_a_terminal_has_colours_for_marks(job: Path) -> None:
    found = inspect_data(job.parent / "runs/job/data", job.parent / "model").samples[0]
    shown = sample_text(found, colours=True)
    assert "[[" not in shown.plain
    (green,) = (shown.plain[span.start : span.end] for span in shown.spans if span.style == "not bold green")
    assert green == "bbbbb<|im_end|>"
