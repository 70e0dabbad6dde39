"""Take the native head out of a checkpoint: its bytes only, by offset, under the family's names, dtypes as they are.

The result directory holds `head.safetensors`, `config.json` as the verifier has it, and the manifest, whose summary
says family, expert layout and where each tensor came from. The rest of the checkpoint is never read, wherever it lies.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastmtp.checkpoint import CONFIG, Checkpoint, TensorEntry, open_checkpoint
from fastmtp.native import HeadInfo, find_head
from fastmtp.norms import check_norms
from fastmtp.progress import Reporter
from fastmtp.stage import Manifest, digest_of, run_stage

HEAD_FILE = "head.safetensors"


def extract(model: str | Path, target: Path, reporter: Reporter, *, replace: bool = False) -> Manifest:
    """Extract the head of checkpoint `model` into `target`. Raises CheckpointError when there is no whole head."""
    checkpoint = open_checkpoint(model)
    head = find_head(checkpoint)
    return run_stage(
        "extract", target, config={}, inputs={"model": fingerprint(checkpoint)}, reporter=reporter, replace=replace,
        body=lambda directory: _extract(checkpoint, head, directory, reporter),
    )  # fmt: skip


def fingerprint(checkpoint: Checkpoint) -> str:
    """What identifies a checkpoint without reading its tensors: config, headers, and each file's size and stamp."""
    tensors = [list(entry) for _, entry in sorted(checkpoint.tensors.items())]
    stamps = {name: checkpoint.listed[name].stamp for name in checkpoint.shards}
    return digest_of([checkpoint.config, tensors, checkpoint.shards, stamps])


def header_of(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and JSON header of a safetensors file that holds `entries` one after the other under their keys."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    offset = 0
    for key, entry in entries.items():
        offsets = [offset, offset + entry.nbytes]
        header[key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _extract(checkpoint: Checkpoint, head: HeadInfo, directory: Path, reporter: Reporter) -> dict[str, Any]:
    warnings = [fault.what for fault in check_norms(checkpoint, head)]
    for warning in warnings:
        reporter.say(f"warning: {warning}")
    reporter.phase("copying the head's tensors", head.nbytes, "bytes")
    done = 0
    with (directory / HEAD_FILE).open("wb") as file:
        file.write(header_of(head.tensors))
        for entry in head.tensors.values():
            for block in checkpoint.blocks(entry):
                file.write(block)
                done += len(block)
                reporter.advance(done)
    (directory / CONFIG).write_bytes(checkpoint.files.read(CONFIG, 0, checkpoint.listed[CONFIG].size or 0))
    unlisted = set(checkpoint.unlisted)
    return {
        "family": head.family.name,
        "layout": head.layout,
        "tensors": {key: entry.file for key, entry in head.tensors.items()},
        "renamed_from": head.wrapper or None,
        "off_index": sorted(entry.key for entry in head.tensors.values() if entry.key in unlisted),
        "bytes": head.nbytes,
        "warnings": warnings,
    }
