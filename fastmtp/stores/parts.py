"""Digests of a file's parts, in the forms in which stores state them."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path


def md5(data: bytes | bytearray) -> str:
    """For comparing with what a store says, not for security."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def crc32(data: bytes | bytearray) -> str:
    """As S3's headers write it."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def base64_of(digest: str) -> str:
    """A digest in hex as S3's headers write it."""
    return base64.b64encode(bytes.fromhex(digest)).decode()


def undecorated(checksum: str) -> str:
    """A checksum without the count of parts that follows it for objects in parts."""
    return checksum.partition("-")[0]


def composite(path: Path, part_size: int) -> str:
    """SHA-256 over the SHA-256 digests of a file's parts, base64: what S3 keeps of an object in parts."""
    digests = b"".join(hashlib.sha256(data).digest() for data in pieces(path, part_size))
    return base64.b64encode(hashlib.sha256(digests).digest()).decode()


def md5_stamp(path: Path, stamp: str, part_size: int) -> str:
    """The ETag that S3 gives a file in parts of `part_size`, or in one where `stamp` has no count of parts."""
    if "-" not in stamp:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return joined_md5([md5(data) for data in pieces(path, part_size)])


def joined_md5(digests: Sequence[str]) -> str:
    """The ETag that S3 gives an object whose parts have these."""
    return f"{md5(b''.join(map(bytes.fromhex, digests)))}-{len(digests)}"


def pieces(path: Path, size: int) -> Iterator[bytes]:
    """A file's bytes, `size` at a time."""
    with path.open("rb") as file:
        while data := file.read(size):
            yield data
