"""Notes of what was begun below a destination and has no manifest (yet, or any more), so that it can be cleared away.

A multipart upload carries no mark of whose it is. What a note lists is ours; anything else below a destination is
somebody else's and stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Set

from fastmtp.stage import MANIFEST
from fastmtp.stores.base import Store, whole

BEGUN = ".fastmtp/begun/"


def note(store: Store, version: str, names: Iterable[str]) -> None:
    """Write down what a version is going to have, before the first of it is written."""
    store.put(f"{BEGUN}{version}.json", json.dumps({"version": version, "files": sorted(names)}).encode())


def done(store: Store, version: str) -> None:
    """The version has its manifest."""
    store.delete([f"{BEGUN}{version}.json"])


def clear(store: Store, needed: Set[str], *, but: str | None = None) -> None:
    """Abort and delete what notes list, but of version `but`, and but for URIs that are `needed`.

    Only for the only writer of a destination: then whoever began it is gone.
    """
    # Written and deleted by the only writer, within a moment, unless that was its last.
    store.delete(store.objects(".fastmtp/trial-"))
    for key in store.objects(BEGUN):
        data = whole(store, key)
        found = json.loads(data) if data else {}
        version = found.get("version")
        if not version or version == but:
            continue
        listed = {f"{version}/{name}" for name in found["files"]}
        for item in store.unfinished(f"{version}/"):
            if item.key in listed:
                store.abort(item)
        there = listed & store.objects(f"{version}/").keys()
        if store.head(f"{version}/{MANIFEST}") is not None:
            # It was finished after all, and only its note was not taken away.
            store.delete([key])
            continue
        store.delete(name for name in there if store.uri(name) not in needed)
        if not any(store.uri(name) in needed for name in there):
            store.delete([key])
