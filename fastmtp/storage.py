"""s3:// and file://: publish a directory as a version, manifest last, verified; find, read and fetch what is published.

    URI/VERSION/...            the files
    URI/VERSION/manifest.json  written when every file is there and was read back: a version without one does not exist
    URI/latest.json            names the version published last

A version is named by its content, so publishing the same bytes again changes nothing. Credentials come from boto3's own
chain (environment, profile, instance role) and from nowhere else. Loads no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from fastmtp.errors import DataError, DestinationError, IntegrityError
from fastmtp.stage import MANIFEST, FileEntry, write_atomic

LATEST = "latest.json"
_BLOCK = 4 << 20


class Store(Protocol):
    """One place that holds objects below a prefix. Keys are relative, with forward slashes."""

    def check(self) -> None: ...
    def put_file(self, key: str, path: Path, on_bytes: Callable[[int], None]) -> None: ...
    def put_bytes(self, key: str, data: bytes) -> None: ...
    def blocks(self, key: str) -> Iterator[bytes]: ...
    def size(self, key: str) -> int | None: ...
    def delete(self, key: str) -> None: ...
    def uri(self, key: str) -> str: ...


class FileStore:
    """A local directory."""

    def __init__(self, uri: str) -> None:
        self._root = Path(urlsplit(uri).path)

    def check(self) -> None:
        """Raise OSError where the directory neither exists nor can be made."""
        self._root.mkdir(parents=True, exist_ok=True)

    def put_file(self, key: str, path: Path, on_bytes: Callable[[int], None]) -> None:
        target = self._root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            shutil.copyfile(path, temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        on_bytes(path.stat().st_size)

    def put_bytes(self, key: str, data: bytes) -> None:
        target = self._root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, data)

    def blocks(self, key: str) -> Iterator[bytes]:
        with (self._root / key).open("rb") as file:
            while block := file.read(_BLOCK):
                yield block

    def size(self, key: str) -> int | None:
        path = self._root / key
        return path.stat().st_size if path.is_file() else None

    def delete(self, key: str) -> None:
        (self._root / key).unlink(missing_ok=True)

    def uri(self, key: str) -> str:
        return f"file://{self._root / key}"


class S3Store:
    """A bucket and prefix of an S3 endpoint."""

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._client = s3_client()

    def check(self) -> None:
        """Raise ClientError when there is no such bucket: some endpoints make one on the first write."""
        self._client.head_bucket(Bucket=self._bucket)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def put_file(self, key: str, path: Path, on_bytes: Callable[[int], None]) -> None:
        transfer = TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=64 << 20)
        self._client.upload_file(str(path), self._bucket, self._key(key), Config=transfer, Callback=on_bytes)

    def put_bytes(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data)

    def blocks(self, key: str) -> Iterator[bytes]:
        body = self._client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"]
        with contextlib.closing(body):
            yield from body.iter_chunks(_BLOCK)

    def size(self, key: str) -> int | None:
        try:
            return int(self._client.head_object(Bucket=self._bucket, Key=self._key(key))["ContentLength"])
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
                return None
            raise

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def uri(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._key(key)}"


def s3_client(*, attempts: int = 5, connect_timeout: float = 10.0) -> Any:  # noqa: ANN401 - boto3 is untyped
    """A client whose endpoint and credentials come from boto3's own chain."""
    # Endpoints other than Amazon's seldom answer to bucket.host names.
    custom = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    style = {"addressing_style": "path"} if custom else {}
    # A session of its own: boto3's default one is shared between threads and keeps its first credentials for good.
    retries = {"mode": "standard", "max_attempts": attempts}
    config = Config(s3=style, retries=retries, connect_timeout=connect_timeout)
    return boto3.session.Session().client("s3", config=config)


def open_store(uri: str) -> Store:
    """The store behind an s3:// or file:// URI. Raises DestinationError for any other."""
    if uri.startswith("s3://"):
        return S3Store(uri)
    if uri.startswith("file://"):
        return FileStore(uri)
    raise DestinationError(f"{uri} is neither s3:// nor file://.")


def probe(uri: str) -> None:
    """Write and delete a small object below `uri`. Raises DestinationError, with the reason, when that fails."""
    key = f".fastmtp-probe-{uuid.uuid4().hex}"
    try:
        store = open_store(uri)
        store.check()
        store.put_bytes(key, b"can this be written?\n")
        store.delete(key)
    except (BotoCoreError, ClientError, OSError) as error:
        raise DestinationError(
            f"{uri} cannot be written: {reason(error)}.",
            mend="Check that the bucket or directory exists and that the credentials may write to it.",
            pointer="/publish/uri",
        ) from error


