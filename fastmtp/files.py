"""The files of a checkpoint wherever they lie: a directory, an s3:// prefix, or a repository of the Hugging Face hub.

Lists them and reads ranges of them; downloads nothing whole, writes nothing. A hub that is not in reach is replaced by
its cache on this machine, where that has the model. Loads no torch; boto3 and huggingface_hub are imported only where
one is asked for.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastmtp.errors import CheckpointError, UnreachableError, UnreadableError

# Safetensors headers of large models take up to a few hundred KB: one request then mostly suffices.
REMOTE_PROBE = 256 << 10
_REMOTE_THREADS = 16
# Bytes read at a time, so that memory stays flat whatever a tensor's size.
BLOCK = 16 << 20

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class FileInfo:
    """One file.

    Attributes:
        size: bytes; None for a link that leads nowhere, and for what is no regular file.
        stamp: changes when the file does: modification time, ETag or the hub's blob id.
    """

    size: int | None
    stamp: str


class Files(Protocol):
    """The files below one place. Names are relative, with forward slashes; hidden files are not listed.

    `probe` is how much to read of a file at first, when its header's length is not known yet. `read` gives bytes
    `begin` to `end` of a file, all of them, or raises CheckpointError: UnreadableError, or UnreachableError where
    nothing answers.
    """

    name: str
    root: Path | None
    probe: int

    def list(self) -> dict[str, FileInfo]: ...
    def read(self, name: str, begin: int, end: int) -> bytes: ...


class LocalFiles:
    """A directory."""

    probe = 8

    def __init__(self, root: Path) -> None:
        try:
            found = "is no directory" if not root.is_dir() and root.exists() else "does not exist"
            there = root.is_dir()
        except OSError as error:
            found, there = f"cannot be looked at: {error.strerror}", False
        if not there:
            raise CheckpointError(
                f"{root} {found}.", mend="Name a checkpoint directory with config.json, an s3:// prefix or a hub id.",
                pointer="/model",
            )  # fmt: skip
        self.root: Path | None = root
        self._root = root
        self.name = str(root)

    def list(self) -> dict[str, FileInfo]:
        """Files below the directory, symbolic links followed, by name in sorted order."""
        found: dict[str, FileInfo] = {}
        for parent, folders, names in os.walk(self._root, onerror=self._refuse):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            for name in names:
                path = Path(parent, name)
                if not name.startswith("."):
                    found[path.relative_to(self._root).as_posix()] = _stat(path)
        return dict(sorted(found.items()))

    def read(self, name: str, begin: int, end: int) -> bytes:
        """From the file."""
        try:
            with (self._root / name).open("rb") as file:
                file.seek(begin)
                data = file.read(end - begin)
        except OSError as error:
            what = f"{self.name}/{name} cannot be read: {error.strerror}."
            raise UnreadableError(what, mend="Make it readable.", pointer="/model") from error
        return whole(f"{self.name}/{name}", data, begin, end)

    def _refuse(self, error: OSError) -> None:
        what = f"{error.filename} cannot be listed: {error.strerror}."
        raise CheckpointError(what, mend="Make it readable.", pointer="/model") from error


class S3Files:
    """Objects below an s3:// prefix, or a published version; credentials and endpoint come from boto3's own chain."""

    probe = REMOTE_PROBE
    root: Path | None = None

    def __init__(self, uri: str) -> None:
        from fastmtp.storage import s3_client

        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self._bucket, self._prefix = bucket, prefix.strip("/") + "/" if prefix.strip("/") else ""
        self.name = f"s3://{bucket}/{self._prefix}".rstrip("/")
        # An endpoint that is not there is found out in seconds.
        with self._explained(self.name):
            self._client = s3_client(attempts=3, connect_timeout=5, read_timeout=10)
        self._stamps: dict[str, str] = {}
        # Set by `list` where this is a published version, whose manifest says what is there.
        self._version: Files | None = None

    def list(self) -> dict[str, FileInfo]:
        """Objects below the prefix. Raises CheckpointError when the bucket cannot be listed, or holds none there."""
        found: dict[str, FileInfo] = {}
        with self._explained(self.name):
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            ):
                for item in page.get("Contents", ()):
                    name = item["Key"].removeprefix(self._prefix)
                    if name and not name.endswith("/") and not hidden(name):
                        found[name] = FileInfo(int(item["Size"]), item.get("ETag", "").strip('"'))
        from fastmtp.published import version_files

        self._version = version_files(self.name, found)
        if self._version:
            return self._version.list()
        if not found:
            raise CheckpointError(f"{self.name} holds nothing.", mend="Name the checkpoint's prefix.", pointer="/model")
        self._stamps = {name: info.stamp for name, info in found.items() if info.stamp}
        return dict(sorted(found.items()))

    def read(self, name: str, begin: int, end: int) -> bytes:
        """One ranged GET, of the object that was listed and no other under its name.

        boto3 tries again only before the first byte; this does so too where a body breaks off.
        """
        if begin == end:
            return b""
        if self._version:
            return self._version.read(name, begin, end)
        path, wanted, data = f"{self.name}/{name}", f"bytes={begin}-{end - 1}", b""
        with self._explained(path):
            for last in (False, False, True):
                answer = self._get(name, wanted)
                with contextlib.closing(answer["Body"]) as body, _broken_off(raised=last):
                    if answer["ContentLength"] > end - begin:
                        what = f"{path}: the store sends all of it where a part was asked for."
                        raise UnreadableError(what, mend="Download it, and name the directory.", pointer="/model")
                    # Without a length, boto3 would compare the part with the whole object's checksum, which some
                    # stores send along.
                    data = body.read(end - begin)
                if len(data) == end - begin:
                    break
        return whole(path, data, begin, end)

    def _get(self, name: str, wanted: str) -> Any:  # noqa: ANN401 - boto3 is untyped
        from botocore.exceptions import ClientError

        from fastmtp.stores.base import status_of

        stamp, place = self._stamps.get(name), {"Bucket": self._bucket, "Key": self._prefix + name}
        changed = UnreadableError(f"{self.name}/{name} changed while it was read.", mend="Try again.", pointer="/model")
        try:
            answer = self._client.get_object(**place, Range=wanted, **({"IfMatch": f'"{stamp}"'} if stamp else {}))
        except ClientError as error:
            if stamp and status_of(error) == 412:
                raise changed from error
            raise
        # Some stores mind no conditions.
        if stamp and answer.get("ETag", stamp).strip('"') != stamp:
            answer["Body"].close()
            raise changed
        return answer

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, ConnectionError, HTTPClientError

        from fastmtp.storage import reason

        try:
            yield
        except (ConnectionError, HTTPClientError) as error:
            raise UnreachableError(
                f"{name} does not answer: {reason(error)}.", mend="Check the network and AWS_ENDPOINT_URL_S3.",
                pointer="/model",
            ) from error  # fmt: skip
        except (BotoCoreError, ClientError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise UnreadableError(
                f"{name} cannot be read: {reason(error)}.",
                mend="Check the prefix, the endpoint and the credentials.", pointer="/model",
            ) from error  # fmt: skip


def open_files(model: str | Path) -> Files:
    """The files of a model named by path, file:// or s3:// URI, hub id or hf:// URI.

    Raises:
        CheckpointError: there is no such place; UnreachableError where it does not answer.
    """
    if isinstance(model, Path) or is_local(model):
        return LocalFiles(model if isinstance(model, Path) else local_path(model))
    if model.startswith("s3://"):
        return S3Files(model)
    if not is_hub(model):
        raise CheckpointError(
            f"{model} is neither a path, an s3:// prefix nor a hub id.", mend="Name one of these.", pointer="/model"
        )
    from fastmtp.hub import HubFiles, cached_snapshot

    files = HubFiles(model)
    try:
        files.list()
    except UnreachableError:
        cached = cached_snapshot(model)
        if cached is None:
            raise
        return LocalFiles(cached)
    return files


def is_local(model: str) -> bool:
    """Whether a model or source names a path here, rather than a hub id or a URI."""
    if "://" in model:
        return model.startswith("file://")
    looks_like_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    return not looks_like_hub_id or os.path.exists(model)  # noqa: PTH110 - Path.exists raises for a name too long


def is_hub(model: str) -> bool:
    """Whether a model is named by a hub id."""
    return model.startswith("hf://") or ("://" not in model and not is_local(model))


def local_path(value: str) -> Path:
    """The path a local model or source names. Raises CheckpointError for what no path can be."""
    if "\0" in value:
        raise CheckpointError("A path has no null character.", mend="Name a directory.", pointer="/model")
    path = Path(value.removeprefix("file://"))
    # "~name" of somebody who is no user here is a name like any other.
    with contextlib.suppress(RuntimeError):
        return path.expanduser()
    return path


def in_parallel(files: Files, call: Callable[[_T], _R], items: list[_T]) -> list[_R]:
    """Results of `call` in order; over many connections where the files are remote."""
    if files.root is not None or len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
        return list(pool.map(call, items))


def printable(value: object) -> str:
    """As text that any terminal and any JSON can hold: names in a broken file may be anything."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in str(value))


def _stat(path: Path) -> FileInfo:
    try:
        found = path.stat()
    except OSError:
        return FileInfo(None, "")
    return FileInfo(found.st_size if stat.S_ISREG(found.st_mode) else None, str(found.st_mtime_ns))


@contextlib.contextmanager
def _broken_off(*, raised: bool) -> Iterator[None]:
    """Let an S3 body that breaks off be an error, or pass over it."""
    from botocore.exceptions import ReadTimeoutError, ResponseStreamingError

    try:
        yield
    except (ReadTimeoutError, ResponseStreamingError):
        if raised:
            raise


def hidden(name: str) -> bool:
    """Whether a part of a relative name begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def whole(path: str, data: bytes, begin: int, end: int) -> bytes:
    """`data`, if that is all of bytes `begin` to `end`. Raises UnreadableError."""
    if len(data) != end - begin:
        what = f"{path} gave {len(data)} of the {end - begin} bytes at {begin}."
        raise UnreadableError(what, mend="It changed or broke off meanwhile: try again.", pointer="/model")
    return data
