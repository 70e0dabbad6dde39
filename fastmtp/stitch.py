"""Put a head back into its checkpoint: a new directory in which only the head's bytes differ.

Every file of the source is copied, links resolved to real files; then the head's tensors are written over their own
bytes in the copy, so names, dtypes, shards, index and every other byte stay as they were, which is compared with the
source before the directory gets its name. The source is only ever opened for reading.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastmtp.checkpoint import Checkpoint, TensorEntry, open_checkpoint, read_header
from fastmtp.errors import CheckpointError, InputError, IntegrityError
from fastmtp.extract import HEAD_FILE, fingerprint
from fastmtp.preflight import HeadInfo, find_head
from fastmtp.progress import Reporter
from fastmtp.stage import MANIFEST, Manifest, read_manifest, run_stage

_BLOCK = 16 << 20


def stitch(model: Path, head: Path, target: Path, reporter: Reporter, *, replace: bool = False) -> Manifest:
    """Make `target`, the checkpoint `model` with the head of directory `head`.

    Raises:
        CheckpointError: the head does not fit: a tensor missing, too many, of another shape or dtype.
        IntegrityError: a byte outside the head differs from the source.
    """
    source = open_checkpoint(model)
    native = find_head(source)
    if target.resolve().is_relative_to(model.resolve()) or model.resolve().is_relative_to(target.resolve()):
        raise InputError(f"{target} and the checkpoint {model} lie in each other.", mend="Name another directory.")
    tuned = _entries(head, native)
    inputs = {"model": fingerprint(source), "head": read_manifest(head).digest()}
    return run_stage(
        "stitch", target, config={}, inputs=inputs, reporter=reporter, replace=replace,
        body=lambda directory: _stitch(source, native, head / HEAD_FILE, tuned, directory, reporter),
    )  # fmt: skip


def _entries(head: Path, native: HeadInfo) -> dict[str, TensorEntry]:
    """Tensors of the head file, checked one by one against the checkpoint's own."""
    entries = {entry.key: entry for entry in read_header(head / HEAD_FILE)}
    different = sorted(entries.keys() ^ native.tensors.keys())
    if different:
        where = "lacks" if different[0] in native.tensors else "has besides"
        raise CheckpointError(f"{head} {where} {different[0]}; it is not a head of this checkpoint.")
    for key, entry in entries.items():
        own = native.tensors[key]
        if (entry.shape, entry.dtype) != (own.shape, own.dtype):
            raise CheckpointError(
                f"{head}: {key} is {entry.dtype} {list(entry.shape)}, the model has {own.dtype} {list(own.shape)}."
            )
    return entries


def _stitch(
    source: Checkpoint,
    native: HeadInfo,
    head_file: Path,
    tuned: dict[str, TensorEntry],
    directory: Path,
    reporter: Reporter,
) -> dict[str, Any]:
    files = [path for path in sorted(source.root.rglob("*")) if _belongs(source.root, path)]
    total = sum(path.stat().st_size for path in files)
    if shutil.disk_usage(directory).free < total:
        raise InputError(f"{directory.parent} has no room for {total} bytes.", mend="Free space, or use another disk.")
    reporter.phase("copying the checkpoint", total, "bytes")
    done = 0
    for path in files:
        copy = directory / path.relative_to(source.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        done += path.stat().st_size
        reporter.advance(done, note=path.name)
    changed = _patch(directory, native, head_file, tuned)
    reporter.phase("comparing it with the source", sum(source.shards.values()), "bytes")
    done = 0
    for name in source.shards:
        _compare(source.root / name, directory / name, [e for e in native.tensors.values() if e.file == name])
        done += source.shards[name]
        reporter.advance(done, note=name)
    return {"tensors_changed": changed, "tensors_of_head": len(tuned), "bytes_of_head": native.nbytes}


def _belongs(root: Path, path: Path) -> bool:
    """Regular files of the checkpoint, symbolic links included; not our own manifest, nor caches and hidden files."""
    relative = path.relative_to(root)
    hidden = any(part.startswith(".") for part in relative.parts)
    return path.is_file() and not hidden and relative.as_posix() != MANIFEST


def _patch(directory: Path, native: HeadInfo, head_file: Path, tuned: dict[str, TensorEntry]) -> int:
    """Write the tuned tensors over their own bytes in the copy. Returns how many tensors differ from before."""
    changed = 0
    with head_file.open("rb") as new:
        for key, own in native.tensors.items():
            new.seek(tuned[key].begin)
            data = new.read(tuned[key].nbytes)
            with (directory / own.file).open("r+b") as shard:
                shard.seek(own.begin)
                before = shard.read(own.nbytes)
                shard.seek(own.begin)
                shard.write(data)
            changed += before != data
    return changed


def _compare(source: Path, copy: Path, spared: list[TensorEntry]) -> None:
    """Compare two files byte by byte outside the spared tensors."""
    if source.stat().st_size != copy.stat().st_size:
        raise IntegrityError(f"{copy} has another size than {source}.")
    with source.open("rb") as left, copy.open("rb") as right:
        for begin, end in _outside(spared, source.stat().st_size):
            left.seek(begin)
            right.seek(begin)
            while begin < end:
                size = min(_BLOCK, end - begin)
                if left.read(size) != right.read(size):
                    raise IntegrityError(f"{copy} differs from {source} outside the head, after byte {begin}.")
                begin += size


def _outside(spared: list[TensorEntry], size: int) -> Iterator[tuple[int, int]]:
    position = 0
    for entry in sorted(spared, key=lambda entry: entry.begin):
        yield position, entry.begin
        position = entry.end
    yield position, size
