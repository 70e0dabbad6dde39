"""Settings of a store: from the environment, which is the operator's, and from the job where it may choose.

Endpoint, region and credentials are boto3's own (AWS_ENDPOINT_URL_S3, AWS_PROFILE, ...) and appear nowhere here. So is
AWS_REQUEST_CHECKSUM_CALCULATION: with `when_required` no checksum is sent, for stores that stumble over them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fastmtp.errors import ConfigError, DestinationError

MIN_PART = 5 << 20
MAX_PART = 5 << 30
MAX_PARTS = 10_000
MAX_OBJECT = 5 << 40
DEFAULT_PART = 8 << 20
FILES_AT_ONCE = 2
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


@dataclass(frozen=True)
class StoreSettings:
    """How objects are written. `from_env` names the variable of each.

    Attributes:
        addressing: path or virtual; auto is path for any endpoint but Amazon's.
        kms_key: encrypt with SSE-KMS under this key; encryption names another kind of server-side encryption.
        part_size: bytes of a part; by the file's size when None.
        max_object: largest object the store takes, bytes.
        bandwidth: bytes per second sent at most, over all connections.
        workers: parts of a file at once, of up to `FILES_AT_ONCE` files; by the machine's cores when it is not said,
            as each part is hashed here, and more threads than that wait for each other and hold memory.
    """

    addressing: str = "auto"
    encryption: str | None = None
    kms_key: str | None = None
    storage_class: str | None = None
    tags: str | None = None
    part_size: int | None = None
    max_object: int = MAX_OBJECT
    bandwidth: int | None = None
    workers: int = field(default_factory=lambda: min(16, 2 * (os.cpu_count() or 1)))

    @classmethod
    def from_env(cls) -> StoreSettings:
        """From FASTMTP_S3_ADDRESSING, _ENCRYPTION, _KMS_KEY, _STORAGE_CLASS, _TAGS, _PART_SIZE, _MAX_OBJECT,
        _BANDWIDTH and _WORKERS.

        Raises:
            ConfigError: a value that means nothing.
        """

        def get(name: str) -> str | None:
            return os.environ.get(f"FASTMTP_S3_{name}") or None

        def number(name: str) -> int | None:
            value = get(name)
            return None if value is None else bytes_of(f"FASTMTP_S3_{name}", value)

        addressing = get("ADDRESSING") or "auto"
        if addressing not in ("auto", "path", "virtual"):
            raise ConfigError(f"FASTMTP_S3_ADDRESSING={addressing}.", mend="It is auto, path or virtual.")
        return cls(
            addressing=addressing, encryption=get("ENCRYPTION"), kms_key=get("KMS_KEY"), tags=get("TAGS"),
            storage_class=get("STORAGE_CLASS"), part_size=number("PART_SIZE"),
            max_object=number("MAX_OBJECT") or MAX_OBJECT, bandwidth=number("BANDWIDTH"),
            **({"workers": workers} if (workers := number("WORKERS")) else {}),
        )  # fmt: skip

    def chosen(self, *, kms_key: str | None, storage_class: str | None, tags: Mapping[str, str]) -> StoreSettings:
        """With what a job chooses in their place."""
        from urllib.parse import urlencode

        return replace(
            self, kms_key=kms_key or self.kms_key, storage_class=storage_class or self.storage_class,
            tags=urlencode(tags) or self.tags,
        )  # fmt: skip

    def write_arguments(self) -> dict[str, str]:
        """What goes with every object that is written."""
        found = {"StorageClass": self.storage_class, "Tagging": self.tags, "ServerSideEncryption": self.encryption}
        if self.kms_key:
            found |= {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self.kms_key}
        return {name: value for name, value in found.items() if value}

    def part_size_for(self, name: str, size: int) -> int:
        """Bytes of a part of a file of `size` bytes. Reads nothing.

        Raises:
            DestinationError: the store takes no such object, or it would need too many parts.
        """
        if size > self.max_object:
            raise DestinationError(
                f"{name} has {size} bytes; the store takes objects of {self.max_object} at most.",
                mend="Save the checkpoint in smaller shards (FASTMTP_S3_MAX_OBJECT says what the store takes).",
            )
        if self.part_size is not None:
            part = min(max(self.part_size, MIN_PART), MAX_PART)
        else:
            # Whole mebibytes, so that the size of parts stays the same from run to run.
            part = max(DEFAULT_PART, (-(-size // MAX_PARTS) + (1 << 20) - 1) >> 20 << 20)
        parts = -(-size // part)
        if parts > MAX_PARTS or part > MAX_PART:
            raise DestinationError(
                f"{name} would be sent in {parts} parts of {part} bytes; a store takes {MAX_PARTS} of {MAX_PART}.",
                mend="Leave FASTMTP_S3_PART_SIZE unset, or make it larger.",
            )
        return part


def bytes_of(name: str, value: str) -> int:
    """A number of bytes such as 64MiB, 200M or 1000000."""
    found = re.fullmatch(r"([0-9]+)\s*([KMG]I?)?B?", value.strip().upper())
    if not found or not int(found[1]):
        raise ConfigError(f"{name}={value} is no size.", mend="Write it as 64MiB, 200MB or a number.")
    return int(found[1]) * _UNITS[found[2] or ""]
