"""A published version as the files of a checkpoint: listed by its manifest, read where they lie.

A version may refer to shards that lie elsewhere in the store, and a destination names its latest version by a pointer:
neither shows in a listing of objects. Loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastmtp.errors import UnreadableError
from fastmtp.fetch import Allow, find
from fastmtp.files import REMOTE_PROBE, FileInfo, hidden, whole
from fastmtp.stage import MANIFEST
from fastmtp.storage import LATEST
from fastmtp.stores.base import ERRORS, Store, locate, open_store, reason


class VersionFiles:
    """See `fastmtp.files.Files`."""

    probe = REMOTE_PROBE
    root: Path | None = None

    def __init__(self, uri: str, entries: list[dict[str, Any]]) -> None:
        self.name = uri
        self._store = open_store(uri)
        self._entries = {entry["name"]: entry for entry in entries}
        self._places: dict[str, tuple[Store, str]] = {}

    def list(self) -> dict[str, FileInfo]:
        """Files of the manifest."""
        return {
            name: FileInfo(int(entry["size"]), str(entry["sha256"]))
            for name, entry in sorted(self._entries.items())
            if not hidden(name)
        }

    def read(self, name: str, begin: int, end: int) -> bytes:
        """One ranged GET."""
        if begin == end:
            return b""
        path = f"{self.name}/{name}"
        try:
            if name not in self._places:
                self._places[name] = locate(self._store, self._entries[name]["uri"])
            store, key = self._places[name]
            data = store.read(key, begin, end)
        except ERRORS as error:
            mend = "Check the version with `fastmtp verify`."
            raise UnreadableError(f"{path} cannot be read: {reason(error)}.", mend=mend, pointer="/model") from error
        return whole(path, data, begin, end)


def version_files(uri: str, listed: dict[str, FileInfo]) -> VersionFiles | None:
    """The version that a prefix with these files is, or whose destination it is; None for plain files.

    Raises:
        CheckpointError: a manifest or pointer that does not read, or an alias that is none.
    """
    alias = "@" in uri.rpartition("/")[2] and not listed
    if not alias and MANIFEST not in listed and LATEST not in listed:
        return None
    source = find(uri)
    return VersionFiles(source.uri, source.entries) if source.version else None


def require_allowed(uri: str, allow: Allow) -> None:
    """Call `allow` with every URI that a version at `uri` refers to elsewhere. Raises what that raises."""
    source = find(uri)
    for entry in source.entries:
        if source.version and not entry["uri"].startswith(f"{source.uri}/"):
            allow(entry["uri"])
