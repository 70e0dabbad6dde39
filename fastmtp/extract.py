"""Take the native head out of a checkpoint: its bytes only, by offset, under the family's names, dtypes as they are.

The result directory holds `head.safetensors`, `config.json` as the verifier has it, and the manifest, whose summary
says family, expert layout and where each tensor came from. The rest of the checkpoint is never read, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from fastmtp.checkpoint import CONFIG, Checkpoint, open_checkpoint
from fastmtp.files import BLOCK
from fastmtp.headers import TensorEntry, header_of
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


def runs(entries: Iterable[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Tensors in the order in which they lie; neighbours together while they take no more than a block."""
    run: list[TensorEntry] = []
    for entry in sorted(entries, key=lambda entry: (entry.file, entry.begin)):
        if run and (run[-1].file, run[-1].end) == (entry.file, entry.begin) and entry.end - run[0].begin <= BLOCK:
            run.append(entry)
            continue
        if run:
            yield run
        run = [entry]
    if run:
        yield run


def _copy(checkpoint: Checkpoint, head: HeadInfo, target: Path, reporter: Reporter) -> None:
    """Write the head's file. Experts by the thousand lie side by side: from a store they come in few requests."""
    header = header_of(head.tensors)
    ends = accumulate((entry.nbytes for entry in head.tensors.values()), initial=len(header))
    places = {entry.key: begin for entry, begin in zip(head.tensors.values(), ends, strict=False)}
    done = 0
    with target.open("wb") as file:
        file.write(header)
        for run in runs(head.tensors.values()):
            whole = TensorEntry(run[0].key, run[0].file, "U8", (), run[0].begin, run[-1].end)
            position = whole.begin
            for block in checkpoint.blocks(whole):
                for entry in run:
                    begin, end = max(entry.begin, position), min(entry.end, position + len(block))
                    if begin < end:
                        file.seek(places[entry.key] + begin - entry.begin)
                        file.write(memoryview(block)[begin - position : end - position])
                position += len(block)
                done += len(block)
                reporter.advance(done)


def _extract(checkpoint: Checkpoint, head: HeadInfo, directory: Path, reporter: Reporter) -> dict[str, Any]:
    warnings = [fault.what for fault in check_norms(checkpoint, head)]
    for warning in warnings:
        reporter.say(f"warning: {warning}")
    reporter.phase("copying the head's tensors", head.nbytes, "bytes")
    _copy(checkpoint, head, directory / HEAD_FILE, reporter)
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
