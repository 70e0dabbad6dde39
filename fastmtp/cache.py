"""Models of jobs that were fetched to this machine: which are in use, and which go when there are too many.

One is in use as long as a process lives that was given it, which a shared lock says. FASTMTP_CACHE_SIZE limits what all
take together: before another one comes, those go that were used longest ago, whole, and never one in use. Loads no
torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fastmtp.hashing import cache_directory
from fastmtp.stores.settings import bytes_of

SETTING = "FASTMTP_CACHE_SIZE"


def models_directory() -> Path:
    """Where fetched models lie."""
    return cache_directory() / "models"


def size_limit() -> int | None:
    """FASTMTP_CACHE_SIZE in bytes; None, which is no limit, where it is not set. Raises ConfigError."""
    value = os.environ.get(SETTING)
    return bytes_of(SETTING, value) if value else None


def hold(model: Path) -> None:
    """Keep `model`, which need not be there yet, from being removed while this process lives; it was used just now."""
    os.utime(_held(model))


def make_room(coming: Path, nbytes: int) -> list[Path]:
    """Remove what was used longest ago until `nbytes` more fit below the limit, or all the rest is in use.

    Args:
        coming: the model that is to be fetched; what is there of it counts, and stays.
        nbytes: of the model when it is there.

    Returns:
        What was removed. A limit that cannot be kept stops no job.
    """
    limit, gone = size_limit(), []
    if limit is None:
        return []
    sizes = {model: _nbytes(model) for model in _models(coming.parent) if model != coming}
    total = nbytes + sum(sizes.values())
    for model in sorted(sizes, key=_used_at):
        if total <= limit:
            break
        if _remove(model):
            gone.append(model)
            total -= sizes[model]
    return gone


def lock_of(model: Path) -> Path:
    """The lock of who fetches it."""
    return model.with_name(f".{model.name}.lock")


@functools.cache
def _held(model: Path) -> int:
    """Descriptor of the shared lock, open for as long as this process lives."""
    model.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(_use_of(model), os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _remove(model: Path) -> bool:
    """Take away a model that nobody uses or fetches. Returns whether that could be done."""
    with contextlib.ExitStack() as stack:
        if not all(stack.enter_context(_only(lock)) for lock in (_use_of(model), lock_of(model))):
            return False
        # Out of sight first: nobody must find half of it.
        aside = model.with_name(f".{model.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        if model.exists():
            model.rename(aside)
        for path in (aside, _partial_of(model)):
            shutil.rmtree(path, ignore_errors=True)
    return True


@contextlib.contextmanager
def _only(lock: Path) -> Iterator[bool]:
    """Whether nobody else holds a lock; it is ours inside the block then. Lock files stay."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _models(directory: Path) -> set[Path]:
    """Models that are there, or partly there."""
    found = [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    whole = {path for path in found if not path.name.startswith(".")}
    begun = {path.name[1:].removesuffix(".partial") for path in found if path.name.endswith(".partial")}
    return whole | {directory / name for name in begun}


def _nbytes(model: Path) -> int:
    """Bytes on disk of a model and of what has been fetched of it."""
    files = [path for root in (model, _partial_of(model)) for path in root.rglob("*")]
    return sum(path.lstat().st_blocks * 512 for path in files if path.is_file())


def _used_at(model: Path) -> float:
    place = _use_of(model)
    return place.stat().st_mtime if place.exists() else 0.0


def _use_of(model: Path) -> Path:
    return model.with_name(f".{model.name}.use")


def _partial_of(model: Path) -> Path:
    return model.with_name(f".{model.name}.partial")
