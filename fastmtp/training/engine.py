"""One optimizer step, and one pass over held-out rows, in however many processes.

Gradients of a step are those of the mean loss over all its targets, whatever the number of micro-batches and processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from fastmtp.acceptance import Walk, measurement
from fastmtp.config import TrainConfig
from fastmtp.data.rows import PackedRows
from fastmtp.data.store import RowEntry
from fastmtp.protocol import Measurement
from fastmtp.training.checks import require_finite
from fastmtp.training.loading import Loader
from fastmtp.training.metrics import Record
from fastmtp.training.objective import Objective
from fastmtp.training.optim import Optimizers, like, rate
from fastmtp.training.plan import tokens_of
from fastmtp.training.stopping import Stop, StopSignals
from fastmtp.training.world import World, whole

_HEAD, _OPTIMIZER = "head/", "optimizer/"


class Engine:
    """The head under training with its optimizer, on this process's device."""

    def __init__(
        self, objective: Objective, loader: Loader, config: TrainConfig, world: World, stop: StopSignals
    ) -> None:
        self._config, self._loader, self._world, self._stop = config, loader, world, stop
        self._dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._weights = objective.weights
        self._module: nn.Module = world.wrap(objective.to(world.device))
        self._head = objective.head
        self._optimizers = Optimizers(self._head, config)

    def step(self, entries: Sequence[RowEntry], number: int, total: int) -> Record:
        """Optimizer step `number` (from 0) of `total`, on its rows. Raises Stop with nothing changed by it.

        Raises:
            TrainingError: loss or gradient is not finite; nothing was changed then either.
        """
        begun, waited = time.monotonic(), self._loader.waited
        try:
            sums = self._gradients(number)
        except Stop:
            self._optimizers.drop_gradients()
            raise
        norm = float(whole(nn.utils.clip_grad_norm_(self._head.parameters(), self._config.grad_clip)))
        learning_rate = rate(number, total, self._config)
        losses, hits, counts, _ = sums.tolist()
        means = [loss / max(1, count) for loss, count in zip(losses, counts, strict=True)]
        loss = sum(weight * mean for weight, mean in zip(self._weights, means, strict=True))
        require_finite(loss, norm, number + 1, learning_rate)
        self._optimizers.step(learning_rate)
        record = {"loss": loss, **{f"loss_{k}": mean for k, mean in enumerate(means)}}
        record |= {f"hit_{k}": hit / max(1, count) for k, (hit, count) in enumerate(zip(hits, counts, strict=True))}
        seconds = time.monotonic() - begun
        return record | {
            "lr": learning_rate, "grad_norm": norm, "tokens_per_second": tokens_of(entries) / seconds,
            "loading": (self._loader.waited - waited) / seconds,
        }  # fmt: skip

    def estimate(self, entries: Sequence[RowEntry]) -> Measurement:
        """Acceptance on rows by the walk (`fastmtp.acceptance`), with the recursion that is served."""
        walk = Walk(self._config.num_steps)
        for part in self._loader.share(entries):
            rows = self._load(part)
            with torch.no_grad(), self._autocast():
                _, hits = self._module(rows)
            for entry, row_hits in zip(part, hits.cpu().split([entry.length for entry in part]), strict=True):
                found = row_hits.tolist()
                for begin, end in entry.answers:
                    walk.add(found, begin - 1, end)
        drafts, *accepted = self._world.sum(torch.tensor([walk.drafts, *walk.accepted])).tolist()
        return measurement(drafts, accepted)

    def first_loss(self, entries: Sequence[RowEntry]) -> tuple[float, float]:
        """Mean cross-entropy of step 0 on rows, and the share of targets that it drafts."""
        with torch.no_grad(), self._autocast():
            _, sums = self._module(self._load(entries), [1.0] * self._config.num_steps)
        _, hits, count, cross_entropy = sums[:, 0].tolist()
        return cross_entropy / max(1.0, count), hits / max(1.0, count)

    def weights(self) -> dict[str, Tensor]:
        """fp32 master weights by name, each on its device, spread over processes if they are."""
        return {_HEAD + name: parameter.detach() for name, parameter in self._head.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Master weights and optimizer state: all that a step changes."""
        return self.weights() | {_OPTIMIZER + key: value for key, value in self._optimizers.state().items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave; tensors are whole ones on the CPU."""
        with torch.no_grad():
            for name, parameter in self._head.named_parameters():
                parameter.copy_(like(state[_HEAD + name], parameter))
        self._optimizers.load(
            {key.removeprefix(_OPTIMIZER): value for key, value in state.items() if key.startswith(_OPTIMIZER)}
        )

    def _gradients(self, number: int) -> Tensor:
        """Run a step's rows forward and backward. Returns [4, K] fp64, over all processes; see `Objective.forward`."""
        batches = self._loader.take(number)
        counted = [
            sum(int(rows.counted(step).sum()) for rows in batches if rows) for step in range(self._config.num_steps)
        ]
        # DDP and FSDP average over processes; each process's targets count by how many there are in all.
        totals = [max(1, int(count)) / self._world.size for count in self._world.sum(torch.tensor(counted))]
        sums = torch.zeros(4, self._config.num_steps, dtype=torch.float64)
        for index, rows in enumerate(batches):
            if self._world.any(self._world.size > 1 and self._stop.number != 0):
                raise Stop
            # One process breaks off at once. Several may not, or the others would wait for it for ever.
            breaking = self._stop.at_once() if self._world.size == 1 else nullcontext()
            with breaking, self._world.passing(self._module, last=index == len(batches) - 1):
                with self._autocast():
                    loss, found = self._module(self._place(rows), totals)
                loss.backward()
            sums = sums.to(found.device) + found
        return self._world.sum(sums.cpu())

    def _load(self, entries: Sequence[RowEntry]) -> PackedRows | None:
        return self._place(self._loader.pack(entries))

    def _place(self, rows: PackedRows | None) -> PackedRows | None:
        return rows.to(self._world.device, self._dtype) if rows else None

    def _autocast(self) -> AbstractContextManager[object]:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._world.device.type, self._dtype)


def head_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's weights among saved tensors, by their names in the module."""
    return {key.removeprefix(_HEAD): value for key, value in state.items() if key.startswith(_HEAD)}
