"""Deadlines for connections that threads wait for: a server that does not answer in time is cut off.

One thread watches all of them; a `threading.Timer` would be a thread for each, and each job has three.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from pulse_outbox.link import shut_down

if TYPE_CHECKING:
    import psycopg

TICK = 0.1
"""How late a connection may be cut off, in seconds."""


class Deadlines:
    """What is waited for now. Its thread lives as long as there is something to watch, and little longer."""

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # In a forked child there is no thread, and one of the parent's may have held the lock.
        self._numbers = itertools.count()
        self._watched: dict[int, tuple[float, psycopg.Connection[Any]]] = {}
        self._lock = threading.Lock()
        self._is_watching = False

    def start(self, conn: psycopg.Connection[Any], seconds: float) -> int:
        """Cuts the connection off after so long, unless `stop` is told this number before."""
        with self._lock:
            if not self._is_watching:
                threading.Thread(target=self._watch, name="pulse-outbox-deadlines", daemon=True).start()
                self._is_watching = True
            number = next(self._numbers)
            self._watched[number] = (time.monotonic() + seconds, conn)
        return number

    def stop(self, number: int) -> None:
        """It has answered, or was cut off; after this it won't be."""
        with self._lock:
            self._watched.pop(number, None)

    def _watch(self) -> None:
        while True:
            time.sleep(TICK)
            with self._lock:
                if not self._watched:
                    self._is_watching = False
                    return
                now = time.monotonic()
                late = [number for number, (at, _) in self._watched.items() if at <= now]
                for number in late:
                    shut_down(self._watched.pop(number)[1])
