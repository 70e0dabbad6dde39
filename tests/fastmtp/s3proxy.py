"""A proxy in front of a real S3 endpoint that counts what is sent, and goes wrong where a test wants it to.

Requests pass unchanged, `Host` included, so that signatures hold. A fault looks at each request before it is passed on
and says what happens instead.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, urlsplit

Fault = Literal["pass", "slow down", "drop", "spoil", "expired", "frame", "drop answer", "misread"]


@dataclass(frozen=True)
class Request:
    """What a fault decides by. `part` is the part's number in an upload of parts."""

    method: str
    key: str
    part: int | None
    query: dict[str, list[str]]
    copies: bool


@dataclass
class Proxy:
    """What passed, and what is to go wrong.

    Attributes:
        name: what is behind it.
        fault: what happens to a request; called from several threads.
        checks: refuse bodies that do not have the checksum that their header states, as Amazon's S3 does.
        sent: key -> bytes of bodies that arrived there whole and well.
        requests: everything that was asked for.
    """

    url: str
    name: str = ""
    fault: Callable[[Request], Fault] = lambda _request: "pass"
    checks: bool = False
    sent: Counter[str] = field(default_factory=Counter)
    requests: list[Request] = field(default_factory=list)
    active: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self) -> None:
        """Return when nothing is under way."""
        while self.active:
            time.sleep(0.01)


@contextlib.contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """Stand in front of the endpoint at `upstream` until the block is left."""
    found = Proxy("")

    class Handler(_Handler):
        state = found
        address = urlsplit(upstream).netloc

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        found.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes, which would otherwise wait 40 ms for each other.
    disable_nagle_algorithm = True
    state: Proxy
    address: str

    def log_message(self, *_args: object) -> None:
        pass

    def handle(self) -> None:
        # A client that is killed is what is being tested.
        with contextlib.suppress(OSError):
            super().handle()

    def _any(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        if len(body) < size:
            return
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        number = int(query["partNumber"][0]) if "partNumber" in query else None
        request = Request(self.command, parts.path.lstrip("/"), number, query, "x-amz-copy-source" in self.headers)
        with self.state.lock:
            self.state.active += 1
            self.state.requests.append(request)
        try:
            self._answer(request, body, self.state.fault(request))
        finally:
            with self.state.lock:
                self.state.active -= 1

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any  # noqa: N815

    def _answer(self, request: Request, body: bytes, fault: Fault) -> None:
        if fault == "slow down":
            return self._refuse(503, "SlowDown")
        if fault == "expired":
            return self._refuse(400, "ExpiredToken")
        if fault == "drop":
            return self._hang_up()
        if fault == "spoil" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        if self.state.checks and not self._as_stated(body):
            return self._refuse(400, "BadDigest")
        if fault == "frame":
            body = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
        self._pass_on(request, body, fault)

    def _pass_on(self, request: Request, body: bytes, fault: Fault) -> None:
        upstream = http.client.HTTPConnection(self.address, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OURS}
            upstream.request(self.command, self.path, body or None, {**headers, "Content-Length": str(len(body))})
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if request.method == "PUT" and answer.status == 200 and not request.copies and fault != "spoil":
            with self.state.lock:
                self.state.sent[request.key] += len(body)
        if fault == "drop answer":
            return self._hang_up()
        if fault == "misread":
            data = bytes([data[0] ^ 1]) + data[1:]
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OURS | {"content-length"}:
                self.send_header(name, value)
        self.send_header("Content-Length", answer.getheader("Content-Length", "0") if not data else str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _as_stated(self, body: bytes) -> bool:
        stated = self.headers.get("x-amz-checksum-sha256")
        return stated is None or base64.b64encode(hashlib.sha256(body).digest()).decode() == stated

    def _refuse(self, status: int, code: str) -> None:
        data = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data if self.command != "HEAD" else b"")

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


# Between each two of the three, not from end to end.
_OURS = {"connection", "expect", "transfer-encoding", "keep-alive"}
