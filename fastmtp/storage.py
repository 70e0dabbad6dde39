"""What is published below a URI, s3:// or file://: versions, the pointers that name one, and whether they are whole.

    URI/VERSION/...            the files of a version, under the names that vLLM looks for
    URI/VERSION/manifest.json  written last: a version without one does not exist; it never changes
    URI/latest.json            names the version published last
    URI/aliases/NAME.json      names a version, moved by hand or by a job
    URI/.fastmtp/              claims of writers, and what they have begun

Credentials come from boto3's own chain (environment, profile, instance role) and from nowhere else. `fastmtp.upload`
writes versions, `fastmtp.fetch` brings them here. Loads no torch.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastmtp.errors import DataError, DestinationError, InputError, IntegrityError
from fastmtp.stage import MANIFEST
from fastmtp.stores import begun
from fastmtp.stores.base import (
    ERRORS,
    Conflict,
    ObjectInfo,
    Readable,
    Store,
    explained,
    locate,
    open_readable,
    open_store,
    reason,
    sha256_of,
    whole,
)
from fastmtp.stores.claim import Claim
from fastmtp.stores.client import s3_client
from fastmtp.stores.parts import undecorated

__all__ = ["latest", "probe", "read_bytes", "reason", "s3_client", "verify"]

LATEST = "latest.json"
ALIASES = "aliases/"
ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_THREADS = 8


def probe(uri: str) -> None:
    """Write and delete a small object below `uri`. Raises DestinationError, with the reason, when that fails.

    Of a repository of the hub nothing is written: the hub is asked whether the token may.
    """
    if uri.startswith("hf://"):
        from fastmtp import push

        push.probe(uri)
        return
    key = f".fastmtp-probe-{uuid.uuid4().hex}"
    try:
        store = open_store(uri)
        store.check()
        store.put(key, b"can this be written?\n")
        store.delete([key])
    except ERRORS as error:
        raise DestinationError(
            f"{uri} cannot be written: {reason(error)}.",
            mend="Check that the bucket or directory exists and that the credentials may write to it.",
            pointer="/publish/uri",
        ) from error


def read_bytes(uri: str) -> bytes:
    """One object, whole. Raises DataError when it cannot be read."""
    parent, _, name = uri.rpartition("/")
    try:
        found = whole(open_store(parent), name)
    except ERRORS as error:
        raise DataError(f"{uri} cannot be read: {reason(error)}.") from error
    if found is None:
        raise DataError(f"{uri} does not exist.")
    return found


def latest(uri: str, alias: str | None = None) -> dict[str, Any] | None:
    """Manifest of the version published last below `uri`, or of the one an alias names; None when there is none.

    Raises:
        DestinationError: what is there does not read.
    """
    try:
        store = open_store(uri)
        pointer = whole(store, f"{ALIASES}{alias}.json" if alias else LATEST)
        if pointer is None:
            return None
        version = json.loads(pointer)["version"]
        manifest = manifest_of(store, version)
        if manifest is None:
            raise ValueError(f"{version} has no {MANIFEST}")
    except (*ERRORS, ValueError, KeyError, TypeError) as error:
        raise DestinationError(f"{uri}: what is published there does not read: {reason(error)}.") from error
    return manifest


def manifest_of(store: Readable, version: str) -> dict[str, Any] | None:
    """The manifest of a version; None where there is none, or a result of a stage. Raises ValueError, or ERRORS."""
    data = whole(store, f"{version}/{MANIFEST}" if version else MANIFEST)
    found = None if data is None else json.loads(data)
    listed = isinstance(found, dict) and isinstance(found.get("files"), list) and "version" in found
    return found if listed else None


def versions(store: Store) -> list[dict[str, Any]]:
    """Manifests of all versions, newest first, each with `published` (Unix seconds by the store's clock)."""
    found = []
    for name in store.folders():
        info = None if name.startswith(".") or f"{name}/" == ALIASES else store.head(f"{name}/{MANIFEST}")
        manifest = manifest_of(store, name) if info else None
        if info and manifest:
            found.append({**manifest, "published": info.modified})
    # Some stores count in whole seconds.
    return sorted(found, key=lambda one: (one["published"], one.get("created", 0.0)), reverse=True)


def pointers(store: Store) -> dict[str, str]:
    """Name of every pointer -> version: `latest`, and the aliases."""
    names = {"latest": LATEST}
    names |= {key.removeprefix(ALIASES).removesuffix(".json"): key for key in store.objects(ALIASES)}
    found = {name: whole(store, key) for name, key in names.items()}
    return {name: json.loads(data)["version"] for name, data in found.items() if data is not None}


def point(store: Store, name: str, version: str) -> None:
    """Make `latest` or an alias name a version, by a conditional write; read back, as some stores mind no conditions.

    Raises:
        DestinationError: somebody else moves it at the same time, again and again.
    """
    if name != "latest" and not ALIAS.fullmatch(name):
        raise InputError(f"{name} is no name for an alias.", mend="Take a-z, 0-9, '.', '_' and '-'.")
    key = LATEST if name == "latest" else f"{ALIASES}{name}.json"
    data = json.dumps({"version": version, "uri": store.uri(version)}).encode()
    for _ in range(5):
        before = store.head(key)
        if before is not None and whole(store, key) == data:
            return
        try:
            store.put(key, data, only_if=before.stamp if before else "")
        except Conflict:
            continue
        if whole(store, key) == data:
            return
    raise DestinationError(f"{store.uri(key)} is moved by others at the same time.", mend="Try again.")


def set_alias(uri: str, name: str, version: str) -> None:
    """Make an alias name a version that exists. Raises InputError where it does not."""
    store = open_store(uri)
    with explained(uri):
        if manifest_of(store, version) is None:
            raise InputError(f"{uri} has no version {version}.", mend="`fastmtp versions` lists them.")
        point(store, name, version)


def overview(uri: str) -> list[dict[str, Any]]:
    """Versions below a URI, newest first: version, names, published, files, bytes."""
    store = open_store(uri)
    with explained(uri):
        names = pointers(store)
        return [
            {
                "version": one["version"], "names": [name for name, named in names.items() if named == one["version"]],
                "published": one["published"], "files": len(one["files"]),
                "bytes": sum(entry["size"] for entry in one["files"]),
            }
            for one in versions(store)
        ]  # fmt: skip


def prune(store: Store, keep: int) -> list[str]:
    """Delete all but the newest `keep` versions; never one that a pointer names, nor files that a kept one refers to.

    The manifest goes first, so that no reader takes a half-deleted version for one. Only for the only writer, see
    `prune_claimed`. Returns the names.
    """
    found = versions(store)
    named = set(pointers(store).values())
    gone = [one for number, one in enumerate(found) if number >= keep and one["version"] not in named]
    for manifest in gone:
        begun.note(store, manifest["version"], [entry["name"] for entry in manifest["files"]])
        store.delete([f"{manifest['version']}/{MANIFEST}"])
    begun.clear(store, {entry["uri"] for manifest in found if manifest not in gone for entry in manifest["files"]})
    return [manifest["version"] for manifest in gone]


def prune_claimed(uri: str, keep: int) -> list[str]:
    """`prune`, as the only writer."""
    with Claim(store := open_store(uri), "retention"), explained(uri):
        return prune(store, keep)


@dataclass(frozen=True)
class Verified:
    """What a check of a version took: files, of which so many by what the store keeps; bytes read of the others."""

    uri: str
    version: str
    files: int
    bytes: int
    by_checksum: int
    bytes_read: int


def verify(uri: str, manifest: dict[str, Any]) -> int:
    """Check every file of a published version. Returns how many; raises IntegrityError."""
    return check_version(uri, manifest).files


def check_version(
    uri: str, manifest: dict[str, Any], *, read: bool = False, on_bytes: Callable[[int], None] = lambda _count: None
) -> Verified:
    """Check every file of a version against its manifest: by the checksum that the store keeps, or else by reading it.

    Args:
        read: read everything, whatever the store keeps.

    Raises:
        IntegrityError: with every file that is not what it was.
    """
    store = open_readable(uri)

    def check(entry: dict[str, Any]) -> int | None:
        """Bytes read of it; None where it is wrong."""
        place, name = locate(store, entry["uri"])
        info = place.head(name)
        if info is None or info.size != entry["size"]:
            return None
        if not read and kept(entry, info):
            on_bytes(info.size)
            return 0
        return info.size if sha256_of(place, name, info, on_bytes) == entry["sha256"] else None

    entries = manifest["files"]
    with explained(uri), ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(check, entries))
    wrong = [entry["uri"] for entry, result in zip(entries, found, strict=True) if result is None]
    if wrong:
        raise IntegrityError(f"Not what the manifest says, or gone: {', '.join(wrong)}.")
    counts = [result for result in found if result is not None]
    return Verified(
        uri=uri, version=manifest["version"], files=len(entries), bytes=sum(entry["size"] for entry in entries),
        by_checksum=sum(not count and entry["size"] > 0 for count, entry in zip(counts, entries, strict=True)),
        bytes_read=sum(counts),
    )  # fmt: skip


def kept(entry: dict[str, Any], info: ObjectInfo) -> bool:
    """Whether the store keeps the checksum under which the file was published. Only checked ones are in manifests."""
    known = entry.get("checksum")
    return bool(known and info.checksum and undecorated(known) == undecorated(info.checksum))
