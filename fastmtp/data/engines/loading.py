"""The verifier in this process: on the accelerator where there is one, from disk where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fastmtp.checkpoint import open_checkpoint
from fastmtp.table import size

_HEADROOM = 0.85  # of what is free; the rest is for activations and caches


@dataclass(frozen=True)
class Verifier:
    """A loaded model.

    Attributes:
        offloaded: some of its weights lie on disk and are read again in each pass.
        where: for people.
    """

    model: PreTrainedModel
    device: torch.device
    offloaded: bool
    where: str


def load_verifier(path: Path, folder: Path, *, offload: bool | str, limit: int | None = None) -> Verifier:
    """Load a checkpoint in its own dtype.

    Args:
        folder: where weights go that must be read from disk in another form than they are stored in.
        offload: False: never; "auto": where it does not fit; True: anyhow.
        limit: bytes of memory it may take, instead of what is found to be free.
    """
    cuda = torch.cuda.is_available()
    needed = open_checkpoint(path).nbytes
    room: dict[int | str, int] = {"cpu": psutil.virtual_memory().available}
    if cuda:
        room = {index: torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())} | room
    room = {place: int(free * _HEADROOM) for place, free in room.items()}
    first: int | str = 0 if cuda else "cpu"
    if limit is not None:
        room = {place: min(free, limit) for place, free in room.items()}
    if offload is True:
        # Nothing stays: each layer is read when it is its turn.
        room = {place: 1 for place in room}
    devices = sum(free for place, free in room.items() if not cuda or place != "cpu")
    if offload is False or needed <= room[first]:
        where: object = first
    else:
        where = "auto"
    spilled = offload is not False and needed > devices
    folder.mkdir(parents=True, exist_ok=True)
    extra = {} if where == first else {"max_memory": room, "offload_folder": str(folder)}
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map=where, **extra).eval()
    device = torch.device("cuda:0" if cuda else "cpu")
    name = torch.cuda.get_device_name(0) if cuda else "the CPU"
    said = f"{name}, layer by layer from disk: {size(needed)} are read in each pass" if spilled else name
    return Verifier(model, device, spilled, said)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every token that ends an answer, by the generation config or else the tokenizer."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    if ends is None:
        ends = tokenizer.eos_token_id
    return set(ends) if isinstance(ends, list) else {int(ends)}
