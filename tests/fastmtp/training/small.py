"""A job small enough to train in a second, on rows that a head can learn: each token follows from the one before."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import TrainConfig
from fastmtp.data.shards import Verifier
from fastmtp.data.store import RowEntry, RowWriter
from fastmtp.extract import extract
from fastmtp.progress import Reporter
from fastmtp.stage import Manifest, run_stage
from fastmtp.train import train
from tests.fastmtp.fixtures import SIZES, write_checkpoint

SMALL = TrainConfig(
    lr=1e-2, epochs=3, batch_tokens=120, micro_tokens=60, warmup_ratio=0.1, device="cpu", allow_untrained_head=True
)


@dataclass(frozen=True)
class Job:
    """What training takes, on disk."""

    model: Path
    head: Path
    data: Path

    def train(self, target: Path, *, head: Path | None = None, **changes: Any) -> Manifest:
        config = TrainConfig.model_validate(SMALL.model_dump() | changes)
        return train(self.model, head or self.head, self.data, config, target, Reporter("train", quiet=True))

    def command(self, directory: Path, target: Path, **changes: Any) -> list[str]:
        """Arguments of the command for the same, after `python -m fastmtp`."""
        job = {
            "model": str(self.model),
            "data": {"prompts": "unused.jsonl"},
            "evaluate": {"prompts": "unused.jsonl"},
            "train": SMALL.model_dump() | changes,
        }
        file = directory / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        return [
            "train", str(file), "--head", str(self.head), "--data", str(self.data), "--out", str(target), "--json",
        ]  # fmt: skip


def make_job(root: Path) -> Job:
    """The job in a directory."""
    made = Job(write_checkpoint(root / "model", "qwen3.5"), root / "head", root / "data")
    extract(made.model, made.head, Reporter("extract", quiet=True))
    verifier = Verifier.of(open_checkpoint(made.model))
    run_stage(
        "prepare", made.data, config={}, inputs={}, reporter=Reporter("prepare", quiet=True),
        body=lambda directory: write_rows(directory, verifier),
    )  # fmt: skip
    return made


def write_rows(directory: Path, verifier: Verifier) -> dict[str, Any]:
    """30 rows of a fixed successor of each of 12 tokens, with states that say which token it is; 6 are held out."""
    random = torch.Generator().manual_seed(0)
    successor = torch.randperm(12, generator=random)
    states = torch.randn(12, SIZES["hidden_size"], generator=random)
    rows: list[tuple[RowEntry, list[int]]] = []
    for number in range(30):
        length, prompt = 14 + number % 9, 3 + number % 4
        ids = [number % 12]
        while len(ids) < length:
            ids.append(int(successor[ids[-1]]))
        split = "holdout" if number % 5 == 0 else "train"
        rows.append((RowEntry(f"row-{number}", split, length, prompt, "stop"), ids))
    with RowWriter(directory, verifier, rows) as writer:
        for index, (_, ids) in enumerate(rows):
            writer.put(index, ids, states[ids])
        writer.close()
    return {}


def copy_head(source: Path, target: Path) -> Path:
    """A head that a test may change."""
    shutil.copytree(source, target)
    return target
