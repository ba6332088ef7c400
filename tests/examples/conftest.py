"""Runs the examples as their READMEs say: in their own folder, as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.command import Command, running

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass
class Example:
    """One folder of examples/, on a database of the test's own."""

    folder: Path
    dsn: str
    environment: dict[str, str] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def python(self, *arguments: str) -> str:
        """Runs Python with these arguments to its end; what it printed."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "PULSE_OUTBOX_DSN": self.dsn,
                "PYTHONDONTWRITEBYTECODE": "1",
                **self.environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def burst(self, target: str) -> str:
        """Runs the dispatcher until nothing is due; what was printed and logged."""
        return self.python("-m", "pulse_outbox.cli", "run", target, "--burst")

    def dispatcher(self, target: str, *options: str) -> Command:
        """A dispatcher that goes on until the end of the test."""
        command = running(self.folder, target, *options, dsn=self.dsn, stderr=None, **self.environment)
        return self._open.enter_context(command)

    def process(self, *arguments: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        """Some other process that goes on until the end of the test."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env={**os.environ, "PULSE_OUTBOX_DSN": self.dsn, **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=pass_fds,
        )

        def end() -> None:
            process.terminate()
            process.wait(20)

        self._open.callback(end)
        return process

    def module(self, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """One of its modules, in this process."""
        monkeypatch.syspath_prepend(str(self.folder))
        monkeypatch.setenv("PULSE_OUTBOX_DSN", self.dsn)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return import_module(name)


@pytest.fixture
def example(dsn: str) -> Iterator[Callable[[str], Example]]:
    with ExitStack() as stack:

        def find(name: str, **environment: str) -> Example:
            found = Example(EXAMPLES / name, dsn, environment)
            stack.callback(found._open.close)
            return found

        yield find


@dataclass
class Receiver:
    """An HTTP server on this machine that answers as it is told, and remembers what it was sent."""

    url: str = ""
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Status and headers of the next answers; then 200."""
    received: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.received.append((self.path, dict(self.headers), body))
            status, headers = receiver.answers.pop(0) if receiver.answers else (200, {})
            self.send_response(status)
            for name, value in {**headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not to standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield receiver
        server.shutdown()
        thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver
