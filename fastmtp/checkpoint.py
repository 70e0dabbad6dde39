"""Sharded safetensors checkpoints, read by header: where each tensor lies, without loading any of them.

A checkpoint is described by its index *and* by its files' own headers. Tools disagree about which of the two is right,
so both are read, everything that does not fit together is a `Fault`, and `open_checkpoint` refuses where an error is
among them. Nothing here writes, and nothing loads torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from fastmtp.errors import CheckpointError, UnreachableError, UnreadableError
from fastmtp.files import BLOCK, FileInfo, Files, in_parallel, open_files, printable
from fastmtp.headers import AGAIN, SUFFIX, TensorEntry, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True)
class Fault:
    """Something about a checkpoint that does not fit.

    Attributes:
        level: `error`: it cannot be used. `serving`: it can be read and stitched, but vLLM or transformers would not
            load it as it is, so a job refuses it. `warning`: it works, and is worth knowing.
        code: stable name of the kind of fault.
        what, mend: what is wrong, naming file and key, and what to do about it.
    """

    level: Literal["error", "serving", "warning"]
    code: str
    what: str
    mend: str = ""
    file: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", printable(self.what))


@dataclass(frozen=True)
class Checkpoint:
    """A model as its headers describe it.

    Attributes:
        config: config.json; empty where it does not read.
        tensors: key -> entry, over every safetensors file.
        listed: every file, by name; those of `shards` among them.
        shards: safetensors file -> size in bytes, sorted by name.
        index: the index file's JSON, or None where there is none that can be used.
        faults: what does not fit together, in the order found.
    """

    files: Files
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    listed: dict[str, FileInfo]
    shards: dict[str, int]
    index: dict[str, Any] | None
    faults: tuple[Fault, ...]

    @property
    def root(self) -> Path:
        """The directory. Raises CheckpointError for a checkpoint that is not local."""
        if self.files.root is None:
            raise CheckpointError(f"{self.files.name} is not on this machine.", mend="Download it first.")
        return self.files.root

    @property
    def unlisted(self) -> list[str]:
        """Keys, in sorted order, that no index lists although there is one."""
        return [] if self.index is None else sorted(self.tensors.keys() - weight_map_of(self.index).keys())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.end - entry.begin for entry in self.tensors.values())

    def below(self, prefix: str) -> dict[str, TensorEntry]:
        """Tensors whose key starts with `prefix`, sorted by key."""
        return {key: self.tensors[key] for key in sorted(key for key in self.tensors if key.startswith(prefix))}

    def blocks(self, entry: TensorEntry) -> Iterator[bytes]:
        """A tensor's bytes as stored, at most `BLOCK` at a time. Raises CheckpointError where they cannot be read."""
        for begin in range(entry.begin, entry.end, BLOCK):
            yield self.files.read(entry.file, begin, min(begin + BLOCK, entry.end))

    def read(self, entry: TensorEntry) -> bytes:
        """A tensor's bytes as stored, whole."""
        return b"".join(self.blocks(entry))


def open_checkpoint(model: str | Path) -> Checkpoint:
    """`scan`, refusing what cannot be used. Raises CheckpointError with everything that is wrong."""
    checkpoint = scan(open_files(model))
    require(checkpoint.faults)
    return checkpoint


def require(faults: Iterable[Fault], *, serving: bool = False) -> None:
    """Raise CheckpointError for the errors among `faults`; with `serving` also for what could not be served."""
    bad = [fault for fault in faults if fault.level == "error" or (serving and fault.level == "serving")]
    if bad:
        more = f" And {len(bad) - 1} more: `fastmtp inspect` lists them." if len(bad) > 1 else ""
        raise CheckpointError(bad[0].what, mend=bad[0].mend + more, pointer="/model", faults=tuple(bad))


def scan(files: Files) -> Checkpoint:
    """Read config, index and every file's header. What is wrong with them is in the result's `faults`.

    Raises:
        CheckpointError: the place itself cannot be listed, or does not answer any more.
    """
    with no_collection():
        return _scan(files)


def _scan(files: Files) -> Checkpoint:
    listed = files.list()
    faults: list[Fault] = []
    config = _json_of(files, CONFIG, listed, faults)
    if CONFIG not in listed:
        faults.append(Fault("error", "config_missing", f"{files.name} lacks {CONFIG}.", AGAIN, CONFIG))
    index = _json_of(files, INDEX, listed, faults) if INDEX in listed else None
    names = _shard_names(files, index, listed, faults)
    if any(fault.code == "index_broken" for fault in faults):
        index = None
    tensors: dict[str, TensorEntry] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for found in in_parallel(files, lambda name: _header_or_fault(files, name, listed[name].size), names):
        if isinstance(found, Fault):
            faults.append(found)
            continue
        for entry in found:
            if entry.key in tensors:
                twice.setdefault((tensors[entry.key].file, entry.file), []).append(entry.key)
            else:
                tensors[entry.key] = entry
    for (first, second), keys in twice.items():
        what = f"{files.name}: found in {first} and again in {second}: {_first_of(keys)}."
        faults.append(Fault("error", "key_twice", what, "Delete the stale file.", second, keys[0]))
    for name, info in listed.items():
        if info.size is None and name not in names:
            faults.append(_no_file(files, name))
    # Of these, nothing more is said; and where a file is a stale copy, every key's place would only repeat that.
    unread = {fault.file for fault in faults} | {name for pair in twice for name in pair}
    if index is not None:
        faults += _compare_with_index(files.name, index, tensors, unread)
    shards = {name: listed[name].size or 0 for name in names}
    return Checkpoint(files, config or {}, tensors, listed, shards, index, tuple(faults))


