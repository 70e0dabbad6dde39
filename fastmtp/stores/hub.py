"""A commit of a repository of the hub, read as other stores are, so that what is published there is fetched alike."""

from __future__ import annotations

import re
from typing import Any

from fastmtp.hub import UNWANTED, HubFiles, hub_id
from fastmtp.stores.base import ObjectInfo
from fastmtp.stores.settings import StoreSettings

_SHA256 = re.compile(r"[0-9a-f]{64}")


class HubStore:
    """See `fastmtp.stores.base.Readable`."""

    def __init__(self, files: HubFiles, commit: str) -> None:
        self.name = f"hf://{hub_id(files.name)[0]}@{commit}"
        self.settings = StoreSettings.from_env()
        self._files = files

    def uri(self, key: str) -> str:
        return f"{self.name}/{key}"

    def key_of(self, uri: str) -> str | None:
        return uri.removeprefix(f"{self.name}/") if uri.startswith(f"{self.name}/") else None

    def head(self, key: str) -> ObjectInfo | None:
        found = self._files.list().get(key)
        return None if found is None or found.size is None else ObjectInfo(found.size, found.stamp, 0.0)

    def read(self, key: str, begin: int, end: int, *, stamp: str | None = None) -> bytes:
        """A commit never changes: `stamp` says nothing more."""
        del stamp
        return self._files.read(key, begin, end)

    def entries(self) -> list[dict[str, Any]]:
        """Files that serving takes, with the sha256 where the hub keeps it."""
        return [
            {"name": name, "uri": self.uri(name), "size": info.size, "stamp": info.stamp}
            | ({"sha256": info.stamp} if _SHA256.fullmatch(info.stamp) else {})
            for name, info in self._files.list().items()
            if not name.endswith(UNWANTED)
        ]


def open_branch(uri: str) -> HubStore | None:
    """What hf://ORG/NAME[@BRANCH] means now; None where there is no such repository or branch.

    Raises:
        CheckpointError: the hub refuses; UnreachableError where it does not answer.
    """
    files = HubFiles(uri)
    commit = files.commit()
    return None if commit is None else HubStore(files, commit)
