"""The optimizer, its learning rate, and its state as plain tensors by name.

Master weights and every optimizer state are fp32. The rate is a function of the step alone, so there is no schedule to
save. Matrices decay and may go to Muon (arXiv 2502.16982: its rate is scaled to AdamW's); norms and stacked experts,
which are no matrices, stay with AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fastmtp.config import TrainConfig

FLOOR = 0.1  # of the peak rate, at the end


def rate(step: int, total: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`: linear warm-up, then cosine or linear to FLOOR."""
    warm = max(1, round(total * config.warmup_ratio))
    if step < warm:
        return config.lr * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, total - warm))
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return config.lr * (FLOOR + (1 - FLOOR) * left)


class Optimizers:
    """All parameters of a module under one learning rate, AdamW alone or beside Muon."""

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        muon = [p for p in self._names if config.optimizer == "muon" and p.dim() == 2]
        rest = [p for p in self._names if config.optimizer != "muon" or p.dim() != 2]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._all: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=config.lr)]
        if muon:
            self._all.append(
                torch.optim.Muon(
                    muon, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
                )  # fmt: skip
            )

    def step(self, learning_rate: float) -> None:
        """Apply the gradients, then drop them."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget gradients that are not to be applied."""
        for optimizer in self._all:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """`PARAMETER/STATE` -> tensor, such as `fc.weight/exp_avg`; empty before the first step."""
        return {
            f"{self._names[parameter]}/{key}": value
            for optimizer in self._all
            for parameter, states in optimizer.state.items()
            for key, value in states.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave; tensors are whole ones on the CPU."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    prefix = self._names[parameter] + "/"
                    optimizer.state[parameter] = {
                        key.removeprefix(prefix): like(value, parameter)
                        for key, value in state.items()
                        if key.startswith(prefix)
                    }


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor placed as a parameter is: on its device, and spread over processes if it is. Scalars stay on the
    CPU, where AdamW counts its steps."""
    if value.dim() == 0 and parameter.dim() != 0:
        return value.clone()
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    there = value.to(parameter.to_local().device)
    return distribute_tensor(there, parameter.device_mesh, parameter.placements, src_data_rank=None)
