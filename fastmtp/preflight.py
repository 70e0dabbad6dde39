"""Look before anything costly: model, prompts and destination of a job, from headers and first rows alone.

Loads no torch and reads no tensor, so the API, the command line and the flow all call it. What it finds wrong it
raises as an `InputError` that names file, key and mend, with a JSON pointer to the job's field.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastmtp import storage
from fastmtp.checkpoint import Checkpoint, TensorEntry, open_checkpoint
from fastmtp.config import JobSpec
from fastmtp.data.prompts import read_prompts
from fastmtp.errors import CheckpointError, ConfigError, InputError
from fastmtp.families import family_of
from fastmtp.families.base import Family, Layout, text_config

_FLOATS = ("BF16", "F16", "F32")


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


@dataclass(frozen=True)
class HeadInfo:
    """The native head of a checkpoint, as its headers describe it.

    Attributes:
        layout: how experts are stored: `split`, `fused`, or `dense` when there are none.
        tensors: native key -> entry.
        embedding, output: entries of the token embedding and the output head (the same when tied).
    """

    family: Family
    layout: Layout
    tensors: dict[str, TensorEntry]
    embedding: TensorEntry
    output: TensorEntry

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())


def check_job(spec: JobSpec, policy: Policy) -> dict[str, Any]:
    """Check everything a job names. Returns a summary of what it found; raises InputError for the first thing wrong."""
    policy.require_source(spec.model, "/model")
    policy.require_source(spec.data.prompts, "/data/prompts")
    policy.require_source(spec.evaluate.prompts, "/evaluate/prompts")
    if spec.publish:
        policy.require_destination(spec.publish.uri, "/publish/uri")
    summary: dict[str, Any] = {"model": spec.model}
    if is_local(spec.model):
        with _pointing_at("/model"):
            checkpoint = open_checkpoint(local_path(spec.model))
            head = find_head(checkpoint)
        summary |= {
            "family": head.family.name, "layout": head.layout, "head_tensors": len(head.tensors),
            "head_bytes": head.nbytes, "model_bytes": sum(checkpoint.shards.values()),
        }  # fmt: skip
    for pointer, source in (("/data/prompts", spec.data.prompts), ("/evaluate/prompts", spec.evaluate.prompts)):
        if not source.startswith("hf:"):
            with _pointing_at(pointer):
                read_prompts(source, limit=1)
    if spec.publish:
        with _pointing_at("/publish/uri"):
            storage.probe(spec.publish.uri)
        summary["destination"] = spec.publish.uri
    return summary


def find_head(checkpoint: Checkpoint) -> HeadInfo:
    """The checkpoint's MTP head. Raises CheckpointError when it is lost, incomplete, undeclared or not supported."""
    root, config = checkpoint.root, text_config(checkpoint.config)
    family = family_of(checkpoint.config)
    declared = family.layers_declared(config)
    declared = family.layers_default if declared is None else declared
    prefix = family.head_prefix(config)
    found = checkpoint.head(prefix)
    if not found:
        nested = next((key for key in checkpoint.tensors if f".{prefix}" in key), None)
        what = f"stores its head as {nested}" if nested else "has lost its MTP head: no tensor is named mtp.*"
        raise CheckpointError(
            f"{root} {what}" + (f", though config.json declares {declared} layer." if declared else "."),
            mend="Take the original checkpoint: tools that quantise or re-save often drop or rename the head.",
            pointer="/model",
        )
    if declared != 1 or any(key.startswith(f"{prefix}layers.1.") for key in found):
        raise CheckpointError(
            f"{root}: config.json declares {declared} MTP layers in {family.layers_field}; exactly one is supported.",
            mend=f"A head with one layer needs {family.layers_field}: 1.",
            pointer="/model",
        )
    layout = _layout(found)
    _compare(root, found, family.shapes(config, layout))
    embedding = _shared(checkpoint, "embed_tokens.weight")
    tied = bool(config.get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings")))
    output = embedding if tied else _shared(checkpoint, "lm_head.weight")
    return HeadInfo(family=family, layout=layout, tensors=found, embedding=embedding, output=output)


def is_local(model: str) -> bool:
    """Whether a model or source names a path here, rather than a hub id or an s3:// URI."""
    if "://" in model:
        return model.startswith("file://")
    looks_like_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    return not looks_like_hub_id or Path(model).exists()


def local_path(value: str) -> Path:
    """The path a local model or source names."""
    return Path(value.removeprefix("file://")).expanduser()


def _layout(found: dict[str, TensorEntry]) -> Layout:
    if not any(".experts." in key for key in found):
        return "dense"
    return "fused" if any(key.endswith("experts.gate_up_proj") for key in found) else "split"


def _compare(root: Path, found: dict[str, TensorEntry], expected: dict[str, tuple[int, ...]]) -> None:
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise CheckpointError(
            f"{root}: the head lacks {len(missing)} of its {len(expected)} tensors, {missing[0]} first.",
            mend="Take the original checkpoint.",
            pointer="/model",
        )
    quantised = next((key for key, entry in found.items() if entry.dtype not in _FLOATS), None)
    if quantised:
        raise CheckpointError(
            f"{root}: {quantised} is {found[quantised].dtype}; a head in {', '.join(_FLOATS)} is supported.",
            mend="Take a checkpoint whose head is not quantised; the rest of it may be.",
            pointer="/model",
        )
    if unexpected:
        raise CheckpointError(f"{root}: {unexpected[0]} does not belong to this family's head.", pointer="/model")
    for key, shape in expected.items():
        if found[key].shape != shape:
            raise CheckpointError(
                f"{root}: {key} is {list(found[key].shape)}, config.json means {list(shape)}.", pointer="/model"
            )


def _shared(checkpoint: Checkpoint, suffix: str) -> TensorEntry:
    """The one tensor the head shares with the verifier under this name, whatever prefix a wrapper gave it."""
    keys = [key for key in checkpoint.tensors if key == suffix or key.endswith(f".{suffix}")]
    keys = [key for key in keys if not key.startswith("mtp.") and "visual" not in key]
    if len(keys) != 1:
        raise CheckpointError(f"{checkpoint.root} has {len(keys)} tensors named *{suffix}, not one.", pointer="/model")
    return checkpoint.tensors[keys[0]]


def _require(value: str, allowed: tuple[str, ...] | None, pointer: str, setting: str) -> None:
    if allowed is None:
        return
    wanted = _normal(value)
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
        return str(local_path(value).resolve())
    if ".." in value.split("/"):
        raise ConfigError(f"{value} must not contain '..'.")
    return value


class _pointing_at:  # noqa: N801 - reads as a statement
    """Give errors that leave the block a pointer to the job's field, where they have none."""

    def __init__(self, pointer: str) -> None:
        self._pointer = pointer

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, InputError):
            error.pointer = error.pointer if error.pointer.startswith(self._pointer) else self._pointer