def publish(
    directory: Path,
    uri: str,
    version: str,
    files: dict[str, FileEntry],
    about: dict[str, Any],
    on_bytes: Callable[[int], None] = lambda _count: None,
) -> dict[str, Any]:
    """Upload `files` of `directory` as URI/VERSION, read each back, then write the manifest and move latest.json.

    Args:
        about: goes into the manifest beside the files: what this version is and how it measured.
        on_bytes: told how many bytes have just been sent.

    Returns:
        The manifest.

    Raises:
        DestinationError: the store refused a write.
        IntegrityError: what was read back is not what was sent.
    """
    store = open_store(uri)
    try:
        for name, entry in files.items():
            key = f"{version}/{name}"
            if store.size(key) == entry.size and _remote_sha256(store, key) == entry.sha256:
                on_bytes(entry.size)
                continue
            store.put_file(key, directory / name, on_bytes)
            if _remote_sha256(store, key) != entry.sha256:
                raise IntegrityError(f"{store.uri(key)}: remote bytes differ from {directory / name}.")
        listed = [
            {"name": name, "uri": store.uri(f"{version}/{name}"), "size": entry.size, "sha256": entry.sha256}
            for name, entry in files.items()
        ]
        manifest = {"version": version, **about, "files": listed}
        store.put_bytes(f"{version}/{MANIFEST}", json.dumps(manifest, indent=1).encode())
        store.put_bytes(LATEST, json.dumps({"version": version, "uri": store.uri(version)}).encode())
    except (BotoCoreError, ClientError, OSError) as error:
        raise DestinationError(f"{uri}: {reason(error)}.", pointer="/publish/uri") from error
    return manifest


def latest(uri: str) -> dict[str, Any] | None:
    """Manifest of the version published last below `uri`; None when nothing is. Raises DestinationError."""
    try:
        store = open_store(uri)
        if store.size(LATEST) is None:
            return None
        version = json.loads(b"".join(store.blocks(LATEST)))["version"]
        manifest: dict[str, Any] = json.loads(b"".join(store.blocks(f"{version}/{MANIFEST}")))
    except (BotoCoreError, ClientError, OSError, ValueError, KeyError) as error:
        raise DestinationError(f"{uri}: what is published there does not read: {reason(error)}.") from error
    return manifest


def fetch(uri: str, manifest: dict[str, Any], directory: Path) -> None:
    """Download a version into `directory`, each file against its manifest. Raises IntegrityError when one differs."""
    store = open_store(uri)
    for entry in manifest["files"]:
        target = directory / entry["name"]
        if not target.resolve().is_relative_to(directory.resolve()):
            raise IntegrityError(f"{uri}: its manifest names {entry['name']}, outside the version.")
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with target.open("wb") as file:
            for block in store.blocks(f"{manifest['version']}/{entry['name']}"):
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != entry["sha256"]:
            raise IntegrityError(f"{entry['uri']} is not what its manifest says.")


def verify(uri: str, manifest: dict[str, Any]) -> int:
    """Read every file of a published version against its manifest. Returns how many; raises IntegrityError."""
    store = open_store(uri)
    for entry in manifest["files"]:
        key = f"{manifest['version']}/{entry['name']}"
        if store.size(key) != entry["size"] or _remote_sha256(store, key) != entry["sha256"]:
            raise IntegrityError(f"{entry['uri']} is not what its manifest says.")
    return len(manifest["files"])


def read_bytes(uri: str) -> bytes:
    """One object, whole. Raises DataError when it cannot be read."""
    parent, _, name = uri.rpartition("/")
    try:
        return b"".join(open_store(parent).blocks(name))
    except (BotoCoreError, ClientError, OSError) as error:
        raise DataError(f"{uri} cannot be read: {reason(error)}.") from error


def _remote_sha256(store: Store, key: str) -> str:
    digest = hashlib.sha256()
    for block in store.blocks(key):
        digest.update(block)
    return digest.hexdigest()


def reason(error: Exception) -> str:
    """One line that names the cause and never holds a credential."""
    if isinstance(error, ClientError):
        detail = error.response.get("Error", {})
        return f"{detail.get('Code', 'error')} ({detail.get('Message', 'no message')})".replace("\n", " ")
    return " ".join(str(error).split())[:300]
