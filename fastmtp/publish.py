"""Publish a stitched checkpoint, and find what was published before it. Loads no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fastmtp import storage
from fastmtp.checkpoint import open_checkpoint
from fastmtp.errors import IntegrityError
from fastmtp.progress import Reporter
from fastmtp.stage import (
    MANIFEST,
    FileEntry,
    Manifest,
    digest_of,
    read_manifest,
    run_stage,
    sha256_file,
    write_atomic,
)

RECEIPT = "receipt.json"


def publish_checkpoint(
    checkpoint: Path, uri: str, receipt_dir: Path, about: dict[str, Any], reporter: Reporter
) -> Manifest:
    """Publish a stitched checkpoint below `uri`; the result is a receipt with each object's URI, size and sha256."""
    stitched = read_manifest(checkpoint)
    total = sum(entry.size for entry in stitched.files.values())

    def body(directory: Path) -> dict[str, Any]:
        files = _hashed(checkpoint, stitched.files, reporter)
        version = f"v-{digest_of({name: entry.sha256 for name, entry in files.items()})[:12]}"
        reporter.phase(f"uploading to {uri}", total, "bytes")
        sent = 0

        def on_bytes(count: int) -> None:
            nonlocal sent
            sent += count
            reporter.advance(sent)

        manifest = storage.publish(checkpoint, uri, version, files, about, on_bytes)
        (directory / RECEIPT).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        artifacts = [{key: item[key] for key in ("uri", "size", "sha256")} for item in manifest["files"]]
        return {"uri": f"{uri.rstrip('/')}/{version}", "version": version, "artifacts": artifacts}

    inputs = {"checkpoint": stitched.digest(), "about": digest_of(about)}
    return run_stage(
        "publish", receipt_dir, config={"uri": uri}, inputs=inputs, body=body, reporter=reporter, replace=True
    )


def _hashed(directory: Path, files: dict[str, FileEntry], reporter: Reporter) -> dict[str, FileEntry]:
    """Every file with its sha256: a version is named by content. Links were not read when they were made."""
    links = {name for name, entry in files.items() if entry.sha256 is None}
    reporter.phase("hashing shards", sum(files[name].size for name in links), "bytes")
    found, done = dict(files), 0
    for name in sorted(links):
        if not files[name].matches(directory / name):
            raise IntegrityError(f"{directory / name} is not the file that was linked.")
        found[name] = FileEntry(size=files[name].size, sha256=sha256_file(directory / name))
        done += files[name].size
        reporter.advance(done, note=name)
    return found


def identity(model: Path) -> str:
    """What a checkpoint is, wherever its files lie: config and tensor names, types and shapes."""
    checkpoint = open_checkpoint(model)
    tensors = [[entry.key, entry.dtype, entry.shape] for _, entry in sorted(checkpoint.tensors.items())]
    return digest_of([checkpoint.config, tensors])


def fetch_incumbent(uri: str, model: Path, target: Path, reporter: Reporter) -> bool:
    """Bring what is published below `uri` into `target`, if something of the same model is. Returns whether."""
    manifest = storage.latest(uri)
    if manifest is None:
        return False
    if manifest.get("verifier") != identity(model):
        reporter.say("what is published here is of another model and is not compared")
        return False
    marker = target / MANIFEST
    if marker.is_file() and json.loads(marker.read_bytes()).get("version") == manifest["version"]:
        return True
    reporter.phase(f"fetching what is published, {manifest['version']}")
    temporary = target.with_name(f".{target.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    storage.fetch(uri, manifest, temporary)
    write_atomic(temporary / MANIFEST, json.dumps(manifest).encode())
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return True
