"""A Sentry of the test's own: takes what the real client posts, and can be slow, busy, broken, rude or away."""

from __future__ import annotations

import gzip
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from tests.support.waiting import wait_until


class Request(NamedTuple):
    """One envelope as it came, with what was answered (None: nothing)."""

    at: float
    status: int | None
    text: str
    items: list[tuple[dict[str, Any], Any]]

    @property
    def event(self) -> dict[str, Any]:
        [event] = [payload for header, payload in self.items if header["type"] == "event"]
        assert isinstance(event, dict)
        return event


class Receiver:
    """Answers with `status` and `headers`, after `answering` is set; or hangs up instead."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.hangs_up = False
        self.answering = threading.Event()
        self.answering.set()
        self._server: _Server | None = None
        self._port = 0
        self.up()

    @property
    def dsn(self) -> str:
        return f"http://public@127.0.0.1:{self._port}/1"

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events that were accepted, in order."""
        return [
            request.event
            for request in list(self.requests)
            if request.status is not None and 200 <= request.status < 300
        ]

    @property
    def text(self) -> str:
        """All that ever came over the wire."""
        return "\n".join(request.text for request in self.requests)

    def wait_for(self, count: int = 1, *, within: float = 15) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.events) >= count, within=within, what=f"{count} events at Sentry")
        return self.events

    def up(self) -> None:
        """Listens, at the port that it had before."""
        server = _Server(("127.0.0.1", self._port), self)
        self._port = server.server_address[1]
        self._server = server
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def down(self) -> None:
        """Nobody listens any more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _took(self, text: str) -> int | None:
        lines = text.split("\n")
        items = [
            (json.loads(header), json.loads(payload))
            for header, payload in zip(lines[1::2], lines[2::2], strict=False)
            if header
        ]
        at = time.monotonic()
        status = None if self.hangs_up else self.status
        if not self.answering.is_set():
            self.requests.append(Request(at, None, text, items))
            self.answering.wait(30)
            return status
        self.requests.append(Request(at, status, text, items))
        return status


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], receiver: Receiver) -> None:
        self.receiver = receiver
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed, or did not wait: nothing to say."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        receiver = self.server.receiver
        status = receiver._took(body.decode())
        if status is None:
            return  # hangs up without a word
        answer = b'{"id": "x"}'
        self.send_response(status)
        for name, value in receiver.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        """Tests have no use for an access log."""


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver that listens while the context is open."""
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.answering.set()
        receiver.down()
