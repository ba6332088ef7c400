"""Flushes: in a backlog a claim does not wait for the disk. What it took does, while the next claim is made."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pulse_outbox.store import Flush, Store

PAUSE = 1.0
"""Between two attempts to have flushes that work, in seconds."""


class Flushes:
    """Has flushes ready, on a connection of its own. Where there are none, claims wait for the disk themselves."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._works = False
        """The last flush succeeded."""
        self._missed = asyncio.Event()

    def ready(self, claims: Store) -> Flush | None:
        """One that is good for a claim which is sent after this, to the same server."""
        flush = self._store.flush() if self._works and self._store.server == claims.server else None
        if flush is None:
            self.failed()
        return flush

    def failed(self) -> None:
        """None is given out before one has succeeded again: what it was for is given back, and is due at once."""
        self._works = False
        self._missed.set()

    async def run(self) -> None:
        """Makes the connection, and again when it was missed. Behind a pooler it never is good enough."""
        while True:
            await self._missed.wait()
            await self._store.flush_now()
            self._works = True
            self._missed.clear()
            await asyncio.sleep(PAUSE)
