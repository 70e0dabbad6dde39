"""Take the native head out of a checkpoint: its bytes only, by offset, names and dtypes as they are.

The result directory holds `head.safetensors` (keys `mtp.*`), `config.json` as the verifier has it, and the manifest,
whose summary says family, expert layout and where each tensor came from. The rest of the checkpoint is never read.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from fastmtp.checkpoint import CONFIG, Checkpoint, open_checkpoint
from fastmtp.preflight import HeadInfo, find_head
from fastmtp.progress import Reporter
from fastmtp.stage import Manifest, digest_of, run_stage

HEAD_FILE = "head.safetensors"


def extract(model: Path, target: Path, reporter: Reporter, *, replace: bool = False) -> Manifest:
    """Extract the head of checkpoint `model` into `target`. Raises CheckpointError when there is no whole head."""
    checkpoint = open_checkpoint(model)
    head = find_head(checkpoint)
    return run_stage(
        "extract", target, config={}, inputs={"model": fingerprint(checkpoint)}, reporter=reporter, replace=replace,
        body=lambda directory: _extract(checkpoint, head, directory, reporter),
    )  # fmt: skip


def fingerprint(checkpoint: Checkpoint) -> str:
    """What identifies a checkpoint without reading its tensors: config, headers, and each shard's size and mtime."""
    tensors = [
        [entry.key, entry.file, entry.dtype, entry.shape, entry.begin, entry.end]
        for _, entry in sorted(checkpoint.tensors.items())
    ]
    times = {name: (checkpoint.root / name).stat().st_mtime_ns for name in checkpoint.shards}
    return digest_of([checkpoint.config, tensors, checkpoint.shards, times])


def _extract(checkpoint: Checkpoint, head: HeadInfo, directory: Path, reporter: Reporter) -> dict[str, Any]:
    reporter.phase("copying the head's tensors", head.nbytes, "bytes")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, entry in head.tensors.items():
        header[key] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, offset + entry.nbytes],
        }  # fmt: skip
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with (directory / HEAD_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in head.tensors.values():
            file.write(checkpoint.read(entry))
            done += entry.nbytes
            reporter.advance(done)
    (directory / CONFIG).write_bytes((checkpoint.root / CONFIG).read_bytes())
    return {
        "family": head.family.name,
        "layout": head.layout,
        "tensors": {key: entry.file for key, entry in head.tensors.items()},
        "bytes": head.nbytes,
    }