def weight_map_of(index: Mapping[str, Any]) -> Mapping[str, str]:
    """The index's key -> file; empty where it has none."""
    found = index.get("weight_map")
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Leave the garbage collector off: of hundreds of thousands of new objects none is garbage, and looking for some
    takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _header_or_fault(files: Files, name: str, size: int | None) -> list[TensorEntry] | Fault:
    if size is None:
        return _no_file(files, name)
    try:
        return read_header(files, name, size)
    except UnreachableError:
        raise
    except CheckpointError as error:
        code = "file_unreadable" if isinstance(error, UnreadableError) else "file_broken"
        return Fault("error", code, error.what, error.mend, name)


def _no_file(files: Files, name: str) -> Fault:
    what = f"{files.name}/{name} is a link that leads nowhere, or no regular file."
    return Fault("error", "file_unreadable", what, AGAIN, name)


def _first_of(keys: list[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if keys[1:] else "")


def _shard_names(
    files: Files, index: dict[str, Any] | None, listed: dict[str, FileInfo], faults: list[Fault]
) -> list[str]:
    """Safetensors files to read: every one at the top level, listed by the index or not."""
    present = sorted(name for name in listed if name.endswith(SUFFIX) and "/" not in name)
    if index is not None:
        weight_map = weight_map_of(index)
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            faults.append(
                Fault("error", "index_broken", f"{files.name}/{INDEX} has no usable weight_map.", AGAIN, INDEX)
            )
            return present
        for name in sorted(set(weight_map.values()) - set(present)):
            if PurePosixPath(name).name != name:
                what = f"{files.name}/{INDEX} names {name}, outside the directory."
                faults.append(Fault("error", "file_outside", what, "Take the original index.", name))
            else:
                what = f"{files.name} lacks {name}, which the index lists."
                faults.append(Fault("error", "file_missing", what, AGAIN, name))
        for name in sorted(set(present) - set(weight_map.values())):
            what = f"{files.name}/{name} is not in the index: vLLM and transformers do not read it."
            faults.append(Fault("warning", "file_unlisted", what, "", name))
    elif INDEX not in listed and present and present != [SINGLE]:
        what = f"{files.name} has no {INDEX}: transformers does not find {present[0]}" + " and the rest" * bool(
            present[1:]
        )
        faults.append(
            Fault(
                "serving", "index_missing", what + ".", "Download it, or let `fastmtp stitch --mend` write one.", INDEX
            )
        )
    if not present:
        pickled = next((name for name in listed if name.endswith((".bin", ".pt", ".pth"))), None)
        mend = f"Convert {pickled}: only safetensors are read." if pickled else "Name a checkpoint in safetensors."
        faults.append(Fault("error", "no_safetensors", f"{files.name} holds no safetensors file.", mend))
    return present


def _compare_with_index(
    where: str, index: dict[str, Any], tensors: dict[str, TensorEntry], unread: set[str]
) -> Iterator[Fault]:
    """Keys the index misplaces or invents. Those it misses are fine to read: some tools leave the head out."""
    metadata = index.get("metadata")
    stated, found = metadata.get("total_size") if isinstance(metadata, dict) else None, 0
    if stated is not None and not unread and stated != (found := sum(e.end - e.begin for e in tensors.values())):
        what = f"{where}/{INDEX} states a total_size of {stated} bytes, the tensors have {found}."
        yield Fault("warning", "total_size_stale", what, "", INDEX)
    weight_map = weight_map_of(index)
    if weight_map == {key: entry.file for key, entry in tensors.items()}:
        return
    lost: dict[str, list[str]] = {}
    misplaced: dict[tuple[str, str], list[str]] = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or name in unread:
            continue
        if key not in tensors:
            lost.setdefault(name, []).append(key)
        elif tensors[key].file != name:
            misplaced.setdefault((name, tensors[key].file), []).append(key)
    for name, keys in lost.items():
        what = f"{where}/{INDEX} lists {_first_of(keys)} in {name}; not found in any file."
        yield Fault("error", "key_lost", what, "Download the shard again.", name, keys[0])
    for (name, found_in), keys in misplaced.items():
        what = f"{where}/{INDEX} lists {_first_of(keys)} in {name}; found in {found_in}."
        yield Fault("error", "key_misplaced", what, "Rebuild the index.", name, keys[0])


def _json_of(files: Files, name: str, listed: dict[str, FileInfo], faults: list[Fault]) -> dict[str, Any] | None:
    if name not in listed:
        return None
    size = listed[name].size
    if size is None:
        return None  # said of every such file
    try:
        value = json.loads(files.read(name, 0, size))
        if isinstance(value, dict):
            return value
    except UnreachableError:
        raise
    except UnreadableError as error:
        faults.append(Fault("error", "file_unreadable", error.what, error.mend, name))
        return None
    except (ValueError, RecursionError):
        pass
    faults.append(Fault("error", "json_broken", f"{files.name}/{name} does not read as a JSON object.", AGAIN, name))
    return None
