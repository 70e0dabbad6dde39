"""Publish a stitched checkpoint, and find what was published before it. Loads no torch."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fastmtp.checkpoint import open_checkpoint
from fastmtp.config import PublishConfig
from fastmtp.errors import CheckpointError, ConfigError, IntegrityError, UnreachableError
from fastmtp.fetch import Allow, fetch
from fastmtp.fetching import Source, read_record
from fastmtp.hashing import remembered, sha256_all
from fastmtp.progress import Reporter
from fastmtp.push import SCHEME, push
from fastmtp.stage import FileEntry, Manifest, digest_of, read_manifest, run_stage
from fastmtp.storage import latest
from fastmtp.stores.hub import open_branch
from fastmtp.stores.settings import StoreSettings
from fastmtp.table import size
from fastmtp.upload import Options, check_sizes, publish

RECEIPT = "receipt.json"


def publish_checkpoint(
    checkpoint: Path,
    config: PublishConfig,
    receipt_dir: Path,
    about: dict[str, Any],
    reporter: Reporter,
    *,
    model: Path | None = None,
    allow: Allow | None = None,
) -> Manifest:
    """Publish a stitched checkpoint; the result is a receipt with each object's URI, size and sha256.

    Args:
        model: the checkpoint it was stitched from: where that was fetched, the store is known to have its files.
        allow: see `fastmtp.upload.Options`.

    Raises:
        DestinationError: the store refused; the same call goes on from there.
        IntegrityError: a file is not what it was when it was stitched, or not what arrived.
    """
    stitched = read_manifest(checkpoint)
    options = options_of(config, model, allow)
    if config.uri.startswith("s3://"):
        check_sizes(stitched.files, options.settings)

    def body(directory: Path) -> dict[str, Any]:
        files = _hashed(checkpoint, stitched.files, reporter)
        version = f"v-{digest_of({name: entry.sha256 for name, entry in files.items()})[:12]}"
        total = sum(entry.size for entry in files.values())
        reporter.phase(f"publishing to {config.uri}", total, "bytes")
        if config.uri.startswith(SCHEME):
            manifest = push(checkpoint, config.uri, version, files, about, Counter(reporter))
        else:
            manifest = publish(checkpoint, config.uri, version, files, about, Counter(reporter), options)
        (directory / RECEIPT).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        artifacts = [{key: item[key] for key in ("uri", "size", "sha256")} for item in manifest["files"]]
        uri = manifest["uri"] if config.uri.startswith(SCHEME) else f"{config.uri.rstrip('/')}/{version}"
        return {"uri": uri, "version": version, "artifacts": artifacts}

    inputs = {"checkpoint": stitched.digest(), "about": digest_of(about)}
    return run_stage(
        "publish", receipt_dir, config=config.model_dump(mode="json"), inputs=inputs, body=body, reporter=reporter,
        replace=True,
    )  # fmt: skip


def options_of(config: PublishConfig, model: Path | None, allow: Allow | None = None) -> Options:
    """How a job wants it published, on top of what the environment says."""
    settings = StoreSettings.from_env().chosen(
        kms_key=config.kms_key, storage_class=config.storage_class, tags=config.tags
    )
    record = read_record(model) if model else None
    return Options(
        base=config.base, known=tuple(record["files"]) if record else (), unchanged=config.unchanged,
        alias=config.alias, keep=config.keep, allow=allow, settings=settings,
    )  # fmt: skip


def identity(model: Path | str) -> str:
    """What a checkpoint is, wherever its files lie: config and tensor names, types and shapes."""
    checkpoint = open_checkpoint(model)
    tensors = [[entry.key, entry.dtype, entry.shape] for _, entry in sorted(checkpoint.tensors.items())]
    return digest_of([checkpoint.config, tensors])


def fetch_incumbent(uri: str, model: Path, target: Path, reporter: Reporter, allow: Allow | None = None) -> bool:
    """Bring what is published below `uri` into `target`, if something of the same model is. Returns whether.

    Shards that are the model's own are linked, not fetched. On the hub, what is published is the branch's last commit.
    """
    if uri.startswith(SCHEME):
        return _fetch_incumbent_of_hub(uri, model, target, reporter)
    manifest = latest(uri)
    if manifest is None:
        return False
    if manifest.get("verifier") != identity(model):
        reporter.say("what is published here is of another model and is not compared")
        return False
    source = Source(f"{uri.rstrip('/')}/{manifest['version']}", manifest["version"], manifest["files"])
    fetch(source, target, reporter, reuse=[model], allow=allow)
    return True


def _fetch_incumbent_of_hub(uri: str, model: Path, target: Path, reporter: Reporter) -> bool:
    store = open_branch(uri)
    if store is None:
        return False
    try:
        published = identity(store.name)
    except UnreachableError:
        raise
    except CheckpointError as error:
        reporter.say(f"what is published here is no model and is not compared: {error.what}")
        return False
    if published != identity(model):
        reporter.say("what is published here is of another model and is not compared")
        return False
    fetch(Source(store.name, None, store.entries()), target, reporter, reuse=[model])
    return True


def config_of(**fields: Any) -> PublishConfig:  # noqa: ANN401
    """A destination as the command line names it. Raises ConfigError for what no destination can be."""
    try:
        return PublishConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}.", mend="`fastmtp publish --help` shows one.") from error


def plan(checkpoint: Path, config: PublishConfig) -> dict[str, Any]:
    """What publishing would send at most, and in how many parts, from sizes alone. Reads no file and no store."""
    files = read_manifest(checkpoint).files
    total = sum(entry.size for entry in files.values())
    parts = check_sizes(files, options_of(config, None).settings) if config.uri.startswith("s3://") else {}
    text = f"{len(files)} files, {size(total)} at most, in {sum(parts.values()) or len(files)} parts, to {config.uri}"
    return {"uri": config.uri, "files": len(files), "bytes": total, "parts": parts, "text": text}


class Counter:
    """Adds up bytes for a reporter, from any thread."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self._lock, self._done = reporter, threading.Lock(), 0

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._reporter.advance(self._done)


def _hashed(directory: Path, files: dict[str, FileEntry], reporter: Reporter) -> dict[str, FileEntry]:
    """Every file with its sha256: a version is named by content. Links were not read when they were made."""
    for name, entry in files.items():
        if not entry.matches(directory / name):
            raise IntegrityError(f"{directory / name} is not the file that was stitched or linked.")
    unread = [directory / name for name in files if remembered(directory / name) is None]
    reporter.phase("hashing", sum(path.stat().st_size for path in unread), "bytes")
    sha256_all(unread, Counter(reporter))
    digests = sha256_all(directory / name for name in files)
    found = {}
    for name, entry in files.items():
        sha256 = digests[directory / name]
        if entry.sha256 not in (None, sha256):
            raise IntegrityError(f"{directory / name} is not what its manifest says.")
        found[name] = FileEntry(size=entry.size, sha256=sha256)
    return found
