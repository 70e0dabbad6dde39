"""What survives a kill: the state of a run in a directory beside the result, which is deleted when that is in place.

    run.json                 which run this is; the saves of any other are thrown away
    last-00000042/           state after 42 optimizer steps: weights, optimizer state and `state.json`
    best-00000040/           weights of the best head so far
    metrics.jsonl            one line per step

A save is written under a temporary name, made durable and renamed; a new one is in place before the old one goes. Each
process writes what it holds into `part-RANK.safetensors`: pieces of a tensor that is spread over processes follow each
other along its first axis, so any number of processes can read them back. Safetensors and JSON only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastmtp.errors import InputError
from fastmtp.protocol import Measurement
from fastmtp.stage import fsync_path, write_atomic
from fastmtp.training.world import World, is_spread, local

RUN = "run.json"
LOCK = ".lock"
LOCK_SECONDS = 30.0
STATE = "state.json"
Kind = Literal["last", "best"]


class Estimate(BaseModel):
    """Held-out acceptance after so many steps."""

    step: int
    found: Measurement


class State(BaseModel):
    """Where a run stands. Nothing in it is random: the order of rows and the rate follow from the step."""

    step: int = 0
    steps: int
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    estimates: list[Estimate] = []
    best_step: int = 0
    unlogged: dict[str, float] | None = None

    @property
    def best(self) -> Measurement:
        """The best estimate so far; the first one is of the head as it came."""
        return next(estimate.found for estimate in self.estimates if estimate.step == self.best_step)


class _Save(BaseModel):
    """`state.json`: the state, and the sizes of the files beside it."""

    state: State
    files: dict[str, int]


class Saves:
    """The saves in a directory that was claimed for a run."""

    def __init__(self, root: Path, world: World) -> None:
        self.root = root
        self._world = world

    def last(self) -> tuple[Path, State] | None:
        """The newest whole save to go on from. Half-written ones are ignored."""
        for path in sorted(self.root.glob("last-*"), reverse=True):
            found = _read(path)
            if found and (found.best_step == 0 or _read(self.best(found.best_step))):
                return path, found
        return None

    def best(self, step: int) -> Path:
        """Where the weights of the best head lie when it was reached at `step`."""
        return self._place("best", step)

    def save(self, kind: Kind, state: State, tensors: Mapping[str, Tensor]) -> None:
        """Write a save of the tensors, spread ones in parts. All processes must call it, with the same state."""
        target = self._place(kind, state.step)
        temporary = target.with_name(f".{target.name}.tmp")
        if self._world.main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        self._world.barrier()
        mine = {key: local(value) for key, value in tensors.items() if self._world.main or is_spread(value)}
        if mine:
            part = temporary / f"part-{self._world.rank:05d}.safetensors"
            save_file({key: value.contiguous() for key, value in mine.items()}, part)
            fsync_path(part)
        self._world.barrier()
        if self._world.main:
            sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
            write_atomic(temporary / STATE, _Save(state=state, files=sizes).model_dump_json().encode())
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
            fsync_path(self.root)
            if kind == "last":
                self._remove_others("last", state.step)
                self._remove_others("best", state.best_step)
        self._world.barrier()

    def update(self, state: State) -> None:
        """Replace the state in the save of its step, whose tensors are those already."""
        if self._world.main:
            path = self._place("last", state.step)
            save = _Save.model_validate_json((path / STATE).read_bytes())
            write_atomic(path / STATE, save.model_copy(update={"state": state}).model_dump_json().encode())
            self._remove_others("best", state.best_step)

    def _place(self, kind: Kind, step: int) -> Path:
        return self.root / f"{kind}-{step:08d}"

    def _remove_others(self, kind: Kind, step: int) -> None:
        for path in self.root.glob(f"{kind}-*"):
            if path != self._place(kind, step):
                shutil.rmtree(path, ignore_errors=True)


def claim(root: Path, identity: str) -> None:
    """Make the directory one of the run with this identity: what is there of another run is removed."""
    try:
        known = json.loads((root / RUN).read_bytes())["identity"]
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    if known != identity:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        write_atomic(root / RUN, json.dumps({"identity": identity}).encode())


@contextlib.contextmanager
def held(root: Path) -> Iterator[None]:
    """Keep other runs out of the directory, and wait for one that is about to end: processes whose parent was killed
    still save what they did.

    Raises:
        InputError: another process is still training there.
    """
    with (root / LOCK).open("a") as file:
        begun = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() - begun > LOCK_SECONDS:
                    raise InputError(
                        f"Another process is still training with {root}.", mend="Wait for it, or end it."
                    ) from error
                time.sleep(0.1)
        yield


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Whole tensors of a save, on the CPU, put together from its parts."""
    pieces: defaultdict[str, list[Tensor]] = defaultdict(list)
    for path in sorted(directory.glob("part-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                pieces[key].append(file.get_tensor(key))
    return {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in pieces.items()}


def _read(directory: Path) -> State | None:
    """The state of a save, or None when it is not whole."""
    try:
        save = _Save.model_validate_json((directory / STATE).read_bytes())
        for name, size in save.files.items():
            if (directory / name).stat().st_size != size:
                return None
            if name.endswith(".safetensors"):
                safe_open(directory / name, framework="pt")
    except (OSError, ValidationError, SafetensorError):
        return None
    return save.state
