"""Rows of a text file: one JSON value per line, a JSON array, or plain text; compressed with gzip or not.

A file is read as a stream, in flat memory, whatever its length.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from typing import cast

from fastmtp.data.sources.places import SourceFile
from fastmtp.errors import DataError

# Where it is, and the value; or the reason why it has none.
Row = tuple[int, object]
LONGEST = 64 << 20
_MARK = b"\xef\xbb\xbf"  # what some editors begin UTF-8 with
_BLOCK = 1 << 20
_BETWEEN = re.compile(r"[ \t\r\n,]*")


class Unread(str):
    """The reason why there is no value."""

    __slots__ = ()


def read_lines(file: SourceFile) -> Iterator[Row]:
    """(line number, value) of every line; of a JSON array (item number, value); an `Unread` where it does not parse.

    Raises:
        DataError: the file cannot be read, or its compression is broken.
    """
    with _explained(file.name), file.open() as raw, _plain(raw) as stream:
        if file.name.removesuffix(".gz").endswith(".txt"):
            yield from _texts(stream)
        elif _is_spread(stream.peek(_BLOCK)):
            yield from _values(stream, file.name)
        else:
            yield from _lines(stream)


def _plain(raw: io.BufferedReader) -> io.BufferedReader:
    """Without compression. Told by what the file begins with: some gateways name no suffix."""
    if raw.peek(2)[:2] != b"\x1f\x8b":
        return raw
    return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw)), _BLOCK)


def _is_spread(begin: bytes) -> bool:
    """Whether a file is one JSON array, or objects over several lines, rather than one value per line."""
    first, _, rest = begin.removeprefix(_MARK).lstrip().partition(b"\n")
    if first.strip() == b"{":
        return True
    if not first.startswith(b"["):
        return False
    if not rest.strip():
        return True
    try:
        json.loads(first)
    except ValueError:
        return True
    return False


def _lines(stream: io.BufferedReader) -> Iterator[Row]:
    loads = json.loads
    for number, line in _numbered(stream):
        if line is None:
            yield number, Unread("row too long")
            continue
        try:
            yield number, loads(line.decode())
        except UnicodeDecodeError:
            yield number, Unread("not UTF-8")
        except (ValueError, RecursionError):
            yield number, Unread("not JSON" if line.strip() else "blank line")


def _texts(stream: io.BufferedReader) -> Iterator[Row]:
    for number, line in _numbered(stream):
        if line is None:
            yield number, Unread("row too long")
            continue
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            yield number, Unread("not UTF-8")
            continue
        yield number, {"text": text} if text else Unread("blank line")


def _numbered(stream: io.BufferedReader) -> Iterator[tuple[int, bytes | None]]:
    """Lines from 1 on; None for one that is longer than a row may be."""
    number = 0
    while line := stream.readline(LONGEST):
        number += 1
        if number == 1:
            line = line.removeprefix(_MARK)
        if len(line) < LONGEST or line.endswith(b"\n"):
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(LONGEST)
        yield number, None


def _values(stream: io.BufferedReader, name: str) -> Iterator[Row]:
    """Items of an array, or values one after the other, however they are broken into lines.

    Raises:
        DataError: no JSON from some item on: what follows cannot be told apart.
    """
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, at, number, ended = "", 0, 0, False
    in_array: bool | None = None
    while True:
        between = _BETWEEN.match(text, at)
        assert between is not None
        at = between.end()
        if in_array is None and at < len(text):
            in_array = text[at] == "["
            at += in_array
            continue
        if text[at : at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if ended and at == len(text) and not in_array:
                return
            if ended or len(text) - at > LONGEST:
                what = f"{name}: item {number + 1} of the array is no JSON, or the file breaks off there."
                raise DataError(what, mend="Mend it, or write one JSON object per line.") from error
        else:
            number += 1
            yield number, value
            continue
        # Twice as much each time, as a value is tried again from its begin.
        data = stream.read(max(_BLOCK, len(text) - at))
        ended = not data
        text, at = text[at:] + utf8.decode(data, final=ended), 0


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise DataError(f"{name} cannot be read: {reason}.", mend="Name a whole and readable file.") from error
