"""A directory as a store. Every file appears whole, and safe on disk, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from fastmtp.copying import link
from fastmtp.errors import IntegrityError
from fastmtp.stage import fsync_path, sha256_file
from fastmtp.stores.base import BLOCK, Changed, Conflict, ObjectInfo, OnBytes, Unfinished
from fastmtp.stores.settings import StoreSettings

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.publishing")


class FileStore:
    """Objects are files below a directory."""

    def __init__(self, uri: str, settings: StoreSettings) -> None:
        self._root = Path(uri.removeprefix("file://"))
        self.name = uri
        self.settings = settings
        self.checks_sums: bool | None = False

    def check(self) -> None:
        """Raise OSError where the directory neither exists nor can be made."""
        self._root.mkdir(parents=True, exist_ok=True)

    def learn(self) -> None:
        """Nothing: what is written here is read back."""

    def uri(self, key: str) -> str:
        return f"file://{self._root / key}"

    def key_of(self, uri: str) -> str | None:
        if not uri.startswith("file://"):
            return None
        return os.path.relpath(uri.removeprefix("file://"), self._root)

    def head(self, key: str) -> ObjectInfo | None:
        path = self._root / key
        return _info(path) if path.is_file() else None

    def read(self, key: str, begin: int, end: int, *, stamp: str | None = None) -> bytes:
        path = self._root / key
        with path.open("rb") as file:
            if stamp is not None and _stamp(os.fstat(file.fileno())) != stamp:
                raise Changed(f"{path} changed while it was read. Try again.")
            file.seek(begin)
            return file.read(end - begin)

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> None:
        target = self._root / key
        with self._new(target) as temporary:
            _write(temporary, [data], lambda _count: None)
            found = self.head(key)
            if only_if is not None and (found.stamp if found else "") != only_if:
                raise Conflict(key)
            temporary.replace(target)

    def send(self, key: str, path: Path, sha256: str, unfinished: list[Unfinished], on_bytes: OnBytes) -> ObjectInfo:
        for item in unfinished:
            self.abort(item)
        self._take(path, key, sha256, on_bytes)
        return _info(self._root / key)

    def copy(self, source: str, info: ObjectInfo, key: str, sha256: str) -> ObjectInfo | None:
        path = Path(source.removeprefix("file://"))
        if _info(path).stamp != info.stamp:
            return None
        self._take(path, key, sha256, lambda _count: None)
        return _info(self._root / key)

    def proves(self, key: str, info: ObjectInfo, path: Path, sha256: str) -> bool | None:  # noqa: ARG002
        return None

    def objects(self, prefix: str = "") -> dict[str, ObjectInfo]:
        found = (path for path in self._root.rglob("*") if path.is_file() and not _TEMPORARY.fullmatch(path.name))
        named = ((path.relative_to(self._root).as_posix(), path) for path in found)
        return {name: _info(path) for name, path in sorted(named) if name.startswith(prefix)}

    def folders(self) -> list[str]:
        return sorted(path.name for path in self._root.iterdir() if path.is_dir()) if self._root.is_dir() else []

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._root / key
            path.unlink(missing_ok=True)
            # Not what belongs to writers: another one may just be about to write there.
            with contextlib.suppress(OSError):
                while path.parent != self._root and not key.startswith(".fastmtp/"):
                    path = path.parent
                    path.rmdir()

    def unfinished(self, prefix: str) -> list[Unfinished]:
        found = []
        for path in self._root.rglob(".*.publishing"):
            name = _TEMPORARY.fullmatch(path.name)
            key = path.with_name(name["name"]).relative_to(self._root).as_posix() if name else ""
            if name and key.startswith(prefix):
                found.append(Unfinished(key, path.name))
        return found

    def abort(self, item: Unfinished) -> None:
        (self._root / item.key).with_name(item.token).unlink(missing_ok=True)

    def _take(self, path: Path, key: str, sha256: str, on_bytes: OnBytes) -> None:
        """Make `key` the file at `path`: as a reflink where the file system has them, else as a copy."""
        target = self._root / key
        with self._new(target) as temporary:
            try:
                on_bytes(link(path.resolve(), temporary, "reflink").size)
            except OSError:
                temporary.unlink(missing_ok=True)
                with path.open("rb") as file:
                    written = _write(temporary, iter(lambda: file.read(BLOCK), b""), on_bytes)
                if written != sha256:
                    raise IntegrityError(f"{path} is not what was hashed: it changed meanwhile.") from None
            if sha256_file(temporary) != sha256:
                raise IntegrityError(f"{self.uri(key)}: remote bytes differ from {path}.")
            temporary.replace(target)
        fsync_path(target.parent)

    @contextlib.contextmanager
    def _new(self, target: Path) -> Iterator[Path]:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.publishing")
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _write(path: Path, data: Iterable[bytes], on_bytes: OnBytes) -> str:
    """Write a new file and make it durable. Returns the sha256 of what was written."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for block in data:
            digest.update(block)
            file.write(block)
            on_bytes(len(block))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _stamp(found: os.stat_result) -> str:
    return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"


def _info(path: Path) -> ObjectInfo:
    found = path.stat()
    return ObjectInfo(found.st_size, _stamp(found), found.st_mtime)
