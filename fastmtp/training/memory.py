"""What a run needs before it starts: memory per process and room on disk. Estimates, and said to be.

What the head, its optimizer and the verifier's two matrices take is exact. What a pass keeps for its gradient depends
on the layer's code; it is counted as the inputs of each matrix product and norm, for each token and recursive step.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from fastmtp.config import TrainConfig
from fastmtp.errors import InputError
from fastmtp.table import size


@dataclass(frozen=True)
class Needs:
    """Bytes.

    Attributes:
        state: master weights, gradients and optimizer state, per process.
        verifier: token embedding and output head, per process.
        passing: what one pass keeps, about, per process.
        disk: two saves at once and the best head.
    """

    state: int
    verifier: int
    passing: int
    disk: int

    @property
    def memory(self) -> int:
        return self.state + self.verifier + self.passing

    def __str__(self) -> str:
        return (
            f"about {size(self.memory)} for each process ({size(self.state)} weights and optimizer,"
            f" {size(self.verifier)} embedding and output head, {size(self.passing)} a pass)"
            f" and {size(self.disk)} of disk"
        )


def needs(
    parameters: int, shared: int, text: Mapping[str, Any], config: TrainConfig, processes: int, tokens: int
) -> Needs:
    """What training takes.

    Args:
        parameters: of the head.
        shared: elements of embedding and output head, once when they are tied.
        text: the text part of config.json.
        tokens: most that a process runs through the head at once.
    """
    width = 2 if config.dtype == "bfloat16" else 4
    spread = processes if config.shard else 1
    state = 16 * parameters // spread  # fp32 weight, gradient and two moments
    if config.shard or width == 2:
        state += width * parameters  # gathered, or cast, for the pass
    hidden = int(text["hidden_size"])
    heads = int(text["num_attention_heads"]) * int(text.get("head_dim") or hidden // int(text["num_attention_heads"]))
    inner = 0 if config.recompute else 4 * _inner(text)
    # Under autocast norms and sums stay in fp32, and about half of what is kept is theirs.
    bytes_each = 3 if width == 2 else 4
    kept = tokens * config.num_steps * bytes_each * (14 * hidden + 6 * heads + inner)
    return Needs(state=state, verifier=width * shared, passing=kept, disk=(2 * 12 + 4 + 4) * parameters)


def _inner(text: Mapping[str, Any]) -> int:
    """Feed-forward units a token passes through."""
    if "moe_intermediate_size" not in text:
        return int(text["intermediate_size"])
    chosen = int(text.get("num_experts_per_tok") or 1) * int(text["moe_intermediate_size"])
    return chosen + int(text.get("shared_expert_intermediate_size") or 0)


def require_room(found: Needs, device: torch.device, place: Path) -> None:
    """Raise InputError when what is needed for certain, without the passes, is more than there is."""
    if device.type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], "on the GPU"
    else:
        free, where = psutil.virtual_memory().available, "of memory"
    certain = found.state + found.verifier
    if certain > free:
        raise InputError(
            f"Training needs {size(certain)} for each process before its first pass; {size(free)} {where} are free.",
            mend="Use more processes with train.shard, a larger device, or dtype bfloat16.",
            pointer="/train",
        )
    place = next(path for path in (place, *place.parents) if path.exists())
    room = shutil.disk_usage(place).free
    if found.disk > room:
        raise InputError(
            f"{place} has {size(room)} free; saves of this run take up to {size(found.disk)}.",
            mend="Free space, or name another directory.",
        )
