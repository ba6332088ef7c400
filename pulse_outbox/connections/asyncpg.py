"""Connections of asyncpg, also as its pool lends them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg

from pulse_outbox.connections import Ask, Copy, Row, State, Unfit


def find_route(connection: object) -> AsyncpgRoute | None:
    if isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        return AsyncpgRoute(connection)
    if isinstance(connection, asyncpg.Pool | asyncpg.pool.PoolAcquireContext):
        raise Unfit("this is a pool: pass a connection of it (`async with pool.acquire() as conn:`)")
    if isinstance(connection, asyncpg.transaction.Transaction):
        raise Unfit("this is a transaction: pass its connection")
    return None


class AsyncpgRoute:
    """An asyncpg Connection."""

    __slots__ = ("_connection",)
    is_async = True
    call = None
    begin = "use `async with conn.transaction():`"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def state(self) -> State:
        try:
            if self._connection.is_closed():
                return State.CLOSED
        except asyncpg.InterfaceError:
            return State.CLOSED  # given back to its pool
        # A failed transaction counts as one; the next statement tells.
        return State.OPEN if self._connection.is_in_transaction() else State.OUTSIDE

    async def ask(self, ask: Ask) -> list[Row]:
        if not ask.has_rows:
            await self._connection.execute(ask.text)  # in one step: cancelled, it is done or not
            return []
        return [tuple(row) for row in await self._connection.fetch(ask.text, *ask.parameters)]

    def copies(self) -> bool:
        return True

    async def copy(self, copy: Copy) -> None:
        await self._connection.copy_to_table(
            copy.table,
            schema_name=copy.schema,
            columns=copy.columns,
            source=_asynchronous(copy.parts),
            format="binary",
        )


async def _asynchronous(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
