"""The files of a checkpoint wherever they lie: a directory, an s3:// prefix, or a repository of the Hugging Face hub.

Lists them and reads ranges of them; downloads nothing whole, writes nothing. Loads no torch; boto3 and huggingface_hub
are imported only where one is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from fastmtp.errors import CheckpointError

# Safetensors headers of large models take up to a few hundred KB: one request then mostly suffices.
_REMOTE_PROBE = 256 << 10
_REMOTE_THREADS = 16
# Bytes read at a time, so that memory stays flat whatever a tensor's size.
BLOCK = 16 << 20

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class FileInfo:
    """One file.

    Attributes:
        size: bytes; None for a link that leads nowhere.
        stamp: changes when the file does: modification time, ETag or the hub's blob id.
    """

    size: int | None
    stamp: str


class Files(Protocol):
    """The files below one place. Names are relative, with forward slashes; hidden files are not listed."""

    name: str
    root: Path | None
    probe: int

    def list(self) -> dict[str, FileInfo]: ...
    def read(self, name: str, begin: int, end: int) -> bytes: ...


class LocalFiles:
    """A directory. `probe` is how much to read of a file at first, when its header's length is not known yet."""

    probe = 8

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            what = f"{root} is no directory" if root.exists() else f"{root} does not exist"
            raise CheckpointError(
                f"{what}.", mend="Name a checkpoint directory with config.json, an s3:// prefix or a hub id.",
                pointer="/model",
            )  # fmt: skip
        self.root: Path | None = root
        self._root = root
        self.name = str(root)

    def list(self) -> dict[str, FileInfo]:
        """Files below the directory, symbolic links followed, by name in sorted order."""
        found: dict[str, FileInfo] = {}
        for parent, folders, names in os.walk(self._root):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            for name in names:
                path = Path(parent, name)
                if not name.startswith("."):
                    found[path.relative_to(self._root).as_posix()] = _stat(path)
        return dict(sorted(found.items()))

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` of a file; fewer where it ends before."""
        with (self._root / name).open("rb") as file:
            file.seek(begin)
            return file.read(end - begin)


class S3Files:
    """Objects below an s3:// prefix; credentials and endpoint come from boto3's own chain."""

    probe = _REMOTE_PROBE
    root: Path | None = None

    def __init__(self, uri: str) -> None:
        from fastmtp.storage import s3_client

        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self._bucket, self._prefix = bucket, prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._client = s3_client()
        self.name = f"s3://{bucket}/{self._prefix}"

    def list(self) -> dict[str, FileInfo]:
        """Objects below the prefix. Raises CheckpointError when the bucket cannot be listed."""
        pages = self._client.get_paginator("list_objects_v2")

        def listed() -> dict[str, FileInfo]:
            found: dict[str, FileInfo] = {}
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
                for item in page.get("Contents", ()):
                    name = item["Key"].removeprefix(self._prefix)
                    if name and not name.endswith("/") and not any(part.startswith(".") for part in name.split("/")):
                        found[name] = FileInfo(int(item["Size"]), item.get("ETag", "").strip('"'))
            return found

        found = self._explained(listed)
        if not found:
            raise CheckpointError(f"{self.name} holds nothing.", mend="Name the checkpoint's prefix.", pointer="/model")
        return found

    def read(self, name: str, begin: int, end: int) -> bytes:
        """One ranged GET."""
        if begin == end:
            return b""

        def get() -> bytes:
            wanted = f"bytes={begin}-{end - 1}"
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name, Range=wanted)
            data: bytes = answer["Body"].read()
            return data

        return self._explained(get)

    def _explained(self, call: Callable[[], _T]) -> _T:
        from botocore.exceptions import BotoCoreError, ClientError

        from fastmtp.storage import reason

        try:
            return call()
        except (BotoCoreError, ClientError) as error:
            raise CheckpointError(
                f"{self.name} cannot be read: {reason(error)}.",
                mend="Check the prefix, the endpoint and the credentials.",
                pointer="/model",
            ) from error


class HubFiles:
    """A repository of the hub, `org/name` or `org/name@revision`, pinned to the commit that the name means now."""

    probe = _REMOTE_PROBE
    root: Path | None = None

    def __init__(self, repository: str) -> None:
        self.name = repository
        self._id, _, revision = repository.removeprefix("hf://").partition("@")
        self._revision = revision or "main"

    def list(self) -> dict[str, FileInfo]:
        """Files of the repository. Raises CheckpointError when there is no such repository, or no hub in reach."""
        from huggingface_hub import HfApi

        info = self._explained(lambda: HfApi().model_info(self._id, revision=self._revision, files_metadata=True))
        self._revision = info.sha or self._revision
        found = {
            item.rfilename: FileInfo(item.size, (item.lfs.sha256 if item.lfs else item.blob_id) or "")
            for item in info.siblings or ()
            if not any(part.startswith(".") for part in item.rfilename.split("/"))
        }
        return dict(sorted(found.items()))

    def read(self, name: str, begin: int, end: int) -> bytes:
        """One ranged GET, retried as huggingface_hub does."""
        if begin == end:
            return b""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import hf_raise_for_status, http_backoff

        def get() -> bytes:
            headers = {"range": f"bytes={begin}-{end - 1}", **build_hf_headers()}
            answer = http_backoff("GET", hf_hub_url(self._id, name, revision=self._revision), headers=headers)
            hf_raise_for_status(answer)
            data: bytes = answer.content
            return data if answer.status_code == 206 else data[begin:end]

        return self._explained(get)

    def _explained(self, call: Callable[[], _T]) -> _T:
        import httpx
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            return call()
        except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
            raise CheckpointError(
                f"{self.name} cannot be read from the hub: {' '.join(str(error).split())[:300]}",
                mend="Check the id, the network and HF_TOKEN, or name a local directory.",
                pointer="/model",
            ) from error


def open_files(model: str | Path) -> Files:
    """The files of a model named by path, file:// or s3:// URI, hub id or hf:// URI. Raises CheckpointError."""
    if isinstance(model, Path) or is_local(model):
        return LocalFiles(model if isinstance(model, Path) else local_path(model))
    if model.startswith("s3://"):
        return S3Files(model)
    if "://" in model and not model.startswith("hf://"):
        raise CheckpointError(
            f"{model} is neither a path, an s3:// prefix nor a hub id.", mend="Name one of these.", pointer="/model"
        )
    return HubFiles(model)


def is_local(model: str) -> bool:
    """Whether a model or source names a path here, rather than a hub id or a URI."""
    if "://" in model:
        return model.startswith("file://")
    looks_like_hub_id = model.count("/") == 1 and not model.startswith((".", "/", "~"))
    return not looks_like_hub_id or Path(model).exists()


def local_path(value: str) -> Path:
    """The path a local model or source names."""
    return Path(value.removeprefix("file://")).expanduser()


def in_parallel(files: Files, call: Callable[[_T], _R], items: list[_T]) -> list[_R]:
    """Results of `call` in order; over many connections where the files are remote."""
    if files.root is not None or len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(_REMOTE_THREADS) as pool:
        return list(pool.map(call, items))


def _stat(path: Path) -> FileInfo:
    try:
        found = path.stat()
    except OSError:
        return FileInfo(None, "")
    return FileInfo(found.st_size, str(found.st_mtime_ns))
