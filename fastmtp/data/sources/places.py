"""The files that a source names: a path, file:// or s3:// URI, a glob, or all below a directory or prefix.

Reads none of them. Names are in sorted order, so that the same files give the same rows in the same order.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fastmtp.errors import CheckpointError, DataError
from fastmtp.files import hidden, local_path
from fastmtp.stores.base import ObjectInfo, Store, explained, open_store

# What is taken from a directory or prefix; a glob takes whatever it matches.
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")
_WILD = re.compile(r"[*?\[]")
# Clocks of a store and of what logs into it differ by less.
_CLOCKS = 3600.0
# A remote file is read in requests of this many bytes.
_REQUEST = 4 << 20


@dataclass(frozen=True)
class SourceFile:
    """One file to read rows from.

    Attributes:
        name: path or URI, for messages.
        size: bytes.
        modified: Unix seconds.
        open: gives its bytes, seekable.
    """

    name: str
    size: int
    modified: float
    open: Callable[[], io.BufferedReader]


def is_glob(source: str) -> bool:
    """Whether a source has wildcards: `*`, `?`, `[...]`, and `**` for any depth of folders."""
    return bool(_WILD.search(source))


def files_of(source: str) -> list[SourceFile]:
    """Files of one source, by name.

    Raises:
        DataError: there are none, or the place cannot be looked at.
    """
    found = _in_store(source) if source.startswith("s3://") else _here(source)
    if not found:
        what = "matches no file" if is_glob(source) else f"holds no file to read ({', '.join(SUFFIXES)}, or .gz)"
        raise DataError(f"{source} {what}.", mend="Name a file, a glob that matches some, or the folder above them.")
    return found


def changed_since(files: Iterable[SourceFile], since: float | None) -> list[SourceFile]:
    """Those that may hold something logged at or after `since`: a file last modified before cannot."""
    return [file for file in files if since is None or file.modified >= since - _CLOCKS]


def is_data(name: str) -> bool:
    """Whether a file of a directory is read, going by its name."""
    return name.removesuffix(".gz").endswith(SUFFIXES)


def local_file(path: Path) -> SourceFile:
    """A file here. Raises DataError."""
    with _explained_here(path):
        status = path.stat()
        return SourceFile(str(path), status.st_size, status.st_mtime, lambda: _open(path))


def _here(source: str) -> list[SourceFile]:
    try:
        path = local_path(source)
    except CheckpointError as error:
        raise DataError(error.what, mend="Name a file.") from error
    with _explained_here(path):
        if not os.path.lexists(path) and is_glob(str(path)):
            names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - hidden files are not for a `*`
            return [local_file(Path(name)) for name in names if not Path(name).is_dir()]
        if not path.is_dir():
            return [local_file(path)]
        below = (below for below in sorted(path.rglob("*")) if is_data(below.name) and below.is_file())
        return [local_file(found) for found in below if not hidden(found.relative_to(path).as_posix())]


def _open(path: Path) -> io.BufferedReader:
    with _explained_here(path):
        return io.BufferedReader(io.FileIO(path), 1 << 20)


class _explained_here:  # noqa: N801 - reads as a statement
    """Turn errors of the file system into DataError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            raise DataError(f"{self._path}: {error.strerror}.", mend="Name a readable file.") from error


def _in_store(source: str) -> list[SourceFile]:
    bucket, _, key = source.removeprefix("s3://").partition("/")
    if not bucket or is_glob(bucket):
        raise DataError(f"{source} names no bucket.", mend="Write s3://BUCKET/KEY.")
    with explained(source, "", DataError):
        store = open_store(f"s3://{bucket}")
        if is_glob(key):
            matches = glob_pattern(key).fullmatch
            found = store.objects(_WILD.split(key)[0])
            names = [name for name in found if matches(name)]
        else:
            info = store.head(key) if key and not key.endswith("/") else None
            if info is not None:
                return [_object(store, key, info)]
            folder = f"{key.rstrip('/')}/" if key else ""
            found = store.objects(folder)
            names = [name for name in found if is_data(name) and not hidden(name.removeprefix(folder))]
    return [_object(store, name, found[name]) for name in sorted(names)]


def glob_pattern(key: str) -> re.Pattern[str]:
    """A glob as a regular expression: `*` and `?` stay within a folder, `**/` is any number of them."""
    parts = {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def translated(found: re.Match[str]) -> str:
        word = found[0]
        if word in parts:
            return parts[word]
        if len(word) == 1:
            return re.escape(word)
        inside = word[1:-1].replace("\\", r"\\").replace("[", r"\[")
        return f"[^{inside[1:]}]" if inside[0] == "!" else f"[{inside}]"

    return re.compile(re.sub(r"\*\*/|\*\*|\[!?[^\]/]+\]|.", translated, key, flags=re.DOTALL), re.DOTALL)


def _object(store: Store, key: str, info: ObjectInfo) -> SourceFile:
    def opened() -> io.BufferedReader:
        return io.BufferedReader(_ObjectFile(store, key, info), _REQUEST)

    return SourceFile(store.uri(key), info.size, info.modified, opened)


class _ObjectFile(io.RawIOBase):
    """An object as a seekable file, read by ranges. It stays the object it was when it was listed, or reading fails."""

    def __init__(self, store: Store, key: str, info: ObjectInfo) -> None:
        self._store, self._key, self._info, self._at = store, key, info, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._info.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer by one request. Raises DataError; IntegrityError where the object is another one by now."""
        end = min(self._at + len(buffer), self._info.size)
        with explained(self._store.uri(self._key), "", DataError):
            data = self._store.read(self._key, self._at, end, stamp=self._info.stamp)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
