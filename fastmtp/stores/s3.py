"""A bucket and prefix of any S3-compatible store.

Stores differ in what they check, ignore and leave out, so nothing rests on one feature alone: `learn` finds out whether
sent checksums are checked and whether ETags are MD5 digests, and what neither proves is read back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from fastmtp.errors import DestinationError
from fastmtp.stores import parts
from fastmtp.stores.base import (
    Changed,
    Conflict,
    ObjectInfo,
    OnBytes,
    Unfinished,
    code_of,
    concerns_credentials,
    status_of,
)
from fastmtp.stores.client import s3_client
from fastmtp.stores.pacing import Pace
from fastmtp.stores.settings import StoreSettings

TRIAL = ".fastmtp/trial-"
# What a store answers that does not copy, or not this: the file is then sent.
_NO_COPY = {400, 403, 404, 405, 412, 501}
_LONG = 900.0
_READS = 5
# What a body that ends early raises; boto3 tries again only before the first byte.
_BROKEN_OFF = (ConnectionClosedError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError)


class S3Store:
    """See `fastmtp.stores.base.Store`."""

    def __init__(self, uri: str, settings: StoreSettings) -> None:
        self.bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self.prefix = prefix.strip("/")
        self.name = uri
        self.settings = settings
        self.pace = Pace(settings.bandwidth)
        self.checks_sums: bool | None = None
        self.etags_are_md5 = False
        # Names out of `parts.ALGORITHMS`: what goes with each part, and what uploads are begun with.
        self.part_checksum: str | None = None
        self.named_checksum: str | None = None
        self._lock = threading.Lock()
        self._client = self._new_client()

    def _new_client(self) -> Any:  # noqa: ANN401
        return s3_client(attempts=8, read_timeout=_LONG, settings=self.settings)

    def call(self, operation: str, **arguments: Any) -> Any:  # noqa: ANN401
        """One call. Expired credentials are looked up again once: a profile or a mounted file may hold new ones."""
        client = self._client
        try:
            return getattr(client, operation)(Bucket=self.bucket, **arguments)
        except ClientError as error:
            if not concerns_credentials(error) or "Expired" not in code_of(error):
                raise
        with self._lock:
            if self._client is client:
                self._client = self._new_client()
        return getattr(self._client, operation)(Bucket=self.bucket, **arguments)

    def full(self, key: str) -> str:
        """The key in the bucket; `../KEY` is one outside the prefix."""
        if key.startswith("../"):
            return key[3:]
        return f"{self.prefix}/{key}" if self.prefix else key

    def _relative(self, full: str) -> str:
        return full[len(self.prefix) + 1 :] if self.prefix else full

    def check(self) -> None:
        """Raise ClientError when there is no such bucket: some endpoints make one on the first write."""
        self.call("head_bucket")

    def learn(self) -> None:
        """Find out, by small objects, what this store checks and what its ETags are.

        One that refuses a wrong checksum and takes the right one checks it; one that refuses both does not know it.
        A checksum that is checked goes with every part. One that is taken and not checked proves nothing and takes
        time here, so it is only named: some stores compute a slower one where no name is given.

        Raises:
            DestinationError: it does not give back what it was sent, whatever it says of it.
        """
        with self._lock:
            if self.checks_sums is not None:
                return
            data, key = uuid.uuid4().bytes, self.full(f"{TRIAL}{uuid.uuid4().hex}")
            arguments = {"Bucket": self.bucket, "Key": key, "Body": data, **self.settings.write_arguments()}
            wanted = os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported").lower() != "when_required"
            checked: str | None = None
            try:
                for name in parts.ALGORITHMS if wanted else ():
                    taken = self._takes(arguments, parts.checksum(name, b""))
                    checked = name if not taken and self._takes(arguments, parts.checksum(name, data)) else None
                    self.named_checksum = name if taken or checked else None
                    if checked:
                        break
                answer = self._client.put_object(**arguments)
                back = self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            finally:
                with contextlib.suppress(ClientError, BotoCoreError):
                    self._client.delete_object(Bucket=self.bucket, Key=key)
            if back != data:
                raise DestinationError(
                    f"{self.name} gave back {len(back)} bytes that are not the {len(data)} it was sent.",
                    mend="Look at what stands before the store: something alters bodies, or keeps their framing.",
                )
            # Where checksums are checked, to compute MD5 as well would only take time.
            checks_sums = checked == "ChecksumSHA256"
            self.etags_are_md5 = not checks_sums and answer["ETag"].strip('"') == parts.md5(data)
            self.part_checksum = checked
            self.checks_sums = checks_sums

    def _takes(self, arguments: dict[str, Any], checksum: dict[str, str]) -> bool:
        """Whether the store takes an object with that checksum."""
        try:
            self._client.put_object(**arguments, **checksum)
        except ClientError as error:
            if status_of(error) not in (400, 501) or concerns_credentials(error):
                raise
            return False
        return True

    def uri(self, key: str) -> str:
        return f"s3://{self.bucket}/{self.full(key)}"

    def key_of(self, uri: str) -> str | None:
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        if not uri.startswith("s3://") or bucket != self.bucket:
            return None
        inside = not self.prefix or key.startswith(self.prefix + "/")
        return self._relative(key) if inside else f"../{key}"

    def head(self, key: str) -> ObjectInfo | None:
        try:
            answer = self.call("head_object", Key=self.full(key), ChecksumMode="ENABLED")
        except ClientError as error:
            if status_of(error) == 404:
                return None
            raise
        return ObjectInfo(
            int(answer["ContentLength"]), answer["ETag"].strip('"'), answer["LastModified"].timestamp(),
            answer.get("ChecksumSHA256"),
        )  # fmt: skip

    def read(self, key: str, begin: int, end: int, *, stamp: str | None = None) -> bytes:
        if begin >= end:
            return b""
        for attempt in range(_READS):
            answer = self._get(key, begin, end, stamp)
            try:
                data: bytes = answer["Body"].read()
            except _BROKEN_OFF:
                if attempt + 1 == _READS:
                    raise
                time.sleep(min(0.2 * 2**attempt, 5.0))
            else:
                return data
        raise AssertionError

    def _get(self, key: str, begin: int, end: int, stamp: str | None) -> Any:  # noqa: ANN401
        condition = {} if stamp is None else {"IfMatch": f'"{stamp}"'}
        try:
            answer = self.call("get_object", Key=self.full(key), Range=f"bytes={begin}-{end - 1}", **condition)
        except ClientError as error:
            if status_of(error) != 412:
                raise
            raise Changed(f"{self.uri(key)} changed while it was read. Try again.") from error
        # Some stores mind no conditions.
        if stamp is not None and answer.get("ETag", stamp).strip('"') != stamp:
            answer["Body"].close()
            raise Changed(f"{self.uri(key)} changed while it was read. Try again.")
        return answer

    def put(self, key: str, data: bytes, *, only_if: str | None = None) -> None:
        condition = {} if only_if is None else {"IfMatch": f'"{only_if}"'} if only_if else {"IfNoneMatch": "*"}
        arguments = {"Key": self.full(key), "Body": data, **self.settings.write_arguments()}
        try:
            self.call("put_object", **arguments, **condition)
        except ClientError as error:
            if condition and status_of(error) in (404, 409, 412):
                raise Conflict(key) from error
            if not condition or status_of(error) != 501:
                raise
            # A store that knows no conditions and says so.
            self.call("put_object", **arguments)

    def send(self, key: str, path: Path, sha256: str, unfinished: list[Unfinished], on_bytes: OnBytes) -> ObjectInfo:
        from fastmtp.stores.sending import Sending

        self.learn()
        return Sending(self, key, path, sha256, on_bytes).run(unfinished)

    def copy(self, source: str, info: ObjectInfo, key: str, sha256: str) -> ObjectInfo | None:
        from fastmtp.stores.sending import COPY_LIMIT, copy_in_parts

        self.learn()
        bucket, _, full = source.removeprefix("s3://").partition("/")
        origin = {"CopySource": {"Bucket": bucket, "Key": full}, "CopySourceIfMatch": f'"{info.stamp}"'}
        try:
            if info.size > COPY_LIMIT:
                return copy_in_parts(self, origin, info, key, sha256)
            sums = {"ChecksumAlgorithm": "SHA256"} if self.checks_sums else {}
            self.call(
                "copy_object", Key=self.full(key), MetadataDirective="REPLACE", Metadata={"sha256": sha256},
                TaggingDirective="REPLACE", **origin, **sums, **self.settings.write_arguments(),
            )  # fmt: skip
        except ClientError as error:
            if status_of(error) not in _NO_COPY or "Expired" in code_of(error):
                raise
            return None
        return self.head(key)

    def proves(self, key: str, info: ObjectInfo, path: Path, sha256: str) -> bool | None:
        size = path.stat().st_size
        if info.size != size:
            return False
        part_size = self._part_size(key, info)
        if self.checks_sums and info.checksum:
            own = parts.composite(path, part_size) if "-" in info.stamp else parts.encoded(bytes.fromhex(sha256))
            if parts.undecorated(info.checksum) == own:
                return True
        # A stamp that is the file's MD5, in one piece or in equal parts, says that the bytes are the file's. Another
        # one says nothing: what an ETag is made of differs between stores and kinds of encryption.
        return True if parts.md5_stamp(path, info.stamp, part_size) == info.stamp else None

    def _part_size(self, key: str, info: ObjectInfo) -> int:
        """Bytes of the parts an object was sent in; its size where it was sent in one."""
        if "-" not in info.stamp:
            return info.size
        return int(self.call("head_object", Key=self.full(key), PartNumber=1)["ContentLength"])

    def objects(self, prefix: str = "") -> dict[str, ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        root = self.full(prefix) if prefix or not self.prefix else f"{self.prefix}/"
        pages = self.pages("list_objects_v2", Prefix=root)
        for item in (item for page in pages for item in page.get("Contents", ())):
            name = self._relative(item["Key"])
            if name and not name.endswith("/"):
                stamp = item.get("ETag", "").strip('"')
                found[name] = ObjectInfo(int(item["Size"]), stamp, item["LastModified"].timestamp())
        return found

    def folders(self) -> list[str]:
        root = f"{self.prefix}/" if self.prefix else ""
        pages = self.pages("list_objects_v2", Prefix=root, Delimiter="/")
        found = (item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ()))
        return sorted(name[len(root) :].rstrip("/") for name in found)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.call("delete_object", Key=self.full(key))

    def unfinished(self, prefix: str) -> list[Unfinished]:
        pages = self.pages("list_multipart_uploads", Prefix=self.full(prefix))
        try:
            uploads = [item for page in pages for item in page.get("Uploads", ())]
        except ClientError as error:
            # Not offered, not allowed; or, as rclone says it, none there.
            if status_of(error) in (403, 404, 405, 501):
                return []
            raise
        return [Unfinished(self._relative(item["Key"]), item["UploadId"]) for item in uploads]

    def abort(self, item: Unfinished) -> None:
        try:
            self.call("abort_multipart_upload", Key=self.full(item.key), UploadId=item.token)
        except ClientError as error:
            if status_of(error) != 404:
                raise

    def pages(self, operation: str, **arguments: Any) -> Iterable[dict[str, Any]]:  # noqa: ANN401
        """Every page of a call that answers in pages."""
        found: Iterable[dict[str, Any]] = self._client.get_paginator(operation).paginate(
            Bucket=self.bucket, **arguments
        )
        return found
