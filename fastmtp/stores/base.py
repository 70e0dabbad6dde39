"""What a store is to the rest: objects by key below one URI, each with a size and a stamp; and how its errors read.

A stamp is the ETag, or what stands for one in a directory: opaque, and another one when the bytes are others. Nothing
is concluded from its form. Loads no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, NoCredentialsError

from fastmtp.errors import DestinationError, InputError, IntegrityError
from fastmtp.stores.settings import StoreSettings

BLOCK = 8 << 20
_MOVES = 5
ERRORS = (BotoCoreError, ClientError, OSError)
_CREDENTIALS = {
    "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId",
    "SignatureDoesNotMatch", "AccessDenied", "RequestExpired",
}  # fmt: skip

OnBytes = Callable[[int], None]


class Conflict(Exception):
    """A conditional write found something else there. Never leaves the stores' callers."""


class Changed(IntegrityError):
    """An object is another one than when it was looked at."""


@dataclass(frozen=True)
class ObjectInfo:
    """One object.

    Attributes:
        size: bytes.
        stamp: ETag or its stand-in.
        modified: Unix seconds by the store's own clock.
        checksum: SHA-256 as the store keeps it, base64: of the whole, or of the parts' digests followed by -COUNT.
    """

    size: int
    stamp: str
    modified: float
    checksum: str | None = None


@dataclass(frozen=True)
class Unfinished:
    """Something begun and not ended: a multipart upload, or a file under a temporary name. `key` is what it was for."""

    key: str
    token: str


class Readable(Protocol):
    """Objects below a URI, to be read. Keys are relative, with forward slashes. Methods raise what `ERRORS` lists."""

    name: str
    settings: StoreSettings

    def uri(self, key: str) -> str: ...

    def key_of(self, uri: str) -> str | None:
        """The key of a URI in this store, which may begin with `..` for one outside its prefix; None for another's."""

    def head(self, key: str) -> ObjectInfo | None: ...

    def read(self, key: str, begin: int, end: int, *, stamp: str | None = None) -> bytes:
        """Bytes `begin` to `end`, fewer at the object's end; with `stamp` only while the object is still that one.

        Raises Changed where it is another.
        """


class Store(Readable, Protocol):
    """Objects below a URI, to be read and written."""

    # Whether checksums that are sent are compared with what arrives: only then is what the store keeps worth noting.
    checks_sums: bool | None

    def check(self) -> None:
        """Raise unless the place is there, or can be made."""

    def learn(self) -> None:
        """Find out what the store checks, where it may be written to."""

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> None:
        """Write a small object. `only_if` is the stamp that must be there now, "" for none: another raises Conflict.

        Some stores mind no conditions, so callers read back.
        """

    def send(self, key: str, path: Path, sha256: str, unfinished: list[Unfinished], on_bytes: OnBytes) -> ObjectInfo:
        """Write a file as an object, going on with what is `unfinished` of it, and prove that it is whole.

        Raises IntegrityError where what the store has differs from the file.
        """

    def copy(self, source: str, info: ObjectInfo, key: str, sha256: str) -> ObjectInfo | None:
        """Copy another object of this store, by URI, without sending it. None where the store does not do that."""

    def proves(self, key: str, info: ObjectInfo, path: Path, sha256: str) -> bool | None:
        """Whether an object is the file at `path`, from what the store says of it; None where that tells nothing."""

    def objects(self, prefix: str = "") -> dict[str, ObjectInfo]: ...

    def folders(self) -> list[str]:
        """Names of the first level below this store's URI that hold something."""

    def delete(self, keys: Iterable[str]) -> None: ...

    def unfinished(self, prefix: str) -> list[Unfinished]: ...

    def abort(self, item: Unfinished) -> None: ...


AnyStore = TypeVar("AnyStore", bound=Readable)


def open_store(uri: str, settings: StoreSettings | None = None) -> Store:
    """The store behind an s3:// or file:// URI. Raises DestinationError for any other."""
    settings = settings or StoreSettings.from_env()
    if uri.startswith("s3://"):
        from fastmtp.stores.s3 import S3Store

        return S3Store(uri, settings)
    if uri.startswith("file://"):
        from fastmtp.stores.local import FileStore

        return FileStore(uri, settings)
    raise DestinationError(f"{uri} is neither s3:// nor file://.")


def open_readable(uri: str) -> Readable:
    """What is behind a URI to read from, which may be hf:// as well: the commit that it means now.

    Raises:
        DestinationError: it is none of these; CheckpointError where it is not on the hub, or the hub refuses.
    """
    if not uri.startswith("hf://"):
        return open_store(uri)
    from fastmtp.stores.hub import open_commit

    return open_commit(uri)


def locate(store: AnyStore, uri: str) -> tuple[AnyStore | Store, str]:
    """The store and key behind any URI: `store` itself where it reaches there."""
    key = store.key_of(uri)
    if key is not None:
        return store, key
    parent, _, name = uri.rpartition("/")
    return open_store(parent, store.settings), name


def blocks(store: Readable, key: str, info: ObjectInfo) -> Iterator[bytes]:
    """An object from begin to end, in flat memory."""
    for begin in range(0, info.size, BLOCK):
        yield store.read(key, begin, min(begin + BLOCK, info.size), stamp=info.stamp)


def sha256_of(store: Readable, key: str, info: ObjectInfo, on_bytes: OnBytes = lambda _count: None) -> str:
    """sha256 of an object, by reading all of it."""
    digest = hashlib.sha256()
    for block in blocks(store, key, info):
        digest.update(block)
        on_bytes(len(block))
    return digest.hexdigest()


def whole(store: Readable, key: str) -> bytes | None:
    """A small object, all of it; None where there is none. Pointers move: one that does so meanwhile is read again."""
    for _ in range(_MOVES):
        info = store.head(key)
        if info is None:
            return None
        with contextlib.suppress(Changed):
            return b"".join(blocks(store, key, info))
    raise Changed(f"{store.uri(key)} is changed again and again while it is read.")


@contextlib.contextmanager
def explained(uri: str, pointer: str = "/publish/uri", kind: type[InputError] = DestinationError) -> Iterator[None]:
    """Turn what a store raises into an error of `kind` that says what is wrong with `uri`."""
    try:
        yield
    except ERRORS as error:
        mend = "Check that the bucket or directory exists and that the credentials may use it."
        if concerns_credentials(error):
            mend = "Renew the credentials and run it again: it goes on where it was."
        raise kind(f"{uri}: {reason(error)}.", mend=mend, pointer=pointer) from error


def code_of(error: Exception) -> str:
    """The store's own code of a ClientError, such as NoSuchKey or 404; empty for other errors."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def status_of(error: Exception) -> int:
    """HTTP status of a ClientError; 0 for other errors."""
    return (
        int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if isinstance(error, ClientError)
        else 0
    )


def concerns_credentials(error: Exception) -> bool:
    """Whether other credentials might help."""
    return code_of(error) in _CREDENTIALS or isinstance(error, NoCredentialsError | CredentialRetrievalError)


def reason(error: Exception) -> str:
    """One line that names the cause and never holds a credential."""
    if isinstance(error, ClientError):
        detail = error.response.get("Error", {})
        found = f"{detail.get('Code', 'error')} ({detail.get('Message', 'no message')})".replace("\n", " ")
        return f"credentials: {found}" if concerns_credentials(error) else found
    return " ".join(str(error).split())[:300]
