"""Rows whose states are computed in training: the same rows, states and losses as stored ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import DataConfig, TrainConfig
from fastmtp.data.online import IDS, OnlineRows, open_rows
from fastmtp.data.prepare import prepare
from fastmtp.data.states import disagreement
from fastmtp.data.store import RowStore
from fastmtp.errors import DataError
from fastmtp.extract import extract
from fastmtp.progress import Reporter
from fastmtp.train import METRICS, train
from tests.fastmtp.fixtures import write_checkpoint

QUIET = Reporter("prepare", quiet=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its head, and the same prompts prepared both ways."""
    root = tmp_path_factory.mktemp("online")
    model = write_checkpoint(root / "m")
    prompts = root / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {n * 7}"}) + "\n" for n in range(24)))
    for name in ("stored", "online"):
        config = DataConfig.model_validate(
            {"prompts": str(prompts), "max_length": 80, "max_new_tokens": 24, "holdout": 0.2, "hidden_states": name}
        )
        prepare(model, config, root / name, QUIET)
    extract(model, root / "head", QUIET)
    return root


def test_nothing_is_on_disk_but_tokens(place: Path) -> None:
    found = {path.name: path.stat().st_size for path in (place / "online").iterdir()}
    assert found.keys() == {IDS, "rows.jsonl", "manifest.json"}
    summary = json.loads((place / "online" / "manifest.json").read_text())["summary"]
    assert summary["hidden_states"] == "online"
    assert found[IDS] < 4 * summary["tokens"] + 1000


def test_rows_are_those_that_are_stored(place: Path) -> None:
    checkpoint = open_checkpoint(place / "m")
    stored, online = open_rows(place / "stored", checkpoint), open_rows(place / "online", checkpoint)
    assert isinstance(stored, RowStore) and isinstance(online, OnlineRows)
    for split in ("train", "holdout"):
        ours, theirs = online.split(split), stored.split(split)
        assert [entry.key for entry in ours] == [entry.key for entry in theirs] != []
        for mine, other in zip(online.rows(ours), stored.rows(theirs), strict=True):
            assert torch.equal(mine[0], other[0]) and torch.equal(mine[2], other[2])
            assert disagreement(mine[1], other[1]) < 0.02
        assert [online.answer_ids(entry) for entry in ours] == [stored.answer_ids(entry) for entry in theirs]
    assert online.rows([]) == []


def test_training_comes_to_the_same_loss(place: Path, tmp_path: Path) -> None:
    config = TrainConfig(epochs=2, batch_tokens=400, lr=1e-3, allow_untrained_head=True, device="cpu")
    losses = []
    for name in ("stored", "online"):
        train(place / "m", place / "head", place / name, config, tmp_path / name, Reporter("train", quiet=True))
        records = [json.loads(line) for line in (tmp_path / name / METRICS).read_text().splitlines()]
        losses.append([record["loss"] for record in records if "loss" in record])
    assert len(losses[0]) == len(losses[1]) > 3
    for stored, online in zip(*losses, strict=True):
        assert online == pytest.approx(stored, rel=0.01)


def test_tokens_of_another_verifier_are_refused(place: Path, tmp_path: Path) -> None:
    other = open_checkpoint(write_checkpoint(tmp_path / "m", seed=1))
    with pytest.raises(DataError, match="another verifier"):
        open_rows(place / "online", other)


def test_tokens_that_changed_are_refused(place: Path, tmp_path: Path) -> None:
    for name in (IDS, "rows.jsonl"):
        data = bytearray((place / "online" / name).read_bytes())
        if name == IDS:
            data[-4] ^= 1
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match="does not hold the tokens of row"):
        open_rows(tmp_path, open_checkpoint(place / "m"))
