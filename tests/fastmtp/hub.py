"""A hub of our own: the routes that huggingface_hub asks of the real one, over HTTP, for one repository on disk.

Files are answered as the real hub does, by a redirect to another host with the file's facts in the headers; what that
host sends is counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Hub:
    """What is answered, and what was.

    Attributes:
        repository, root: the one repository there is, and its files.
        refusal: status and X-Error-Code of every answer, instead of what was asked for.
        cut: the other host sends only so many bytes of what it announced; short: it announces only so many.
        ranges: the other host knows ranges.
        sent: file -> bytes sent of it.
        seen: path of each request; tokens: Authorization headers that the other host saw.
    """

    root: Path
    repository: str = "org/model"
    url: str = ""
    refusal: tuple[int, str] | None = None
    cut: int | None = None
    short: int | None = None
    ranges: bool = True
    sent: Counter[str] = field(default_factory=Counter)
    seen: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())


@contextlib.contextmanager
def serve(root: Path) -> Iterator[Hub]:
    """Serve the checkpoint in `root` as `org/model` until the block is left."""
    hub = Hub(root)
    with listening(_Handler, hub):
        yield hub


@contextlib.contextmanager
def listening(kind: type[BaseHTTPRequestHandler], hub: Any) -> Iterator[None]:
    """Answer requests on a free port with handlers of a kind, which find `hub` as theirs; its `url` is set."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (kind,), {"hub": hub})) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, *_arguments: object) -> None:
        return

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.seen.append(f"{self.command} {path}")
        repository = re.escape(self.hub.repository)
        if self.hub.refusal:
            self._refuse(*self.hub.refusal)
        elif re.fullmatch(rf"/api/models/{repository}(/revision/(main|{COMMIT}))?", path):
            self._json({"id": self.hub.repository, "sha": COMMIT, "siblings": self._siblings()})
        elif re.fullmatch(rf"/api/models/{repository}/tree/{COMMIT}", path):
            self._json([{"type": "file", **one} for one in self._tree()])
        elif found := re.fullmatch(rf"/{repository}/resolve/{COMMIT}/(.+)", path):
            self._redirect(found[1])
        elif found := re.fullmatch(r"/cdn/(.+)", path):
            self._content(found[1], body=body)
        else:
            self._refuse(404, "RevisionNotFound" if f"/{self.hub.repository}/" in path else "RepoNotFound")

    def _siblings(self) -> list[dict[str, Any]]:
        return [
            {"rfilename": one["path"], "size": one["size"], "blobId": one["oid"]}
            | ({"lfs": {"sha256": one["lfs"]["oid"], "size": one["size"], "pointerSize": 130}} if "lfs" in one else {})
            for one in self._tree()
        ]

    def _tree(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in self.hub.files():
            name, size = path.relative_to(self.hub.root).as_posix(), path.stat().st_size
            found.append({"path": name, "size": size, "oid": hashlib.sha1(name.encode()).hexdigest()})
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                found[-1]["lfs"] = {"oid": digest, "size": size, "pointerSize": 130}
        return found

    def _redirect(self, name: str) -> None:
        path = self.hub.root / name
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        # Another host name, as the real hub's: what is meant for the hub alone must not go along.
        port = urlsplit(self.hub.url).port
        etag = next(one.get("lfs", one)["oid"] for one in self._tree() if one["path"] == name)
        self._head(302, 0, {
            "Location": f"http://localhost:{port}/cdn/{name}", "X-Repo-Commit": COMMIT, "ETag": f'"{etag}"',
            "X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(path.stat().st_size),
        })  # fmt: skip
        return None

    def _content(self, name: str, *, body: bool) -> None:
        self.hub.tokens += self.headers.get_all("Authorization") or []
        data = (self.hub.root / name).read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.hub.ranges else None
        if wanted:
            begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            end = end if self.hub.short is None else min(end, begin + self.hub.short)
            extra = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
            data = data[begin:end]
            self._head(206, len(data), extra)
        else:
            self._head(200, len(data), {})
        if body:
            data = data if self.hub.cut is None else data[: self.hub.cut]
            self.hub.sent[name] += len(data)
            # Who has enough leaves.
            with contextlib.suppress(ConnectionError):
                self.wfile.write(data)
            self.close_connection = self.hub.cut is not None or not wanted

    def _json(self, value: object) -> None:
        text = json.dumps(value).encode()
        self._head(200, len(text), {"Content-Type": "application/json"})
        self.wfile.write(text)

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, 0, {"X-Error-Code": code})

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
