"""Run as a program: a Sentry that takes what the real client posts, and can be slow, busy, broken or away.

It prints the port that it listens on. Orders come on standard input as lines of JSON: {"status": 200}, {"slow": 2},
{"down": true}. What it accepts is in its journal before the answer goes out.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from chaos.journal import Journal


class Receiver(ThreadingHTTPServer):
    """Answers with `status`, after `slow` seconds; or hangs up while it is down."""

    daemon_threads = True

    def __init__(self, journal: Journal) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.journal = journal
        self.status = 200
        self.slow = 0.0
        self.down = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed, or did not wait: nothing to say."""


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        """One envelope."""
        receiver = self.server
        if receiver.down:
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        text = body.decode()
        status = receiver.status
        lines = text.split("\n")
        for header, payload in zip(lines[1::2], lines[2::2], strict=False):
            if header and json.loads(header)["type"] == "event":
                letter = json.loads(payload)["contexts"].get("dead_letter")
                if letter is None:
                    receiver.journal.write("stray", body=text)
                    continue
                receiver.journal.write(
                    "alert",
                    alert=json.loads(payload)["event_id"],
                    event=letter["event_id"],
                    count=letter["count"],
                    status=status,
                    body=text,
                )
        if receiver.slow:
            time.sleep(receiver.slow)
        self.send_response(status)
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: Any) -> None:
        """Nobody reads an access log."""


def main(directory: str) -> None:
    receiver = Receiver(Journal(Path(directory) / "sentry.jsonl"))
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    print(receiver.server_address[1], flush=True)
    for line in sys.stdin:
        for name, value in json.loads(line).items():
            setattr(receiver, name, value)


if __name__ == "__main__":
    main(*sys.argv[1:])
