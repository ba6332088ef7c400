"""One server for all of xdist's workers: the controller starts it when the first of them asks, and ends it last."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pulse_outbox.errors import OutboxError

if TYPE_CHECKING:
    from pulse_outbox.testing.databases import Databases

ASK_DEADLINE = 120.0


def open_desk(schema: str) -> Desk | None:
    """None where there can't be one: no unix sockets, or a temporary folder with too long a path for them.

    Each worker has a server of its own then.
    """
    if not hasattr(socket, "AF_UNIX"):
        return None
    folder = Path(tempfile.mkdtemp(prefix="pulse-"))
    try:
        return Desk(folder, schema)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return None


class Desk:
    """Where workers ask: a unix socket in a private folder, answered by a thread of the controller."""

    def __init__(self, folder: Path, schema: str) -> None:
        self._folder = folder
        self.address = str(self._folder / "s")
        self._schema = schema
        self._serving = ExitStack()
        self._answer: str | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(self.address)
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="pulse-outbox-testserver", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            caller, _ = self._socket.accept()
            with caller:
                if caller.recv(1) == b"e":
                    return
                caller.sendall(self._answered().encode())

    def _answered(self) -> str:
        if self._answer is None:
            # Not before somebody asks: a run that needs no database must not pay for psycopg.
            from pulse_outbox.testing.databases import serving

            try:
                databases = self._serving.enter_context(serving(schema=self._schema))
                self._answer = f"{databases.prefix} {databases.server_dsn}"
            except Exception as error:
                self._answer = f"! {error}"  # the same for every worker
        return self._answer

    def close(self) -> None:
        """Ends the server, if anybody has asked for it."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(self.address)
            asking.sendall(b"e")
        self._thread.join()
        self._socket.close()
        self._serving.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def joining(address: str, schema: str) -> Iterator[Databases]:
    """The databases of the controller whose desk is there."""
    from pulse_outbox.testing.databases import Databases

    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ASK_DEADLINE)
        asking.connect(address)
        asking.sendall(b"?")
        answer = b"".join(iter(lambda: asking.recv(4096), b"")).decode()
    prefix, _, server_dsn = answer.partition(" ")
    if prefix in ("", "!"):
        raise OutboxError(server_dsn or "pytest's controller could not start a test server")
    yield Databases(server_dsn, prefix, schema=schema)


def is_here(address: str | None) -> bool:
    """Whether the desk is on this machine: xdist's workers may be elsewhere."""
    return address is not None and os.path.exists(address)
