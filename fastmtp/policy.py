"""What a job may name: where it reads, where it publishes, and which servers it asks.

The operator's lists are prefixes. None allows anything, which is right for a user's own command line and wrong for a
service. Loads no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fastmtp.config import JobSpec
from fastmtp.data.sources.opening import dataset_name
from fastmtp.errors import ConfigError, InputError
from fastmtp.files import is_local, local_path


@dataclass(frozen=True)
class Policy:
    """What a job may name.

    Attributes:
        sources: prefixes of models and prompts: absolute directories, s3:// and hf: prefixes, hub ids.
        destinations: prefixes of publish.uri: s3://, file:// or hf://.
        servers: prefixes of data.server: http:// or https://.
    """

    sources: tuple[str, ...] | None = None
    destinations: tuple[str, ...] | None = None
    servers: tuple[str, ...] | None = None

    @classmethod
    def from_env(cls) -> Policy:
        """From FASTMTP_ALLOWED_SOURCES, _DESTINATIONS and _SERVERS, comma separated; unset allows anything."""

        def read(name: str) -> tuple[str, ...] | None:
            value = os.environ.get(f"FASTMTP_ALLOWED_{name}")
            return None if value is None else tuple(part.strip() for part in value.split(",") if part.strip())

        return cls(read("SOURCES"), read("DESTINATIONS"), read("SERVERS"))

    def require_job(self, spec: JobSpec) -> None:
        """Raise ConfigError unless everything that a job names is allowed. Looks at nothing but links."""
        self.require_source(spec.model, "/model")
        for pointer, source in prompt_sources(spec):
            self.require_prompts(source, pointer)
        if spec.data.server:
            _require(spec.data.server, self.servers, "/data/server", "FASTMTP_ALLOWED_SERVERS")
        if spec.publish:
            self.require_destination(spec.publish.uri, "/publish/uri")
            if spec.publish.base:
                self.require_source(spec.publish.base, "/publish/base")

    def require_source(self, value: str, pointer: str) -> None:
        """Raise ConfigError unless `value` (a path or URI to read) is allowed."""
        if value.startswith("s3://") and "@" in value.rpartition("/")[2]:
            # An alias names a version of what is before it.
            value = value.rpartition("@")[0]
        _require(value, self.sources, pointer, "FASTMTP_ALLOWED_SOURCES")

    def require_prompts(self, source: str, pointer: str) -> None:
        """Raise ConfigError unless a source of prompts is allowed. What a glob matches is for the caller to check."""
        named = dataset_name(source)
        local = named is not None and named.is_local
        _require(named.place if local and named else source, self.sources, pointer, "FASTMTP_ALLOWED_SOURCES")

    def require_destination(self, value: str, pointer: str) -> None:
        """Raise ConfigError unless `value` (a URI to write below) is allowed."""
        if value.startswith("hf://"):
            # A branch is a place in the repository.
            value = value.partition("@")[0]
        _require(value, self.destinations, pointer, "FASTMTP_ALLOWED_DESTINATIONS")

    def require_links_inside(self, root: Path) -> None:
        """A symbolic link in an allowed directory must not lead to a file that is not allowed.

        A stitched checkpoint holds what the links lead to. A hub cache keeps its files in a sibling of the snapshots.
        """
        if self.sources is None:
            return
        blobs = root.resolve().parent.parent / "blobs"
        for path in sorted(root.rglob("*")):
            if path.is_symlink() and not _resolved(path).is_relative_to(blobs):
                self.require_source(str(path), "/model")


def prompt_sources(spec: JobSpec) -> list[tuple[str, str]]:
    """(JSON pointer, source) of everything that a job reads prompts from: to train on, then to measure on."""
    one = isinstance(spec.data.prompts, str)
    found = [("/data/prompts" if one else f"/data/prompts/{place}", it) for place, it in enumerate(spec.data.sources)]
    one = isinstance(spec.evaluate.prompts, str)
    sets = spec.evaluate.sets.items()
    return found + [("/evaluate/prompts" if one else f"/evaluate/prompts/{name}", source) for name, source in sets]


def _require(value: str, allowed: tuple[str, ...] | None, pointer: str, setting: str) -> None:
    if allowed is None:
        return
    try:
        wanted = _normal(value)
    except InputError as error:
        error.pointer = pointer
        raise
    for prefix in map(_normal, allowed):
        # A dataset's name goes on with its configuration.
        ends = ("/", ":") if prefix.startswith("hf:") else ("/",)
        begins = (prefix,) if prefix.endswith(ends) else tuple(prefix + end for end in ends)
        if wanted == prefix or wanted.startswith(begins):
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
