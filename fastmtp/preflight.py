"""Look before anything costly: model, prompts and destination of a job, from headers and first rows alone.

Loads no torch and reads no tensor but the head's norms, so the API, the command line and the flow all call it. What it
finds wrong it raises as an `InputError` that names file, key and mend, with a JSON pointer to the job's field.
"""

from __future__ import annotations

from typing import Any

from fastmtp import storage
from fastmtp.checkpoint import require
from fastmtp.config import JobSpec
from fastmtp.data.prompts import look_at
from fastmtp.data.sources.opening import list_files
from fastmtp.errors import CheckpointError, InputError, UnreachableError
from fastmtp.families import families
from fastmtp.files import is_hub
from fastmtp.inspection import describe, look
from fastmtp.norms import check_norms
from fastmtp.policy import Policy, prompt_sources
from fastmtp.published import require_allowed

__all__ = ["Policy", "check_job", "check_model"]


def check_job(spec: JobSpec, policy: Policy) -> dict[str, Any]:
    """Check everything a job names. Returns a summary of what it found; raises InputError for the first thing wrong.

    Of a model on a hub that does not answer, the summary has only `warnings`: the job finds out where it runs.
    """
    policy.require_job(spec)
    summary: dict[str, Any] = {"model": spec.model}
    with _pointing_at("/model"):
        try:
            summary |= check_model(spec.model, policy)
        except UnreachableError as error:
            # The worker may see a hub, or have a cache, that this host does not.
            if not is_hub(spec.model):
                raise
            summary["warnings"] = [f"The model was not looked at. {error.what}"]
    warnings = check_prompts(spec, policy)
    if warnings:
        summary["warnings"] = [*summary.get("warnings", ()), *warnings]
    if spec.publish:
        with _pointing_at("/publish/uri"):
            storage.probe(spec.publish.uri)
        summary["destination"] = spec.publish.uri
    return summary


def check_prompts(spec: JobSpec, policy: Policy) -> list[str]:
    """Look at the first rows of every source of prompts. Returns warnings; raises ConfigError or DataError."""
    warnings = []
    for pointer, source in prompt_sources(spec):
        ours = pointer.startswith("/data/")
        with _pointing_at(pointer):
            files = list_files(source)
            if files is None:
                warnings.append(f"{source} was not looked at: the job reads it from the hub.")
                continue
            for file in files:
                policy.require_prompts(file.name, pointer)
            try:
                warning = look_at(spec.data if ours else spec.evaluate.reading(source), source)
            except ImportError as error:
                # The API's host has no need of what reads tables; the worker has it.
                warning = f"{source} was not looked at: {error}."
        warnings += [warning] if warning else []
    both = set(spec.data.sources).intersection(spec.evaluate.sets.values())
    # What is measured must not be trained on.
    return warnings + [f"{source} is to train on and to measure on." for source in sorted(both)]


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
        policy.require_links_inside(checkpoint.files.root)
    faults += check_norms(checkpoint, head)
    found = describe(checkpoint, head, faults, 0.0)
    assert found.head and found.job
    return {
        "family": found.family, "layout": found.head.layout, "head_tensors": found.head.tensors,
        "head_bytes": found.head.bytes, "model_bytes": found.bytes, "stitch_bytes": found.job.written_by_stitch,
        "stitch_bytes_as_copy": found.job.written_by_stitch_as_copy, "warnings": [fault.what for fault in faults],
    }  # fmt: skip


class _pointing_at:  # noqa: N801 - reads as a statement
    """Give errors that leave the block a pointer to the job's field, where they have none."""

    def __init__(self, pointer: str) -> None:
        self._pointer = pointer

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, InputError):
            error.pointer = error.pointer if error.pointer.startswith(self._pointer) else self._pointer
