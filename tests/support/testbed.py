"""The run's server and its databases are the test kit's; here is what only a test run of our own needs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pulse_outbox.testing.databases import Databases, serving

Testbed = Databases
BINARIES = "PULSE_OUTBOX_POSTGRES_BIN"


def choose_server() -> None:
    """PULSE_OUTBOX_DSN names the run's server; nothing else of the developer's shell changes what is tested."""
    given = os.environ.get("PULSE_OUTBOX_DSN")
    for name in [name for name in os.environ if name.startswith("PULSE_OUTBOX_") and name != BINARIES]:
        del os.environ[name]
    if given:
        os.environ["PULSE_OUTBOX_TEST_DSN"] = given
        return
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]


@contextmanager
def running() -> Iterator[Databases]:
    """The same outside pytest."""
    choose_server()
    with serving() as databases:
        yield databases


def die_with_parent() -> None:
    """End this process soon after the one that started it: nobody reads a worker's results then."""
    parent = os.getppid()

    def watch() -> None:
        while not over.wait(0.5):
            if os.getppid() != parent:
                os._exit(1)

    over = threading.Event()
    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()
