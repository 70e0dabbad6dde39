"""Digests of a file's parts, in the forms in which stores state them."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastmtp.hashing import fill

if TYPE_CHECKING:
    from typing_extensions import Buffer


def new_md5() -> Any:  # noqa: ANN401 - hashlib's own type has no public name
    """For comparing with what a store says, not for security."""
    return hashlib.md5(usedforsecurity=False)


def md5(data: bytes | bytearray) -> str:
    digest = new_md5()
    digest.update(data)
    return str(digest.hexdigest())


class Crc32:
    """CRC-32 with the methods of a digest."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


# The checksums of S3 that are sent here, by the names that they have in boto3's arguments.
ALGORITHMS: dict[str, Callable[[], Any]] = {"ChecksumSHA256": hashlib.sha256, "ChecksumCRC32": Crc32}


def checksum(name: str, data: bytes) -> dict[str, str]:
    """The argument `name` for `data`."""
    digest = ALGORITHMS[name]()
    digest.update(data)
    return {name: encoded(digest.digest())}


def encoded(digest: bytes) -> str:
    """A digest as S3's headers write it."""
    return base64.b64encode(digest).decode()


def undecorated(checksum: str) -> str:
    """A checksum without the count of parts that follows it for objects in parts."""
    return checksum.partition("-")[0]


def composite(path: Path, part_size: int) -> str:
    """SHA-256 over the SHA-256 digests of a file's parts, base64: what S3 keeps of an object in parts."""
    return encoded(hashlib.sha256(b"".join(digests(path, part_size, hashlib.sha256))).digest())


def md5_stamp(path: Path, stamp: str, part_size: int) -> str:
    """The ETag that S3 gives a file in parts of `part_size`, or in one where `stamp` has no count of parts."""
    if "-" not in stamp:
        with path.open("rb") as file:
            return str(hashlib.file_digest(file, new_md5).hexdigest())
    return joined_md5(digests(path, part_size, new_md5))


def joined_md5(digests: Sequence[bytes]) -> str:
    """The ETag that S3 gives an object whose parts have these."""
    return f"{md5(b''.join(digests))}-{len(digests)}"


def digests(path: Path, part_size: int, new: Callable[[], Any]) -> list[bytes]:
    """A file's digests, `part_size` bytes at a time."""
    found, buffer = [], bytearray(part_size)
    with path.open("rb", buffering=0) as file:
        while fill(file, buffer, digest := new()):
            found.append(digest.digest())
    return found
