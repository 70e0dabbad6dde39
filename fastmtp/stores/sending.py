"""One file into one S3 object: in parts, side by side, going on where a killed run was, each part proved on arrival.

A part is proved by the checksum that the store checks, or by an ETag that is its MD5, and the object by the ETag that
follows from the parts'; where it has another, both its ends are read. What nothing proves is read back whole. Nothing
shows under the key before the last part is there.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.exceptions import ClientError

from fastmtp.errors import IntegrityError
from fastmtp.hashing import fill
from fastmtp.stores import parts
from fastmtp.stores.base import ObjectInfo, OnBytes, Unfinished, code_of, concerns_credentials, sha256_of, status_of

if TYPE_CHECKING:
    from fastmtp.stores.s3 import S3Store

COPY_LIMIT = 5 << 30  # of CopyObject
_COPY_PART = 512 << 20
_EDGE = 64 << 10
_TRIES = 3
_DAMAGED = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"}


class _Part(NamedTuple):
    """Bytes of a file, their MD5 in hex where it was asked for, and the checksum that goes with them."""

    data: bytearray
    md5: str | None
    checksum: dict[str, str]

    def is_like(self, there: dict[str, Any]) -> bool:
        """Whether a part that was sent before is this one. A CRC alone would not say so."""
        name = "ChecksumSHA256"
        if name in self.checksum and name in there:
            return bool(there[name] == self.checksum[name])
        return _bare(there) == self.md5


@dataclass
class Sending:
    """One file on its way to `key`."""

    store: S3Store
    key: str
    path: Path
    sha256: str
    on_bytes: OnBytes

    def __post_init__(self) -> None:
        self.before = self.path.stat()
        self.size = self.before.st_size
        self._mine = threading.local()
        self.part_size = self.store.settings.part_size_for(self.key, self.size)
        self.place = {"Key": self.store.full(self.key)}
        self.about = {"Metadata": {"sha256": self.sha256}, **self.store.settings.write_arguments()}
        # The object's ETag, where those of the parts prove them and the store makes it as S3 does.
        self.stamp = ""

    def run(self, unfinished: list[Unfinished]) -> ObjectInfo:
        """Send what is not there yet. Raises IntegrityError where the store has other bytes than the file."""
        if self.size <= self.part_size:
            for item in unfinished:
                self.store.abort(item)
            self._whole()
        else:
            self._in_parts(unfinished)
        after = self.path.stat()
        if (after.st_size, after.st_mtime_ns) != (self.size, self.before.st_mtime_ns):
            raise IntegrityError(f"{self.path} changed while it was sent.")
        return self._arrived()

    def _whole(self) -> None:
        part = self._read(0, self.size)
        self.stamp = _bare(self._until_whole("put_object", part, **self.about))

    def _in_parts(self, unfinished: list[Unfinished]) -> None:
        upload, there = self._adopt(unfinished)
        try:
            self._all_parts(upload, there, self.store.named_checksum)
        except (ClientError, IntegrityError) as error:
            # An upload that cannot be gone on with: begun under other settings, with a part that arrived damaged in a
            # store that takes no part twice, or in one that wants the checksum it was told of. Once more, from the
            # start, and with no checksum named that is not sent.
            may_be = upload is not None or self.store.named_checksum != self.store.part_checksum
            gone = isinstance(error, IntegrityError) or (may_be and status_of(error) in (400, 404, 501))
            if not gone or concerns_credentials(error):
                raise
            self._all_parts(None, {}, self.store.part_checksum)

    def _all_parts(self, upload: str | None, there: dict[int, dict[str, Any]], named: str | None) -> None:
        """Bring every part there, in this upload or in a new one that names a checksum, and put them together."""
        if upload is None:
            algorithm = {"ChecksumAlgorithm": named.removeprefix("Checksum")} if named else {}
            made = self.store.call("create_multipart_upload", **self.place, **self.about, **algorithm)
            upload = str(made["UploadId"])
        numbers = range(1, -(-self.size // self.part_size) + 1)
        try:
            done = in_threads(
                lambda number: self._part(upload, number, there.get(number)), numbers, self.store.settings.workers
            )
            if self.store.etags_are_md5:
                self.stamp = parts.joined_md5([bytes.fromhex(_bare(part)) for part in done])
            self._complete(upload, done)
        except (ClientError, IntegrityError) as error:
            if isinstance(error, IntegrityError) or (
                status_of(error) in (400, 501) and not concerns_credentials(error)
            ):
                self.store.abort(Unfinished(self.key, upload))
            raise

    def _complete(self, upload: str, done: list[dict[str, Any]]) -> None:
        try:
            self.store.call("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": done}, **self.place)
        except ClientError as error:
            # An answer that was lost on the way is asked for again, of an upload that is complete by then.
            if code_of(error) != "NoSuchUpload" or self.store.head(self.key) is None:
                raise

    def _adopt(self, unfinished: list[Unfinished]) -> tuple[str | None, dict[int, dict[str, Any]]]:
        """The upload of a killed run with most of its parts there; others of this key are aborted."""
        found: list[tuple[Unfinished, dict[int, dict[str, Any]]]] = []
        for item in unfinished:
            with contextlib.suppress(ClientError):
                pages = self.store.pages("list_parts", UploadId=item.token, **self.place)
                there = {part["PartNumber"]: part for page in pages for part in page.get("Parts", ())}
                found.append((item, there))
        best = max(found, key=lambda one: len(one[1]), default=None)
        for item in unfinished:
            if best is None or item != best[0]:
                self.store.abort(item)
        return (best[0].token, best[1]) if best else (None, {})

    def _part(self, upload: str, number: int, there: dict[str, Any] | None) -> dict[str, Any]:
        begin = (number - 1) * self.part_size
        part = self._read(begin, min(self.part_size, self.size - begin), compared=there is not None)
        if there and there["Size"] == len(part.data) and part.is_like(there):
            self.on_bytes(len(part.data))
            return {"PartNumber": number, "ETag": there["ETag"], **part.checksum}
        answer = self._until_whole("upload_part", part, UploadId=upload, PartNumber=number)
        return {"PartNumber": number, "ETag": answer["ETag"], **part.checksum}

    def _read(self, begin: int, size: int, *, compared: bool = False) -> _Part:
        """Bytes of the file with the digests that are sent, or that an ETag is compared with."""
        data, name = self._buffer(size), self.store.part_checksum
        md5 = parts.new_md5() if self.store.etags_are_md5 or compared else None
        digest = parts.ALGORITHMS[name]() if name else None
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin)
            if fill(file, data, *(one for one in (md5, digest) if one)) != size:
                raise IntegrityError(f"{self.path} changed while it was sent.")
        checksum = {name: parts.encoded(digest.digest())} if name and digest else {}
        return _Part(data, md5.hexdigest() if md5 else None, checksum)

    def _buffer(self, size: int) -> bytearray:
        """Memory for one part, the thread's own and used again: to take and return as much each time costs time.

        A bytearray is sent as it is, where the standard library would first copy bytes behind the request's headers.
        """
        if size != self.part_size:
            return bytearray(size)
        if getattr(self._mine, "buffer", None) is None:
            self._mine.buffer = bytearray(size)
        found: bytearray = self._mine.buffer
        return found

    def _until_whole(self, operation: str, part: _Part, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Send a part, again where it arrived as something else. Raises IntegrityError where it always does."""
        for _ in range(_TRIES):
            try:
                answer: dict[str, Any] = self.store.call(
                    operation, Body=self.store.pace.body(part.data), **part.checksum, **arguments, **self.place
                )
            except ClientError as error:
                if code_of(error) not in _DAMAGED and status_of(error) != 501:
                    raise
                continue
            if not self.store.etags_are_md5 or _bare(answer) == part.md5:
                self.on_bytes(len(part.data))
                return answer
        raise self._differs()

    def _arrived(self) -> ObjectInfo:
        """What the store has now, which must be the file."""
        info = self.store.head(self.key)
        if info is None or info.size != self.size:
            raise self._differs()
        if not self.store.checks_sums:
            if not self.store.etags_are_md5:
                if sha256_of(self.store, self.key, info) != self.sha256:
                    raise self._differs()
            elif info.stamp != self.stamp and not self._edges_match():
                raise self._differs()
        return info

    def _edges_match(self) -> bool:
        """Both ends read back: what a store frames or strips shows there, whatever it says of the parts."""
        with self.path.open("rb") as file:
            for begin in {0, max(self.size - _EDGE, 0)}:
                file.seek(begin)
                data = file.read(_EDGE)
                if data and self.store.read(self.key, begin, begin + len(data)) != data:
                    return False
        return True

    def _differs(self) -> IntegrityError:
        return IntegrityError(f"{self.store.uri(self.key)}: remote bytes differ from {self.path}.")


