"""From prompts to stored rows, on a small model with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import DataConfig
from fastmtp.data.prepare import prepare
from fastmtp.data.store import RowStore
from fastmtp.errors import DataError
from fastmtp.extract import fingerprint
from fastmtp.progress import Reporter
from fastmtp.stage import Manifest, read_manifest
from tests.fastmtp.fixtures import write_checkpoint

WORDS = [
    "some",
    "words",
    "to",
    "answer",
    "with",
    "care",
    "and",
    "more",
    "of",
    "them",
    "so",
    "that",
    "lengths",
    "differ",
    "from",
    "row",
    "to",
    "row",
]
DATA = DataConfig(prompts="", max_length=80, max_new_tokens=24, batch_size=5, holdout=0.25)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    lines = [{"prompt": " ".join(WORDS[: 1 + n % 9]) + f" {n}"} for n in range(40)]
    lines += [{"prompt": "x" * 200}, lines[0]]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return file


@pytest.fixture(scope="module")
def data(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("data") / "d"
    run_prepare(model, target, prompts=str(prompts))
    return target


def run_prepare(model: Path, target: Path, **changes: object) -> Manifest:
    return prepare(model, DATA.model_copy(update=changes), target, Reporter("prepare", quiet=True))


def test_stored_rows_are_what_the_verifier_says(model: Path, data: Path) -> None:
    """Cases D4, T2: ids are those of greedy generation, states those after the final norm, row by row."""
    store = RowStore(data, fingerprint(open_checkpoint(model)))
    verifier = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    assert len(store.entries) == 40
    assert len({entry.key for entry in store.entries}) == 40
    for entry in store.entries:
        ids, hidden, mask = store.row(entry)
        assert mask.tolist() == [False] * entry.prompt_length + [True] * (entry.length - entry.prompt_length)
        with torch.inference_mode():
            logits = verifier(input_ids=ids[None]).logits[0].float()
            fresh = verifier.base_model(input_ids=ids[None]).last_hidden_state[0]
        torch.testing.assert_close(hidden.float(), fresh.float(), atol=0.06, rtol=0.06)
        # Greedy: each stored token is the argmax, or within bf16's rounding of it.
        chosen = logits[entry.prompt_length - 1 : -1].gather(1, ids[entry.prompt_length :, None]).squeeze(1)
        assert (logits[entry.prompt_length - 1 : -1].max(-1).values - chosen).max() < 0.1


def test_every_row_is_used_or_counted(data: Path) -> None:
    summary = read_manifest(data).summary
    assert summary["rows_in"] == 42
    assert summary["rejected"] == {"prompt too long": 1, "duplicate": 1}
    assert summary["rows"] + sum(summary["rejected"].values()) == summary["rows_in"]
    assert 0 < summary["rows_holdout"] < 20


def test_split_and_choice_are_stable(model: Path, prompts: Path, data: Path, tmp_path: Path) -> None:
    """A conversation keeps its side when more data comes, and in any order."""
    lines = prompts.read_text().splitlines()
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(reversed(lines[:15])) + "\n")
    run_prepare(model, tmp_path / "d", prompts=str(fewer))
    verifier = fingerprint(open_checkpoint(model))
    known = {entry.key: entry.split for entry in RowStore(data, verifier).entries}
    found = {entry.key: entry.split for entry in RowStore(tmp_path / "d", verifier).entries}
    assert found.items() <= known.items()
    summary = run_prepare(model, tmp_path / "s", prompts=str(prompts), max_samples=10).summary
    assert summary["rows"] + sum(summary["rejected"].values()) == summary["rows_in"] == 42
    assert summary["rejected"]["not sampled"] == 31


def test_prompts_that_do_not_fit(model: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompt fits"):
        run_prepare(model, tmp_path / "d", prompts=str(prompts), max_length=8)
    assert not (tmp_path / "d").exists()


def test_prompts_are_rendered_by_the_models_own_template(model: Path, data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    store = RowStore(data, fingerprint(open_checkpoint(model)))
    ids, _, _ = store.row(store.entries[0])
    text = tokenizer.decode(ids[: store.entries[0].prompt_length])
    assert text.replace(" ", "").startswith("<|im_start|>") and "assistant" in text.replace(" ", "")
