"""Between a client and a server of HTTP on loopback: what a network and a busy store do to requests."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

BUSY = "busy"
"""The store answers 503 and does nothing."""
CONFLICT = "conflict"
"""The store answers 409 and does nothing, as S3 does to both of two conditional puts at once."""
CUT = "cut"
"""The connection ends in the middle of the request's body; the store sees nothing whole."""
LOST = "lost"
"""The store does what is asked, and its answer never arrives."""
REFUSED = "refused"
"""The store does not let the request in, and repeats in its answer how it was signed."""
SLOW = "slow"
"""The answer comes after ``SLOW_SECONDS``."""

SLOW_SECONDS = 1.5


class Passed(NamedTuple):
    """A request that was passed on, and the bytes of its body and of the answer's."""

    method: str
    path: str
    sent: int
    received: int


_LISTED = re.compile(rb"<Contents>.*?<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)


class FaultyProxy:
    """Does ``plan`` to the next requests of ``method`` with ``of`` in their path, one each, then passes
    everything on.

    delta-rs holds Python's lock while it waits, so a process that has the proxy may not call it.
    """

    def __init__(self, behind: int) -> None:
        self.plan: deque[str] = deque()
        self.method, self.of = "PUT", ""
        self.requests: list[str] = []
        """Method of each, and how many bytes it brought."""
        self.passed: list[Passed] = []
        self.unlisted: set[bytes] = set()
        """Ends of keys that lists leave out, as those of a store that has not heard of them everywhere."""
        self.ignored: set[str] = set()
        """Headers of requests, in lower case, that the store knows nothing of."""
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                proxy._handle(self, behind)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler, behind: int) -> None:
        size = int(request.headers.get("Content-Length") or 0)
        with self._lock:
            self.requests.append(f"{request.command} {size}")
            hit = request.command == self.method and self.of in request.path
            fault = self.plan.popleft() if self.plan and hit else None
        if fault == CUT:
            request.rfile.read(size // 2)
            request.close_connection = True
            return
        body = request.rfile.read(size)
        if fault in (BUSY, CONFLICT):
            request.send_response(503 if fault == BUSY else 409)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if fault == REFUSED:
            told = f"<Error><Code>SignatureDoesNotMatch</Code><Of>{request.headers}</Of></Error>".encode()
            request.send_response(403)
            request.send_header("Content-Length", str(len(told)))
            request.end_headers()
            request.wfile.write(told)
            return
        if fault == SLOW:
            time.sleep(SLOW_SECONDS)
        client = http.client.HTTPConnection("127.0.0.1", behind, timeout=30)
        unsaid = {"connection", *self.ignored}
        headers = {name: value for name, value in request.headers.items() if name.lower() not in unsaid}
        client.request(request.command, request.path, body, headers)
        answer = client.getresponse()
        content = answer.read()
        client.close()
        with self._lock:
            self.passed.append(Passed(request.command, request.path, size, len(content)))
        if request.command == "GET" and "list-type=2" in request.path:
            content = _LISTED.sub(self._unless_unlisted, content)
        if fault == LOST:
            request.close_connection = True
            return
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                request.send_header(name, value)
        length = answer.getheader("Content-Length") if request.command == "HEAD" else str(len(content))
        request.send_header("Content-Length", length or "0")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def _unless_unlisted(self, listed: re.Match[bytes]) -> bytes:
        return b"" if listed[1].endswith(tuple(self.unlisted)) else listed[0]


@contextmanager
def faulty_proxy(behind: int) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(behind)
    try:
        yield proxy
    finally:
        proxy.close()
