"""Look before anything costly: model, prompts and destination of a job, from headers and first rows alone.

Loads no torch and reads no tensor but the head's norms, so the API, the command line and the flow all call it. What it
finds wrong it raises as an `InputError` that names file, key and mend, with a JSON pointer to the job's field.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastmtp import storage
from fastmtp.checkpoint import require
from fastmtp.config import JobSpec
from fastmtp.data.prompts import read_prompts
from fastmtp.errors import CheckpointError, ConfigError, InputError, UnreachableError
from fastmtp.families import families
from fastmtp.files import is_hub, is_local, local_path
from fastmtp.inspection import describe, look
from fastmtp.norms import check_norms
from fastmtp.published import require_allowed


@dataclass(frozen=True)
class Policy:
    """What a job may name. None allows anything, which is right for a user's own command line and wrong for a service.

    Attributes:
        sources: prefixes of models and prompts: absolute directories, s3:// and hf: prefixes, hub ids.
        destinations: prefixes of publish.uri: s3:// or file://.
    """

    sources: tuple[str, ...] | None = None
    destinations: tuple[str, ...] | None = None

    @classmethod
    def from_env(cls) -> Policy:
        """From FASTMTP_ALLOWED_SOURCES and FASTMTP_ALLOWED_DESTINATIONS, comma separated; unset allows anything."""

        def read(name: str) -> tuple[str, ...] | None:
            value = os.environ.get(name)
            return None if value is None else tuple(part.strip() for part in value.split(",") if part.strip())

        return cls(read("FASTMTP_ALLOWED_SOURCES"), read("FASTMTP_ALLOWED_DESTINATIONS"))

    def require_source(self, value: str, pointer: str) -> None:
        """Raise ConfigError unless `value` (a path or URI to read) is allowed."""
        _require(value, self.sources, pointer, "FASTMTP_ALLOWED_SOURCES")

    def require_destination(self, value: str, pointer: str) -> None:
        """Raise ConfigError unless `value` (a URI to write below) is allowed."""
        _require(value, self.destinations, pointer, "FASTMTP_ALLOWED_DESTINATIONS")


def check_job(spec: JobSpec, policy: Policy) -> dict[str, Any]:
    """Check everything a job names. Returns a summary of what it found; raises InputError for the first thing wrong.

    Of a model on a hub that does not answer, the summary has only `warnings`: the job finds out where it runs.
    """
    policy.require_source(spec.model, "/model")
    policy.require_source(spec.data.prompts, "/data/prompts")
    policy.require_source(spec.evaluate.prompts, "/evaluate/prompts")
    if spec.publish:
        policy.require_destination(spec.publish.uri, "/publish/uri")
        if spec.publish.base:
            policy.require_source(spec.publish.base, "/publish/base")
    summary: dict[str, Any] = {"model": spec.model}
    with _pointing_at("/model"):
        try:
            summary |= check_model(spec.model, policy)
        except UnreachableError as error:
            # The worker may see a hub, or have a cache, that this host does not.
            if not is_hub(spec.model):
                raise
            summary["warnings"] = [f"The model was not looked at. {error.what}"]
    for pointer, source in (("/data/prompts", spec.data.prompts), ("/evaluate/prompts", spec.evaluate.prompts)):
        if not source.startswith("hf:"):
            with _pointing_at(pointer):
                read_prompts(source, limit=1)
    if spec.publish:
        with _pointing_at("/publish/uri"):
            storage.probe(spec.publish.uri)
        summary["destination"] = spec.publish.uri
    return summary


def check_model(model: str, policy: Policy) -> dict[str, Any]:
    """Judge a model from its headers, and its norms. Raises CheckpointError unless a job can use it as it is."""
    checkpoint, head, faults = look(model)
    if model.startswith("s3://") and policy.sources is not None:
        require_allowed(model, lambda uri: policy.require_source(uri, "/model"))
    require(faults, serving=True)
    assert head is not None
    if not head.family.trainable:
        trained = ", ".join(family.title for family in families().values() if family.trainable)
        raise CheckpointError(
            f"{model} is a {head.family.title} model: its head can be read and stitched, but not fine-tuned yet.",
            mend=f"Fine-tuned are: {trained}.",
        )
    if checkpoint.files.root is not None:
        _require_links_inside(checkpoint.files.root, policy)
    faults += check_norms(checkpoint, head)
    found = describe(checkpoint, head, faults, 0.0)
    assert found.head and found.job
    return {
        "family": found.family, "layout": found.head.layout, "head_tensors": found.head.tensors,
        "head_bytes": found.head.bytes, "model_bytes": found.bytes, "stitch_bytes": found.job.written_by_stitch,
        "stitch_bytes_as_copy": found.job.written_by_stitch_as_copy, "warnings": [fault.what for fault in faults],
    }  # fmt: skip


def _require_links_inside(root: Path, policy: Policy) -> None:
    """A symbolic link in an allowed directory must not lead to a file that the policy does not allow.

    A stitched checkpoint holds what the links lead to. A hub cache keeps its files in a sibling of the snapshots.
    """
    if policy.sources is None:
        return
    blobs = root.resolve().parent.parent / "blobs"
    for path in sorted(root.rglob("*")):
        if path.is_symlink() and not _resolved(path).is_relative_to(blobs):
            policy.require_source(str(path), "/model")


def _require(value: str, allowed: tuple[str, ...] | None, pointer: str, setting: str) -> None:
    if allowed is None:
        return
    wanted = _normal(value)
    if wanted.startswith("s3://") and "@" in wanted.rpartition("/")[2]:
        # An alias names a version of what is before it.
        wanted = wanted.rpartition("@")[0]
    for prefix in map(_normal, allowed):
        if wanted == prefix or wanted.startswith(prefix if prefix.endswith(("/", ":")) else prefix + "/"):
            return
    raise ConfigError(
        f"{value} is outside what this service may use.",
        mend=f"The operator lists what is allowed in {setting}.",
        pointer=pointer,
    )


def _normal(value: str) -> str:
    """A path without symbolic links and `..`; a URI without `..` segments, which no store resolves for us."""
    if is_local(value) and not value.startswith("hf:"):
        return str(_resolved(local_path(value)))
    if ".." in value.split("/"):
        raise ConfigError(f"{value} must not contain '..'.")
    return value


def _resolved(path: Path) -> Path:
    """Without symbolic links, as far as they lead; Path.resolve raises for a link to itself."""
    return Path(os.path.realpath(path))


class _pointing_at:  # noqa: N801 - reads as a statement
    """Give errors that leave the block a pointer to the job's field, where they have none."""

    def __init__(self, pointer: str) -> None:
        self._pointer = pointer

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, InputError):
            error.pointer = error.pointer if error.pointer.startswith(self._pointer) else self._pointer
