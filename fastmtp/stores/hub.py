"""A commit of a repository of the hub, read as other stores are, so that what is published there is fetched alike."""

from __future__ import annotations

import re
from typing import Any

from fastmtp.errors import CheckpointError
from fastmtp.hub import TITLE, UNWANTED, HubFiles, commits, hub_id
from fastmtp.stores.base import ObjectInfo
from fastmtp.stores.parts import encoded
from fastmtp.stores.settings import StoreSettings

_VERSION = re.compile(rf"{TITLE} (v-[0-9a-f]+)")
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
        if found is None or found.size is None:
            return None
        checksum = encoded(bytes.fromhex(found.stamp)) if _SHA256.fullmatch(found.stamp) else None
        return ObjectInfo(found.size, found.stamp, 0.0, checksum)

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

    def published(self, manifest: dict[str, Any]) -> list[dict[str, Any]]:
        """Files of the version that this commit is, by its manifest; the hub computes each large one's sha256."""
        listed = self._files.list()
        return [
            {
                **entry, "uri": self.uri(entry["name"]), "checksum": encoded(bytes.fromhex(entry["sha256"])),
                "stamp": listed[entry["name"]].stamp if entry["name"] in listed else "",
            }
            for entry in manifest["files"]
        ]  # fmt: skip


def open_branch(uri: str) -> HubStore | None:
    """What hf://ORG/NAME[@BRANCH] means now; None where there is no such repository or branch.

    Raises:
        CheckpointError: the hub refuses; UnreachableError where it does not answer.
    """
    files = HubFiles(uri)
    commit = files.commit()
    return None if commit is None else HubStore(files, commit)


def open_commit(uri: str, pointer: str = "/model") -> HubStore:
    """`open_branch` where there must be one. Raises CheckpointError where there is none."""
    found = open_branch(uri)
    if found is None:
        what = f"{uri} is not on the hub, or is private."
        raise CheckpointError(what, mend="Check the name; set HF_TOKEN.", pointer=pointer)
    return found


def overview(uri: str) -> list[dict[str, Any]]:
    """Versions of a branch, newest first: version, the branches and tags that name it, published, uri.

    Raises:
        CheckpointError: there is no such repository or branch, or the hub refuses.
    """
    repository, branch = hub_id(uri)
    found, names = commits(repository, branch)
    return [
        {
            "version": made[1], "names": [name for name, target in names.items() if target == commit.commit_id],
            "published": commit.created_at.timestamp(), "uri": f"hf://{repository}@{commit.commit_id}",
        }
        for commit in found
        if (made := _VERSION.fullmatch(commit.title))
    ]  # fmt: skip