def copy_in_parts(store: S3Store, origin: dict[str, Any], info: ObjectInfo, key: str, sha256: str) -> ObjectInfo | None:
    """Copy an object too large for one call. None where the store does not answer as it should."""
    place, about = {"Key": store.full(key)}, {"Metadata": {"sha256": sha256}, **store.settings.write_arguments()}
    algorithm = {"ChecksumAlgorithm": "SHA256"} if store.checks_sums else {}
    upload = store.call("create_multipart_upload", **place, **about, **algorithm)["UploadId"]

    def part(number: int) -> dict[str, Any]:
        begin = (number - 1) * _COPY_PART
        answer = store.call(
            "upload_part_copy", UploadId=upload, PartNumber=number,
            CopySourceRange=f"bytes={begin}-{min(begin + _COPY_PART, info.size) - 1}", **place, **origin,
        )["CopyPartResult"]  # fmt: skip
        kept = {name: answer[name] for name in ("ETag", "ChecksumSHA256") if answer.get(name)}
        return {"PartNumber": number, **kept}

    try:
        done = in_threads(part, range(1, -(-info.size // _COPY_PART) + 1), store.settings.workers)
        if not all("ETag" in item for item in done):
            store.abort(Unfinished(key, upload))
            return None
        store.call("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": done}, **place)
    except BaseException:
        with contextlib.suppress(Exception):
            store.abort(Unfinished(key, upload))
        raise
    return store.head(key)


def _bare(answer: dict[str, Any]) -> str:
    """The ETag of an answer, without its quotes."""
    return str(answer["ETag"]).strip('"')


def in_threads(call: Any, numbers: range, workers: int) -> list[dict[str, Any]]:  # noqa: ANN401
    """Results of `call` for each number, in order. The first failure ends what has not begun, and is raised."""
    pool = ThreadPoolExecutor(min(workers, max(len(numbers), 1)))
    try:
        futures = [pool.submit(call, number) for number in numbers]
        return [future.result() for future in futures]
    finally:
        pool.shutdown(cancel_futures=True)
