"""What a model is and whether a job can use it, from headers alone: the `inspect` verb and the preflight of every job.

Reads config, index and the headers of the safetensors files, wherever they lie; no tensor. Loads no torch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from fastmtp.backbone import check_backbone
from fastmtp.checkpoint import CONFIG, Checkpoint, Fault, no_collection, scan
from fastmtp.errors import CheckpointError
from fastmtp.families import family_of
from fastmtp.families.base import text_config
from fastmtp.files import open_files, printable
from fastmtp.headers import TensorEntry
from fastmtp.native import HeadInfo, examine, quantisation_of

_STATE_BYTES = 2  # hidden states are stored in bf16


class HeadReport(BaseModel):
    """The native head."""

    layout: Literal["dense", "split", "fused"] = Field(description="Experts one by one (split) or stacked (fused).")
    prefix: str = Field(description="What its keys begin with, a wrapper's prefix included.")
    tensors: int
    bytes: int
    dtypes: dict[str, int] = Field(description="dtype -> bytes.")
    files: dict[str, int] = Field(description="File -> bytes of the head in it.")
    copies: list[str] = Field(description="Copies of the embedding or output head inside the head.")


class JobCosts(BaseModel):
    """Bytes that a job on this model reads and writes, beside its own rows."""

    read_by_extract: int
    read_by_train: int = Field(description="Head, token embedding and output head.")
    read_by_vllm: int = Field(description="Each time the model is served.")
    written_by_stitch: int = Field(description="Touched shards and side files; the other shards are links.")
    written_by_stitch_as_copy: int = Field(description="Where links are not possible: everything.")
    states_per_1000_tokens: int = Field(description="Hidden states of the training rows, bf16.")


class FaultReport(BaseModel):
    """Something that does not fit; see `fastmtp.checkpoint.Fault`."""

    level: Literal["error", "serving", "warning"]
    code: str
    what: str
    mend: str
    file: str
    key: str


class Inspection(BaseModel):
    """Everything `fastmtp inspect` says."""

    model: str
    usable: bool = Field(description="A job can use it as it is.")
    family: str | None
    trainable: bool = Field(description="Whether heads of this family can be fine-tuned, not only read and stitched.")
    tensors: int
    files: int
    bytes: int
    dtypes: dict[str, int] = Field(description="dtype -> bytes, over all tensors.")
    quantisation: str | None
    tied: bool = Field(description="Whether the output head is the token embedding.")
    sizes: dict[str, int] = Field(description="hidden_size, num_hidden_layers, vocab_size, as config.json has them.")
    head: HeadReport | None
    job: JobCosts | None
    faults: list[FaultReport]
    seconds: float


def look(model: str | Path) -> tuple[Checkpoint, HeadInfo | None, list[Fault]]:
    """Scan a model and judge all of it. Raises CheckpointError only where the place itself cannot be read."""
    with no_collection():
        return _look(model)


def _look(model: str | Path) -> tuple[Checkpoint, HeadInfo | None, list[Fault]]:
    checkpoint = scan(open_files(model))
    faults = list(checkpoint.faults)
    head = None
    if not any(fault.file == CONFIG for fault in faults):
        head, found = examine(checkpoint)
        # With files missing or broken, what the head lacks is a consequence and would only hide the cause.
        broken = any(fault.level == "error" for fault in faults)
        faults += [fault for fault in found if not (broken and fault.level == "error")]
    if head is not None and not any(fault.level == "error" for fault in faults):
        faults += check_backbone(checkpoint, head)
    return checkpoint, head, faults


def inspect(model: str | Path) -> Inspection:
    """Look at a model by path, s3:// URI or hub id. Raises CheckpointError where nothing can be read there at all."""
    begun = time.perf_counter()
    checkpoint, head, faults = look(model)
    return describe(checkpoint, head, faults, time.perf_counter() - begun)


def describe(checkpoint: Checkpoint, head: HeadInfo | None, faults: list[Fault], seconds: float) -> Inspection:
    """What `look` found, as one record."""
    config = text_config(checkpoint.config)
    try:
        family = family_of(checkpoint.config)
    except CheckpointError:
        family = None
    quantisation = quantisation_of(checkpoint.config)
    sizes = {name: config.get(name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    return Inspection(
        model=printable(checkpoint.files.name),
        usable=head is not None and head.family.trainable and all(fault.level == "warning" for fault in faults),
        family=family.name if family else None,
        trainable=bool(family and family.trainable),
        tensors=len(checkpoint.tensors),
        files=len(checkpoint.shards),
        bytes=sum(checkpoint.shards.values()),
        dtypes=_dtypes(checkpoint.tensors.values()),
        quantisation=printable(quantisation.get("quant_method", "unnamed")) if quantisation is not None else None,
        tied=bool(config.get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings"))),
        sizes={name: value for name, value in sizes.items() if type(value) is int},
        head=_head(head, checkpoint) if head else None,
        job=_costs(head, checkpoint) if head else None,
        faults=[FaultReport(**{name: printable(value) for name, value in fault.__dict__.items()}) for fault in faults],
        seconds=round(seconds, 3),
    )


def _dtypes(entries: Iterable[TensorEntry]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for entry in entries:
        counts[entry.dtype] += entry.end - entry.begin
    return dict(counts.most_common())


def _head(head: HeadInfo, checkpoint: Checkpoint) -> HeadReport:
    files: Counter[str] = Counter()
    for entry in head.tensors.values():
        files[entry.file] += entry.nbytes
    return HeadReport(
        layout=head.layout,
        prefix=head.wrapper + head.family.head_prefix(text_config(checkpoint.config)),
        tensors=len(head.tensors),
        bytes=head.nbytes,
        dtypes=_dtypes(head.tensors.values()),
        files={printable(name): count for name, count in sorted(files.items())},
        copies=sorted(head.copies),
    )


def _costs(head: HeadInfo, checkpoint: Checkpoint) -> JobCosts:
    side = sum(info.size or 0 for name, info in checkpoint.listed.items() if name not in checkpoint.shards)
    shared = {head.embedding, head.output}
    total = sum(checkpoint.shards.values())
    config: dict[str, Any] = dict(text_config(checkpoint.config))
    return JobCosts(
        read_by_extract=head.nbytes,
        read_by_train=head.nbytes + sum(entry.nbytes for entry in shared),
        read_by_vllm=total,
        written_by_stitch=sum(checkpoint.shards[name] for name in head.files) + side,
        written_by_stitch_as_copy=total + side,
        states_per_1000_tokens=1000 * _STATE_BYTES * int(config["hidden_size"]),
    )
