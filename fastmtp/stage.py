"""The stage contract: a result directory appears whole, with a manifest, or not at all, and a finished one is never
redone.

A stage writes into a temporary directory beside its target, which is renamed when everything in it is on disk. The
manifest records what went in (hashes), what came out (every file's size and sha256) and with which configuration and
code. `run_stage` skips a stage whose manifest is there and matches: that is what makes a job resumable in a new
process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import fastmtp
from fastmtp.errors import InputError
from fastmtp.progress import Reporter

MANIFEST = "manifest.json"


class FileEntry(BaseModel):
    """One file of a result: by its hash, or, for a link to a file that was not read, by what identifies that file."""

    size: int
    sha256: str | None = Field(None, description="None for a link whose bytes were not read.")
    link: str | None = Field(None, description="hardlink or reflink: the file is the source's, byte for byte.")
    mtime_ns: int | None = Field(None, description="Of the source, where the file is a link.")

    def identity(self) -> str:
        """Equal for equal bytes, as far as is known without reading them."""
        return self.sha256 or f"{self.size}:{self.mtime_ns}"

    def matches(self, path: Path) -> bool:
        """Whether a file has this size, and for a link this modification time. Reads no bytes."""
        if not path.is_file():
            return False
        found = path.stat()
        return found.st_size == self.size and (self.link is None or found.st_mtime_ns == self.mtime_ns)


class Manifest(BaseModel):
    """`manifest.json` of a stage's result."""

    model_config = ConfigDict(extra="forbid")

    stage: str
    fingerprint: str = Field(
        description="sha256 over stage, config, inputs and code version: equal means nothing to redo."
    )
    config: dict[str, Any]
    inputs: dict[str, str] = Field(description="Name of each input -> its digest.")
    version: str
    created: float = Field(description="Unix seconds.")
    seconds: float
    files: dict[str, FileEntry] = Field(description="Relative path -> size and sha256, in sorted order.")
    summary: dict[str, Any] = Field(default_factory=dict, description="What the stage found out, small and JSON.")

    def digest(self) -> str:
        """What a later stage records of this result: a hash over its files only, so equal bytes are equal inputs."""
        return digest_of({name: entry.identity() for name, entry in sorted(self.files.items())})


def digest_of(value: object) -> str:
    """sha256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, in constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Make a file's bytes durable, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a finished result. Raises InputError when there is none or it does not read."""
    path = directory / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{directory} holds no {MANIFEST}: it is not the finished result of a stage.") from error
    except (OSError, ValidationError) as error:
        raise InputError(f"{path} does not read: {error}") from error


def run_stage(
    stage: str,
    target: Path,
    *,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    body: Callable[[Path], dict[str, Any]],
    reporter: Reporter,
    replace: bool = False,
    inventory: Callable[[Path], dict[str, FileEntry]] | None = None,
) -> Manifest:
    """Produce `target` by `body`, or find that it is finished already.

    Args:
        body: writes the result into the directory it is given and returns the manifest's summary.
        replace: put this result in the place of an earlier one of the same stage; otherwise such a target is refused.
        inventory: what is in the directory and safe on disk, where the body knows; otherwise every file is read.

    Returns:
        The manifest of the finished directory.

    Raises:
        InputError: `target` exists and is not this result, or another process is making it.
    """
    fingerprint = digest_of(
        {"stage": stage, "config": dict(config), "inputs": dict(inputs), "version": fastmtp.__version__}
    )
    found = _finished(target, fingerprint)
    if found:
        reporter.skipped()
        return found
    _require_free_target(stage, target, replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.partial"
    lock = _claim(temporary)
    begun = time.monotonic()
    try:
        summary = body(temporary)
        files = inventory(temporary) if inventory else _inventory(temporary)
        manifest = Manifest(
            stage=stage, fingerprint=fingerprint, config=dict(config), inputs=dict(inputs), version=fastmtp.__version__,
            created=time.time(), seconds=time.monotonic() - begun, files=files, summary=summary,
        )  # fmt: skip
        write_atomic(temporary / MANIFEST, manifest.model_dump_json(indent=1).encode())
        _swap_in(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    return manifest


def _claim(temporary: Path) -> int:
    """Make an empty working directory that is ours as long as the returned descriptor is open, in place of a dead one.

    The lock is on the directory itself, so a killed process leaves none behind.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            temporary.mkdir()
        try:
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InputError(
                f"Another process is making {temporary.with_name(temporary.name[1:].removesuffix('.partial'))}.",
                mend="Wait for it, or name another directory.",
            ) from error
        # Between opening and locking its owner may have finished and renamed or removed it.
        if temporary.exists() and os.path.samestat(os.fstat(descriptor), temporary.stat()):
            break
        os.close(descriptor)
    for path in temporary.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return descriptor


def _finished(target: Path, fingerprint: str) -> Manifest | None:
    if not (target / MANIFEST).is_file():
        return None
    manifest = read_manifest(target)
    there = all(entry.matches(target / name) for name, entry in manifest.files.items())
    return manifest if manifest.fingerprint == fingerprint and there else None


def _require_free_target(stage: str, target: Path, replace: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    ours = (target / MANIFEST).is_file() and read_manifest(target).stage == stage
    if not (replace and ours):
        what = f"another result of {stage}" if ours else "something else"
        raise InputError(f"{target} already holds {what}.", mend="Name a new directory, or remove that one first.")


def _inventory(directory: Path) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        fsync_path(path)
        files[path.relative_to(directory).as_posix()] = FileEntry(size=path.stat().st_size, sha256=sha256_file(path))
    return files


def _swap_in(temporary: Path, target: Path) -> None:
    """Rename into place; an earlier result is moved aside first, so that no moment shows a half of each."""
    fsync_path(temporary)
    aside = target.parent / f".{target.name}.replaced"
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    temporary.rename(target)
    fsync_path(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
