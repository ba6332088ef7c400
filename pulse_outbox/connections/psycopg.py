"""Connections of psycopg 3, synchronous and asynchronous."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from pulse_outbox.connections import Ask, Copy, Row, State, Unfit

_STATES = {
    TransactionStatus.INTRANS: State.OPEN,
    TransactionStatus.INERROR: State.FAILED,
    TransactionStatus.ACTIVE: State.BUSY,
    TransactionStatus.UNKNOWN: State.CLOSED,
}


def find_route(connection: object) -> PsycopgRoute | AsyncPsycopgRoute | None:
    if isinstance(connection, psycopg.Connection):
        return PsycopgRoute(connection)
    if isinstance(connection, psycopg.AsyncConnection):
        return AsyncPsycopgRoute(connection)
    if isinstance(connection, psycopg.Transaction | psycopg.AsyncTransaction):
        raise Unfit("this is a transaction: pass its connection")
    if borrow := getattr(connection, "getconn", None):
        context = "async with" if inspect.iscoroutinefunction(borrow) else "with"
        raise Unfit(f"this is a pool: pass a connection of it (`{context} pool.connection() as conn:`)")
    return None


class PsycopgRoute:
    """A psycopg Connection."""

    __slots__ = ("_connection",)
    is_async = False
    begin = "use `with conn.transaction():`"

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def state(self) -> State:
        if self._connection.pgconn.pipeline_status != PipelineStatus.OFF:
            with self._connection.pipeline():
                pass  # leaving the inner one waits for what was sent: until then the connection looks busy
        return _state(self._connection)

    def call(self, statement: bytes, values: Sequence[object]) -> Row:
        # A cursor of its own: the application may have given the connection another cursor or row factory.
        cursor = psycopg.RawCursor(self._connection, row_factory=tuple_row)
        return cursor.execute(statement, values).fetchone() or ()

    def ask(self, ask: Ask) -> list[Row]:
        cursor = psycopg.RawCursor(self._connection, row_factory=tuple_row)
        return cursor.execute(ask.text.encode(), ask.parameters).fetchall()

    def copies(self) -> bool:
        return _copies(self._connection)

    def copy(self, copy: Copy) -> None:
        cursor = psycopg.Cursor(self._connection, row_factory=tuple_row)
        with cursor.copy(_copy_statement(copy)) as writing:
            for part in copy.parts:
                writing.write(part)


class AsyncPsycopgRoute:
    """A psycopg AsyncConnection."""

    __slots__ = ("_connection",)
    is_async = True
    begin = "use `async with conn.transaction():`"

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def state(self) -> State:
        if self._connection.pgconn.pipeline_status != PipelineStatus.OFF:
            async with self._connection.pipeline():
                pass
        return _state(self._connection)

    async def call(self, statement: bytes, values: Sequence[object]) -> Row:
        cursor = psycopg.AsyncRawCursor(self._connection, row_factory=tuple_row)
        await cursor.execute(statement, values)
        return await cursor.fetchone() or ()

    async def ask(self, ask: Ask) -> list[Row]:
        cursor = psycopg.AsyncRawCursor(self._connection, row_factory=tuple_row)
        await cursor.execute(ask.text.encode(), ask.parameters)
        return await cursor.fetchall()

    def copies(self) -> bool:
        return _copies(self._connection)

    async def copy(self, copy: Copy) -> None:
        cursor = psycopg.AsyncCursor(self._connection, row_factory=tuple_row)
        async with cursor.copy(_copy_statement(copy)) as writing:
            for part in copy.parts:
                await writing.write(part)


Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


def _state(connection: Connection) -> State:
    status = connection.pgconn.transaction_status
    if status == TransactionStatus.IDLE:
        return State.OUTSIDE if connection.autocommit else State.OPEN
    return _STATES[TransactionStatus(status)]


def _copies(connection: Connection) -> bool:
    # COPY is not possible in pipeline mode, and our rows are UTF-8 whatever the connection's encoding.
    return connection.pgconn.pipeline_status == PipelineStatus.OFF and connection.info.encoding == "utf-8"


def _copy_statement(copy: Copy) -> sql.Composed:
    return sql.SQL("copy {} ({}) from stdin (format binary)").format(
        sql.Identifier(copy.schema, copy.table),
        sql.SQL(", ").join(map(sql.Identifier, copy.columns)),
    )
