"""A dispatcher in the test's own event loop, with short times, and a look at the rows that it works on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import namedtuple_row

from pulse_outbox import Dispatcher, Outbox
from pulse_outbox.events import NewEvent
from tests.support.waiting import wait_until_async

QUICK: dict[str, Any] = {"lease": 1.5, "heartbeat": 0.5, "watchdog": 0.5, "poll": 0.5, "grace": 5}
"""Times that are short enough for a test, in the same proportions as the defaults."""


@asynccontextmanager
async def dispatching(outbox: Outbox, dsn: str, **settings: Any) -> AsyncIterator[Dispatcher]:
    """A dispatcher that runs while the context is open, and is then stopped and waited for."""
    dispatcher = Dispatcher(outbox, dsn=dsn, **{**QUICK, **settings})
    task = asyncio.create_task(dispatcher.run_async())
    try:
        yield dispatcher
    finally:
        dispatcher.stop()
        async with asyncio.timeout(40):
            await task


async def drain(outbox: Outbox, dsn: str, *, within: float = 20, **settings: Any) -> None:
    """Runs a dispatcher until nothing is due or running."""
    async with asyncio.timeout(within):
        await Dispatcher(outbox, dsn=dsn, **{**QUICK, "burst": True, **settings}).run_async()


class Table:
    """The outbox as an operator sees it; connects again when the server was gone."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._conn: psycopg.AsyncConnection[Any] | None = None

    async def execute(self, query: str, *parameters: object) -> list[Any]:
        if self._conn is None or self._conn.closed:
            self._conn = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
        cursor = self._conn.cursor(row_factory=namedtuple_row)
        await cursor.execute(sql.SQL(query), parameters or None)
        return await cursor.fetchall() if cursor.description else []

    async def close(self) -> None:
        if self._conn is not None:
            await self._conn.close()

    async def enqueue(self, outbox: Outbox, topic: str, payload: object = None, **options: Any) -> UUID:
        """One event, committed."""
        await self.execute("select 1")
        assert self._conn is not None
        return await outbox.enqueue_async(
            self._conn, topic, payload or {}, outside_transaction=True, **options
        )

    async def enqueue_many(self, outbox: Outbox, events: Iterable[NewEvent]) -> list[UUID]:
        await self.execute("select 1")
        assert self._conn is not None
        async with self._conn.transaction():
            return await outbox.enqueue_many_async(self._conn, events)

    async def row(self, event_id: UUID) -> Any:
        [row] = await self.execute("select * from pulse.outbox where event_id = %s", event_id)
        return row

    async def count(self, condition: str = "true", *parameters: object) -> int:
        [(number,)] = await self.execute(f"select count(*) from pulse.outbox where {condition}", *parameters)
        return int(number)

    async def until(self, condition: str, number: int, *, within: float = 10) -> None:
        """Waits until so many rows fulfil the condition."""

        async def reached() -> bool:
            return await self.count(condition) == number

        try:
            await wait_until_async(reached, within=within)
        except AssertionError:
            rows = await self.execute(
                "select topic, status, attempts, lapses, last_error, count(*) from pulse.outbox group by 1, 2, 3, 4, 5"
            )
            raise AssertionError(f"not {number} rows with {condition} within {within} s: {rows}") from None

    async def until_status(self, event_id: UUID, status: str, *, within: float = 10) -> Any:
        await self.until(f"event_id = '{event_id}' and status = '{status}'", 1, within=within)
        return await self.row(event_id)
