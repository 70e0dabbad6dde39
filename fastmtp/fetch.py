"""Bring a published version, or any checkpoint in a store, into a directory: whole and verified, or not at all.

What is there already is not read again: files of an earlier version in the same directory, of other directories that
the caller names, and of a run that was killed. The directory serves as it is: `vllm serve DIR`. Loads no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from fastmtp.cache import SETTING, hold, lock_of, make_room, models_directory
from fastmtp.errors import CheckpointError, InputError, IntegrityError
from fastmtp.fetching import Fetching, Source, read_record
from fastmtp.files import is_hub, local_path
from fastmtp.progress import Reporter
from fastmtp.stage import digest_of
from fastmtp.storage import latest, manifest_of
from fastmtp.stores.base import ERRORS, explained, open_store, reason
from fastmtp.stores.hub import open_commit

Allow = Callable[[str], None]


def find(uri: str, pointer: str = "/model") -> Source:
    """What a URI means: a version, a destination (its latest), DESTINATION@ALIAS, or a prefix of plain files, which
    for a fetched directory are those that were fetched.

    On the hub: the commit that hf://ORG/NAME[@REVISION] means now.

    Raises:
        CheckpointError: nothing is there, or it does not read.
    """
    try:
        if is_hub(uri):
            return _find_on_hub(uri, pointer)
        place, _, alias = uri.rpartition("@") if "@" in uri.rpartition("/")[2] else (uri, "", "")
        place = place.rstrip("/")
        store = open_store(place)
        manifest = None if alias else manifest_of(store, "")
        manifest = manifest or latest(place, alias or None)
        if manifest:
            return Source(place, str(manifest["version"]), _checked(uri, _here(place, manifest)))
        record = read_record(local_path(place)) if place.startswith("file://") and not alias else None
        if record:
            listed = [{**entry, "uri": f"{place}/{entry['name']}"} for entry in record["files"]]
            return Source(place, record["version"], _checked(uri, listed))
        found = {} if alias else store.objects()
    except (*ERRORS, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise CheckpointError(f"{uri} cannot be read: {reason(error)}.", pointer=pointer) from error
    entries = [
        {"name": name, "uri": store.uri(name), "size": info.size, "stamp": info.stamp}
        for name, info in found.items()
        if not any(part.startswith(".") for part in name.split("/"))
    ]
    if not entries:
        raise CheckpointError(
            f"{uri} holds nothing.", mend="Name a version, or a checkpoint's prefix.", pointer=pointer
        )
    return Source(place, None, _checked(uri, entries))


def fetch(
    source: Source,
    directory: Path,
    reporter: Reporter,
    *,
    reuse: Sequence[Path] = (),
    allow: Allow | None = None,
) -> dict[str, Any]:
    """Make `directory` what `source` is. Waits where another process does the same.

    Args:
        reuse: directories whose files of the same name and bytes are linked rather than fetched.
        allow: called with the URI of each file that lies elsewhere than the version; raises where it must not be read.

    Returns:
        How many files, and bytes, were fetched and found here.

    Raises:
        InputError: the directory holds something else, or there is no room.
        IntegrityError: a file is not what its manifest says.
    """
    for entry in source.entries:
        if allow and not entry["uri"].startswith(f"{source.uri}/"):
            allow(entry["uri"])
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        if directory.exists() and any(directory.iterdir()) and read_record(directory) is None:
            raise InputError(f"{directory} holds something else.", mend="Name a new directory.")
        if _is_there(directory, source):
            reporter.skipped()
            return {"fetched": 0, "bytes_fetched": 0, "found": len(source.entries)}
        return Fetching(source, directory, reporter, [directory, *reuse]).run()


def fetch_any(uri: str, directory: Path, reporter: Reporter, reuse: Sequence[Path]) -> dict[str, Any]:
    """`fetch` by what a user names; what is on the hub is downloaded by huggingface_hub, and its files copied."""
    uri = uri_of(uri)
    if is_hub(uri):
        from fastmtp.hub import hub_snapshot

        uri = f"file://{hub_snapshot(uri).resolve()}"
    with explained(uri, "", CheckpointError):
        return fetch(find(uri, ""), directory, reporter, reuse=reuse)


def uri_of(named: str) -> str:
    """The URI of what a user names by a URI, a directory or a hub id."""
    if "://" in named:
        return named
    return f"hf://{named}" if is_hub(named) else f"file://{local_path(named).resolve()}"


def manifest_for(source: Source) -> dict[str, Any]:
    """The manifest of a version or fetched directory, as far as checking needs it. Raises InputError for others."""
    if not all(entry.get("sha256") for entry in source.entries):
        raise InputError(
            f"{source.uri} is no published version and was not fetched.", mend="Name two checkpoints to compare them."
        )
    return {"version": source.version or source.uri, "files": source.entries}


def cached_model(uri: str, reporter: Reporter, allow: Allow | None = None) -> Path:
    """A directory of this machine's cache with the model at `uri`, fetched where it is not there yet.

    It stays at least as long as this process.
    """
    source = find(uri)
    identity = source.version or digest_of([[entry["name"], entry["stamp"]] for entry in source.entries])
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", source.uri.partition("://")[2]).strip("-.")[-80:]
    target = models_directory() / f"{slug}-{digest_of([source.uri, identity])[:12]}"
    hold(target)
    for gone in make_room(target, source.nbytes):
        reporter.say(f"{gone} was removed, so that {SETTING} is kept")
    with explained(uri, "/model", CheckpointError):
        fetch(source, target, reporter, allow=allow)
    return target


def _find_on_hub(uri: str, pointer: str) -> Source:
    store = open_commit(uri, pointer)
    manifest = manifest_of(store, "")
    entries = store.published(manifest) if manifest else store.entries()
    return Source(store.name, str(manifest["version"]) if manifest else None, _checked(uri, entries))


def _here(place: str, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """A version's entries; files of its own are where it is now, which may be a copy of where it was published."""
    then, version = f"{manifest.get('uri', place)}/", str(manifest["version"])
    now = place if place.endswith(f"/{version}") else f"{place}/{version}"

    def located(entry: dict[str, Any]) -> str:
        if "uri" not in entry:
            # Published on the hub: beside its manifest, wherever that is.
            return f"{place}/{entry['name']}"
        uri = str(entry["uri"])
        return f"{now}/{uri.removeprefix(then)}" if uri.startswith(then) else uri

    return [{**entry, "uri": located(entry)} for entry in manifest["files"]]


def _checked(uri: str, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for entry in entries:
        path = PurePosixPath(str(entry["name"]))
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise IntegrityError(f"{uri}: its manifest names {entry['name']}, outside the version.")
    return entries


def _is_there(directory: Path, source: Source) -> bool:
    """Whether the directory was fetched from the same thing, and its files have not been touched since."""
    record = read_record(directory)
    if record is None or (record["uri"], record["version"]) != (source.uri, source.version):
        return False
    have = {entry["name"]: entry for entry in record["files"]}
    if have.keys() != {entry["name"] for entry in source.entries}:
        return False
    key = "sha256" if source.version else "stamp"
    return all(
        have[entry["name"]][key] == entry[key] and _untouched(directory / entry["name"], have[entry["name"]])
        for entry in source.entries
    )


def _untouched(path: Path, entry: dict[str, Any]) -> bool:
    if not path.is_file():
        return False
    found = path.stat()
    return (found.st_size, found.st_mtime_ns) == (entry["size"], entry["mtime_ns"])


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time. The lock's file stays: removing it would let two in."""
    descriptor = os.open(lock_of(directory), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
