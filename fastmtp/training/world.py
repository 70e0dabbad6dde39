"""The processes that train together, and what one of them needs to know of the others. One process is a world too.

Gradients are summed over processes by DDP, or by FSDP2 where weights, gradients and optimizer state are spread as well
(`shard`). The head is one layer, so FSDP gathers it as one group for each pass over a micro-batch; every process must
make the same number of passes, empty ones included. Few small numbers (counts, losses, flags) go over gloo, on the CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fastmtp.config import TrainConfig
from fastmtp.errors import ConfigError

LAUNCHED = "TORCHELASTIC_RUN_ID"  # set by torchrun in every process it starts


def pick_device(config: TrainConfig) -> torch.device:
    """The kind of device to train on. Raises ConfigError when the one that is asked for is not there."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ConfigError(
            "train.device is cuda, but torch finds no CUDA device here.",
            mend="Use a host with one, or device: auto.",
            pointer="/train/device",
        )
    return torch.device("cuda" if there and config.device != "cpu" else "cpu")


def count_processes(config: TrainConfig) -> int:
    """How many processes train. Raises ConfigError when there are fewer devices."""
    device = pick_device(config)
    found = torch.cuda.device_count() if device.type == "cuda" else None
    if config.processes == "auto":
        return found or 1
    if found is not None and config.processes > found:
        raise ConfigError(
            f"train.processes is {config.processes}, but torch finds {found} CUDA devices here.",
            mend="Ask for as many as there are, or for auto.",
            pointer="/train/processes",
        )
    return config.processes


class World:
    """This process among those that train. Use as a context manager, which joins and leaves the group.

    Attributes:
        rank, size: which process this is, of how many.
        device: where it computes.
    """

    def __init__(self, config: TrainConfig) -> None:
        launched = LAUNCHED in os.environ
        self.rank = int(os.environ["RANK"]) if launched else 0
        self.size = int(os.environ["WORLD_SIZE"]) if launched else 1
        self.device = pick_device(config)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if launched else 0)
        self._shard = config.shard and self.size > 1
        self._compute = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32

    @property
    def main(self) -> bool:
        """Whether this process is the one that reports and writes results."""
        return self.rank == 0

    def __enter__(self) -> World:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error others may still be inside a collective; leaving the group then would wait for them.
        if self.size > 1 and kind is None:
            dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a CPU tensor over all processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; the same answer in all."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag))))

    def barrier(self) -> None:
        """Wait for the others."""
        self.any(False)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Make the module's gradients those of all processes together, averaged. Its parameters are spread if asked."""
        if self.size == 1:
            return module
        if not self._shard:
            return DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)
        mesh = init_device_mesh(self.device.type, (self.size,))
        # Sums of gradients stay in fp32 whatever the compute type.
        policy = MixedPrecisionPolicy(
            param_dtype=self._compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        )  # fmt: skip
        return cast(nn.Module, fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True))

    @contextlib.contextmanager
    def passing(self, module: nn.Module, *, last: bool) -> Iterator[None]:
        """Around one forward and backward pass: gradients are exchanged in the last of a step only."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        if isinstance(module, DistributedDataParallel) and not last:
            with module.no_sync():
                yield
        else:
            yield


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be spread over processes, gathered on the CPU. All processes must call it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be spread over processes, on the CPU."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().cpu()


def is_spread(tensor: Tensor) -> bool:
    """Whether each process holds a part of it only."""
    return isinstance(tensor, DTensor)
