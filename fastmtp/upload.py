"""Write a version: what the store has is copied or referred to, the rest is sent, the manifest comes last.

A run that was killed is begun again by the same call and goes on: files that are there are proved and kept, parts that
are there are not sent again. Two writers of one destination exclude each other (`fastmtp.stores.claim`). No torch.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastmtp.checkpoint import INDEX
from fastmtp.errors import ConfigError, DestinationError, IntegrityError
from fastmtp.hashing import sha256_cached
from fastmtp.headers import SUFFIX
from fastmtp.stage import MANIFEST, FileEntry
from fastmtp.storage import manifest_of, point, prune, versions
from fastmtp.stores import begun
from fastmtp.stores.base import (
    Conflict,
    ObjectInfo,
    Store,
    Unfinished,
    explained,
    locate,
    open_store,
    sha256_of,
    whole,
)
from fastmtp.stores.claim import Claim
from fastmtp.stores.settings import FILES_AT_ONCE, StoreSettings

_EARLIER = 20  # versions that are looked through for files


@dataclass(frozen=True)
class Options:
    """How a version is published.

    Attributes:
        base: URI in the same store where the model lies: a version, or any prefix with the same file names.
        known: objects whose bytes are known from elsewhere: manifest entries with uri, size, sha256 and stamp.
        unchanged: shards that the store has are copied there, or referred to where they lie.
        alias, keep: an alias to move there as well; how many versions to keep.
        allow: called with each URI that an earlier manifest names outside the destination; raises ConfigError where it
            must not be read, whatever a manifest says of its bytes.
    """

    base: str | None = None
    known: tuple[dict[str, Any], ...] = ()
    unchanged: Literal["copy", "refer"] = "copy"
    alias: str | None = None
    keep: int | None = None
    allow: Callable[[str], None] | None = None
    settings: StoreSettings = field(default_factory=StoreSettings.from_env)


class Placed(NamedTuple):
    """Where a file of the version lies, and how it got there."""

    uri: str
    info: ObjectInfo
    how: Literal["there", "copied", "referred", "sent"]


def check_sizes(files: dict[str, FileEntry], settings: StoreSettings) -> dict[str, int]:
    """Parts in which each file would be sent. Reads nothing. Raises DestinationError for what no store takes."""
    return {name: max(1, -(-entry.size // settings.part_size_for(name, entry.size))) for name, entry in files.items()}


def publish(
    directory: Path,
    uri: str,
    version: str,
    files: dict[str, FileEntry],
    about: dict[str, Any],
    on_bytes: Callable[[int], None] = lambda _count: None,
    options: Options | None = None,
) -> dict[str, Any]:
    """Make `files` of `directory` the version URI/VERSION, each proved to be what it is here; point latest.json there.

    Args:
        files: with the sha256 of each.
        about: goes into the manifest beside the files: what this version is and how it measured.
        on_bytes: told how many bytes have just got into place, sent or not.

    Returns:
        The manifest.

    Raises:
        DestinationError: the store refused, or another job writes there. The same call goes on from there.
        IntegrityError: what is there, or here, is not what was hashed.
    """
    options = options or Options()
    store = open_store(uri, options.settings)
    if store.name.startswith("s3://"):
        check_sizes(files, options.settings)
    with explained(uri):
        store.check()
    with Claim(store, f"publishing {version}") as claim, explained(uri):
        return _Publishing(directory, store, version, files, about, on_bytes, options).run(claim)


@dataclass
class _Publishing:
    directory: Path
    store: Store
    version: str
    files: dict[str, FileEntry]
    about: dict[str, Any]
    on_bytes: Callable[[int], None]
    options: Options

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[str, list[dict[str, Any]]] = {}
        self.unfinished: dict[str, list[Unfinished]] = {}

    def run(self, claim: Claim) -> dict[str, Any]:
        earlier = versions(self.store)
        needed = {entry["uri"] for manifest in earlier for entry in manifest["files"]}
        begun.clear(self.store, needed, but=self.version)
        self.store.learn()
        manifest = manifest_of(self.store, self.version)
        begun.note(self.store, self.version, self.files)
        self._know(entry for one in earlier[:_EARLIER] for entry in one["files"])
        self._know(self.options.known)
        self._know(self._of_base())
        for item in self.store.unfinished(f"{self.version}/"):
            self.unfinished.setdefault(item.key, []).append(item)
        placed: dict[str, Placed] = {}
        for names in _phases(self.files):
            placed |= self._place_all(names)
        claim.require()
        if manifest is None:
            manifest = self._write_manifest(placed)
        point(self.store, "latest", self.version)
        if self.options.alias:
            point(self.store, self.options.alias, self.version)
        begun.done(self.store, self.version)
        if self.options.keep is not None:
            prune(self.store, self.options.keep)
        return manifest

    def _know(self, entries: Iterable[dict[str, Any]]) -> None:
        for entry in entries:
            if entry.get("stamp") and entry.get("sha256") and self._may_use(str(entry["uri"])):
                self.known.setdefault(entry["sha256"], []).append(entry)

    def _may_use(self, uri: str) -> bool:
        if self.options.allow is None or uri.startswith(self.store.uri("")):
            return True
        try:
            self.options.allow(uri)
        except ConfigError:
            return False
        return True

    def _of_base(self) -> list[dict[str, Any]]:
        """Files of the base, where it is a version itself."""
        if self.options.base is None:
            return []
        place, key = locate(self.store, self.options.base.rstrip("/"))
        try:
            manifest = manifest_of(place, key)
        except ValueError:
            return []
        return list(manifest["files"]) if manifest else []

    def _place_all(self, names: list[str]) -> dict[str, Placed]:
        pool = ThreadPoolExecutor(FILES_AT_ONCE)
        try:
            futures = {name: pool.submit(self._place, name) for name in names}
            return {name: future.result() for name, future in futures.items()}
        finally:
            pool.shutdown(cancel_futures=True)

    def _place(self, name: str) -> Placed:
        """Get one file into its place: found there, copied, referred to or sent."""
        key, size, sha256 = f"{self.version}/{name}", self.files[name].size, self.files[name].sha256
        path = self.directory / name
        assert sha256 is not None
        info = self.store.head(key)
        if info is not None and self._proven(self.store, key, info, name):
            self._advance(size)
            return Placed(self.store.uri(key), info, "there")
        found = self._elsewhere(name)
        if found and self.options.unchanged == "refer" and name.endswith(SUFFIX):
            self._advance(size)
            return Placed(found[0], found[1], "referred")
        if found:
            copied = self.store.copy(found[0], found[1], key, sha256)
            if copied and self._faithful(key, copied, found[1], name):
                self._advance(size)
                return Placed(self.store.uri(key), copied, "copied")
        if path.stat().st_size != size or sha256_cached(path) != sha256:
            raise IntegrityError(f"{path} is not what its manifest says.")
        info = self.store.send(key, path, sha256, self.unfinished.get(key, []), self._advance)
        return Placed(self.store.uri(key), info, "sent")

    def _elsewhere(self, name: str) -> tuple[str, ObjectInfo] | None:
        """Another object of this store with the file's bytes, as recorded of it, or proved now."""
        entry = self.files[name]
        for source in self.known.get(entry.sha256 or "", ()):
            if source["uri"].split("://")[0] != self.store.name.split("://")[0]:
                continue
            place, key = locate(self.store, source["uri"])
            info = place.head(key)
            if info and (info.size, info.stamp) == (entry.size, source["stamp"]):
                return source["uri"], info
        if self.options.base is None:
            return None
        uri = f"{self.options.base.rstrip('/')}/{name}"
        place, key = locate(self.store, uri)
        info = place.head(key)
        if info and info.size == entry.size and self._proven(place, key, info, name):
            return uri, info
        return None

    def _proven(self, store: Store, key: str, info: ObjectInfo, name: str) -> bool:
        """Whether an object is the file: by what was recorded of it, by what the store says, or by reading it."""
        entry, uri = self.files[name], store.uri(key)
        if info.size != entry.size:
            return False
        recorded = self.known.get(entry.sha256 or "", ())
        if any((one["uri"], one["stamp"]) == (uri, info.stamp) for one in recorded):
            return True
        path = self.directory / name
        if sha256_cached(path) != entry.sha256:
            raise IntegrityError(f"{path} is not what its manifest says.")
        said = store.proves(key, info, path, entry.sha256 or "")
        # To read it takes long, and shows as life.
        return sha256_of(store, key, info, lambda _: self._advance(0)) == entry.sha256 if said is None else said

    def _faithful(self, key: str, copied: ObjectInfo, source: ObjectInfo, name: str) -> bool:
        """Whether a copy is one. Equal stamps say so; a copy made in other parts has another and is looked at."""
        same = (copied.size, copied.stamp) == (source.size, source.stamp)
        return same or self._proven(self.store, key, copied, name)

    def _advance(self, count: int) -> None:
        with self.lock:
            self.on_bytes(count)

    def _write_manifest(self, placed: dict[str, Placed]) -> dict[str, Any]:
        listed = []
        for name, entry in self.files.items():
            uri, info, _ = placed[name]
            kept = {"checksum": info.checksum} if self.store.checks_sums and info.checksum else {}
            item = {"name": name, "uri": uri, "size": entry.size, "sha256": entry.sha256, "stamp": info.stamp, **kept}
            listed.append(item)
        place = {"version": self.version, "uri": self.store.uri(self.version)}
        manifest = {**place, "created": time.time(), **self.about, "files": listed}
        key, data = f"{self.version}/{MANIFEST}", json.dumps(manifest, indent=1).encode()
        # An answer lost on the way is asked for again, and then finds our own.
        with contextlib.suppress(Conflict):
            self.store.put(key, data, only_if="")
        if whole(self.store, key) != data:
            raise DestinationError(f"{self.store.uri(key)} was written by somebody else.", mend="Run it again.")
        return manifest


def _phases(files: Iterable[str]) -> list[list[str]]:
    """Names in the order in which they appear: shards, side files, index. Who looks too early finds no index."""
    shards = [name for name in files if name.endswith(SUFFIX)]
    side = [name for name in files if name not in shards and name != INDEX]
    return [shards, side, [name for name in files if name == INDEX]]
