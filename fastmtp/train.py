"""Fine-tune the head on prepared rows: the loop, what it reports, and what makes it stop.

Only the head trains; embedding and output head are read from the verifier and stay as they are. Master weights are
fp32 and are cast to each tensor's stored type at the end. The result directory holds a head like the one that went
in, taken at the best held-out mean acceptance length, with `metrics.jsonl` and a plot of the curves.

Does not resume inside a run: a job that is interrupted trains again from its start.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastmtp.acceptance import Walk
from fastmtp.checkpoint import CONFIG, Checkpoint, TensorEntry, open_checkpoint
from fastmtp.config import TrainConfig
from fastmtp.data.rows import PackedRows
from fastmtp.data.store import RowEntry, RowStore
from fastmtp.errors import DataError, FastMTPError
from fastmtp.extract import HEAD_FILE, fingerprint
from fastmtp.head import StepOutput, from_native, head_from_config, to_native
from fastmtp.losses import chunked_cross_entropy
from fastmtp.native import find_head
from fastmtp.plots import plot_curves
from fastmtp.progress import Reporter
from fastmtp.protocol import Measurement
from fastmtp.stage import Manifest, read_manifest, run_stage

METRICS = "metrics.jsonl"
CURVES = "curves.png"
_FORWARD_TOKENS = 8192  # rows run through the head at once; a step with more accumulates gradients

_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class TrainingError(FastMTPError):
    """Training cannot go on, or its result is not to be trusted."""

    code = "training_failed"


def step_weights(num_steps: int, beta: float) -> list[float]:
    """alpha_k = beta^k / sum_j beta^j (FastMTP, arXiv 2509.18362)."""
    raw = [beta**step for step in range(num_steps)]
    return [weight / sum(raw) for weight in raw]


def train(
    model: Path, head: Path, data: Path, config: TrainConfig, target: Path, reporter: Reporter, *, replace: bool = False
) -> Manifest:
    """Fine-tune the head in `head` on the rows in `data` into `target`.

    Raises:
        DataError: the rows are of another verifier, or none counts.
        TrainingError: a loss that is not finite, or a tensor that did not move.
    """
    checkpoint = open_checkpoint(model)
    verifier = fingerprint(checkpoint)
    inputs = {"model": verifier, "head": read_manifest(head).digest(), "data": read_manifest(data).digest()}
    return run_stage(
        "train", target, config=config.model_dump(), inputs=inputs, reporter=reporter, replace=replace,
        body=lambda directory: _Run(checkpoint, head, RowStore(data, verifier), config, directory, reporter).train(),
    )  # fmt: skip


@dataclass
class _StepSums:
    """Sums over one optimizer step, per recursion step."""

    losses: list[float]
    hits: list[int]
    counts: list[int]
    tokens: int = 0
    last: dict[str, float] = field(default_factory=dict)


class _Run:
    """One training run; `train` is the whole of it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        head_dir: Path,
        store: RowStore,
        config: TrainConfig,
        directory: Path,
        reporter: Reporter,
    ) -> None:
        self.config, self.store, self.directory, self.reporter = config, store, directory, reporter
        cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda" if cuda else "cpu")
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        torch.manual_seed(config.seed)
        info = find_head(checkpoint)
        self.layout, self.model_config = info.layout, checkpoint.config
        self.head_dir = head_dir
        native = load_file(head_dir / HEAD_FILE)
        self.native_types = {key: value.dtype for key, value in native.items()}
        self.head = head_from_config(checkpoint.config)
        state = from_native(native, checkpoint.config)
        self.head.load_state_dict({key: value.float() for key, value in state.items()}, strict=True)
        self.head.to(self.device)
        self.before = {name: p.detach().clone() for name, p in self.head.named_parameters()}
        self.embedding = _load(checkpoint, info.embedding).to(self.device, self.dtype)
        tied = info.output == info.embedding
        self.output = self.embedding if tied else _load(checkpoint, info.output).to(self.device, self.dtype)
        self.weights = step_weights(config.num_steps, config.beta)

    def train(self) -> dict[str, Any]:
        rows, held_out = self.store.split("train"), self.store.split("holdout")
        steps = self._plan(rows)
        optimizer = self._optimizer()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, len(steps), self.config))
        evaluate_at = {round(len(steps) * (epoch + 1) / self.config.epochs) for epoch in range(self.config.epochs)}
        best, best_state = self.estimate(held_out), {k: v.clone() for k, v in self.head.state_dict().items()}
        estimates = [{"step": 0, **_flat(best)}]
        self.reporter.phase("fine-tuning the head", len(steps), "steps")
        with (self.directory / METRICS).open("w", encoding="utf-8") as metrics:
            self._log(metrics, 0, _flat(best), "")
            for number, step_rows in enumerate(steps, start=1):
                record = self._step(step_rows, optimizer, schedule)
                if number in evaluate_at or number == len(steps):
                    found = self.estimate(held_out)
                    record |= _flat(found)
                    estimates.append({"step": number, **_flat(found)})
                    if found.mean_acceptance_length > best.mean_acceptance_length:
                        best, best_state = found, {k: v.clone() for k, v in self.head.state_dict().items()}
                self._log(metrics, number, record, _note(record, best))
        moved = self._require_moved()
        if held_out:
            self.head.load_state_dict(best_state)
        self._save()
        plot_curves(self.directory / METRICS, self.directory / CURVES)
        return {
            "steps": len(steps),
            "rows": len(rows),
            "tensors_moved": moved,
            "tensors": len(self.before),
            "estimates": estimates,
            "best": best.model_dump(),
            "recursion": self.config.recursion,
        }

    def estimate(self, entries: Sequence[RowEntry]) -> Measurement:
        """Acceptance on held-out rows by the walk, always with the serving recursion: that is what will be served."""
        walk = Walk(self.config.num_steps)
        for part in _fill(entries, _FORWARD_TOKENS):
            rows = self._load(part)
            # Decoding lands on origins from the last prompt position on: where x_{t+1} is the assistant's.
            origins = torch.zeros_like(rows.loss_mask)
            origins[:-1] = rows.loss_mask[1:]
            origins &= rows.remaining() >= 2
            hits = torch.zeros(len(rows.input_ids), self.config.num_steps, dtype=torch.bool)
            with torch.no_grad(), self._autocast():
                for step, output in enumerate(self._recurse(rows, origins, "serving")):
                    kept = rows.remaining()[output.origins] >= step + 2
                    places = output.origins[kept]
                    _, hit = chunked_cross_entropy(output.states[kept], self.output, rows.input_ids[places + step + 2])
                    hits[places.cpu(), step] = hit.cpu()
            for entry, row_hits in zip(part, hits.split(rows.lengths), strict=True):
                walk.add(row_hits.tolist(), entry.prompt_length - 1, entry.length)
        return walk.measurement()

    def _plan(self, rows: Sequence[RowEntry]) -> list[list[RowEntry]]:
        """Rows of every optimizer step, in a seeded order that is new in each epoch."""
        supervised = sum(entry.length - entry.prompt_length for entry in rows)
        if supervised == 0:
            raise DataError("No token is supervised: there is nothing to train on.", mend="Prepare more prompts.")
        steps: list[list[RowEntry]] = []
        for epoch in range(self.config.epochs):
            order = list(rows)
            random.Random(f"{self.config.seed}:{epoch}").shuffle(order)  # noqa: S311
            steps += _fill(order, self.config.batch_tokens)
        steps = steps[: self.config.max_steps]
        self.reporter.say(
            f"{len(rows)} rows, {supervised} supervised tokens, {len(steps)} steps of up to {self.config.batch_tokens}"
            f" tokens on {self.device.type}, {self.config.recursion} recursion, K={self.config.num_steps}"
        )
        return steps

    def _optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.head.parameters() if p.dim() > 1]
        vectors = [p for p in self.head.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.config.lr)

    def _step(
        self,
        entries: Sequence[RowEntry],
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LambdaLR,
    ) -> dict[str, float]:
        begun = time.monotonic()
        num_steps = self.config.num_steps
        sums = _StepSums([0.0] * num_steps, [0] * num_steps, [0] * num_steps)
        batches = [self._load(part) for part in _fill(entries, _FORWARD_TOKENS)]
        totals = [sum(int(rows.counted(step).sum()) for rows in batches) for step in range(num_steps)]
        for rows in batches:
            self._backward(rows, totals, sums)
        norm = float(torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.grad_clip))
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        record = {f"loss_{k}": sums.losses[k] / max(1, sums.counts[k]) for k in range(num_steps)}
        record["loss"] = sum(self.weights[k] * record[f"loss_{k}"] for k in range(num_steps))
        record |= {f"hit_{k}": sums.hits[k] / max(1, sums.counts[k]) for k in range(num_steps)}
        record |= {"lr": rate, "grad_norm": norm, "tokens_per_second": sums.tokens / (time.monotonic() - begun)}
        if not math.isfinite(record["loss"]) or not math.isfinite(norm):
            raise TrainingError(f"The loss is {record['loss']} with gradient norm {norm}; lower train.lr.")
        return record

    def _backward(self, rows: PackedRows, totals: Sequence[int], sums: _StepSums) -> None:
        """Forward and backward of one packed batch; each step's loss is the mean over the whole optimizer step."""
        counted = [rows.counted(step) for step in range(self.config.num_steps)]
        origins = torch.stack(counted).any(0)
        loss = torch.zeros((), device=self.device)
        with self._autocast():
            for step, output in enumerate(self._recurse(rows, origins, self.config.recursion)):
                kept = counted[step][output.origins]
                targets = rows.input_ids[output.origins[kept] + step + 2]
                if not len(targets):
                    continue
                total, hits = chunked_cross_entropy(output.states[kept], self.output, targets)
                loss = loss + self.weights[step] * total / totals[step]
                sums.losses[step] += float(total.detach())
                sums.hits[step] += int(hits.sum())
                sums.counts[step] += len(targets)
        sums.tokens += len(rows.input_ids)
        if loss.requires_grad:
            loss.backward()

    def _recurse(self, rows: PackedRows, origins: Tensor, recursion: str) -> Iterator[StepOutput]:
        run = self.head.serving if recursion == "serving" else self.head.plain
        return run(rows, self.embedding, self.config.num_steps, origins)

    def _load(self, entries: Sequence[RowEntry]) -> PackedRows:
        return PackedRows.pack([self.store.row(entry) for entry in entries]).to(self.device, self.dtype)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def _require_moved(self) -> int:
        """Every tensor of the head must have changed; one that did not was not connected, or its steps rounded away."""
        still = [name for name, p in self.head.named_parameters() if torch.equal(p, self.before[name])]
        if still:
            raise TrainingError(f"{len(still)} tensors did not move in training, {still[0]} first.")
        return len(self.before)

    def _save(self) -> None:
        native = to_native(
            {key: value.cpu() for key, value in self.head.state_dict().items()}, self.model_config, self.layout
        )
        stored = {key: value.to(self.native_types[key]) for key, value in native.items()}
        save_file(stored, self.directory / HEAD_FILE, metadata={"format": "pt"})
        shutil.copyfile(self.head_dir / CONFIG, self.directory / CONFIG)

    def _log(self, file: TextIO, step: int, record: dict[str, float], note: str) -> None:
        file.write(json.dumps({"step": step, **record}) + "\n")
        file.flush()
        self.reporter.advance(step, metrics={"step": float(step), **record}, note=note)


def _load(checkpoint: Checkpoint, entry: TensorEntry) -> Tensor:
    data = torch.frombuffer(bytearray(checkpoint.read(entry)), dtype=_TYPES[entry.dtype])
    return data.view(entry.shape)


def _fill(entries: Sequence[RowEntry], budget: int) -> list[list[RowEntry]]:
    """Consecutive rows in groups of up to `budget` tokens; a longer row stands alone."""
    groups: list[list[RowEntry]] = []
    tokens = budget
    for entry in entries:
        if tokens + entry.length > budget:
            groups.append([])
            tokens = 0
        groups[-1].append(entry)
        tokens += entry.length
    return groups


def _rate(step: int, total: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine to a tenth of the peak."""
    warm = max(1, round(total * config.warmup_ratio))
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, total - warm)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def _flat(found: Measurement) -> dict[str, float]:
    rates = {f"acceptance_{k}": rate for k, rate in enumerate(found.acceptance)}
    return {**rates, "mean_acceptance_length": found.mean_acceptance_length}


def _note(record: dict[str, float], best: Measurement) -> str:
    return (
        f"loss {record['loss']:.3f}  {record['tokens_per_second']:.0f} tokens/s"
        f"  held-out length {best.mean_acceptance_length:.3f}"
    )
