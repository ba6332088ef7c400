"""A witness in every dispatcher: a thread that asks the database the time of day, and writes down when it was told.

A process that was killed, stopped or starved, or that did not reach the database, leaves gaps. One without them could
have beaten for its jobs, whatever its event loop was doing.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import psycopg

if TYPE_CHECKING:
    from pathlib import Path

INTERVAL = 0.2


def write_down_when_it_is_well(dsn: str, path: Path) -> None:
    """From now on, until the process ends."""
    file = path.open("a", buffering=1)

    def watch() -> None:
        pause = threading.Event()
        while not pause.wait(INTERVAL):
            with suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True, connect_timeout=2) as conn:
                while not pause.wait(INTERVAL):
                    conn.execute("select 1")
                    file.write(f"{time.monotonic():.3f}\n")

    threading.Thread(target=watch, name="chaos-alive", daemon=True).start()


def time_lost(times: list[float], since: float, until: float) -> float:
    """For how long, all in all, it was not seen to be well between two moments."""
    seen = [since, *(at for at in times if since < at < until), until]
    return sum(max(0.0, later - earlier - INTERVAL) for earlier, later in pairwise(seen))
