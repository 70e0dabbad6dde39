"""The verifier in this process: on the accelerator where there is one, from disk where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fastmtp.checkpoint import open_checkpoint
from fastmtp.errors import DataError
from fastmtp.table import size

_HEADROOM = 0.85  # of what is free; the rest is for activations and caches


@dataclass(frozen=True)
class Loaded:
    """A loaded model.

    Attributes:
        offloaded: some of its weights lie on disk and are read again in each pass.
        where: for people.
    """

    model: PreTrainedModel
    device: torch.device
    offloaded: bool
    where: str


def load_verifier(path: Path, folder: Path, *, offload: bool | Literal["auto"], limit: int | None = None) -> Loaded:
    """Load a checkpoint in its own dtype.

    Args:
        folder: where weights go that are read again in each pass and are not stored in the form that is needed.
        offload: False: never; "auto": where it does not fit; True: anyhow.
        limit: bytes of memory it may take on any device, if that is less than what is free.

    Raises:
        DataError: it does not fit, and offloading is off.
    """
    needed = open_checkpoint(path).nbytes
    room = {place: min(free, limit or free) for place, free in _room().items()}
    devices = [place for place in room if place != "cpu"] or ["cpu"]
    together = sum(room[place] for place in devices)
    if offload is False and needed > together:
        raise DataError(
            f"{path} takes {size(needed)}; {size(together)} are free for it.",
            mend="Take data.offload: auto, or a larger device.", pointer="/data/offload",
        )  # fmt: skip
    offloaded = offload is True or needed > together
    kwargs: dict[str, Any] = {"device_map": devices[0]}
    if offloaded or needed > room[devices[0]]:
        # With offload: true nothing stays; each layer is read when it is its turn.
        most = {place: 1 if offload is True else free for place, free in room.items()}
        kwargs = {"device_map": "auto", "max_memory": most, "offload_folder": str(folder)}
        folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **kwargs).eval()
    device = torch.device("cpu" if devices[0] == "cpu" else f"cuda:{devices[0]}")
    where = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if offloaded:
        where += f", layer by layer: up to {size(needed)} are read in each pass"
    return Loaded(model, device, offloaded, where)


def _room() -> dict[int | str, int]:
    """Bytes that a model may take: of each GPU by its number, then of memory."""
    gpus = range(torch.cuda.device_count())
    free: dict[int | str, int] = {index: torch.cuda.mem_get_info(index)[0] for index in gpus}
    free["cpu"] = psutil.virtual_memory().available
    return {place: int(found * _HEADROOM) for place, found in free.items()}


class Loader:
    """Loads a verifier when it is first wanted, once; vLLM may need the device before that."""

    def __init__(self, path: Path, folder: Path, offload: bool | Literal["auto"]) -> None:
        self.path = path
        self._folder, self._offload = folder, offload
        self._loaded: Loaded | None = None

    def get(self) -> Loaded:
        """The verifier. Raises DataError where it does not fit."""
        if self._loaded is None:
            self._loaded = load_verifier(self.path, self._folder, offload=self._offload)
        return self._loaded
