"""Connections of psycopg 3, synchronous and asynchronous."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import psycopg
from psycopg import sql
from psycopg.abc import Buffer, PQGen
from psycopg.copy import AsyncLibpqWriter, LibpqWriter
from psycopg.generators import copy_to
from psycopg.pq import ConnStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.rows import tuple_row

from pulse_outbox.connections import Ask, Copy, Row, State, Unfit

PIECE = 64 * 1024
"""How many bytes of a COPY libpq gets at a time …"""
MOST_HELD = 4 * PIECE
"""… and how many it may have before it must send them all."""
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
        cursor.execute(ask.text.encode(), ask.parameters)
        return cursor.fetchall() if ask.has_rows else []

    def copies(self) -> bool:
        return _copies(self._connection)

    def copy(self, copy: Copy) -> None:
        cursor = psycopg.Cursor(self._connection, row_factory=tuple_row)
        writer = _Writer(cursor)
        try:
            with cursor.copy(_copy_statement(copy), writer=writer) as writing:
                for part in _unlocked(copy.parts, self._connection.lock) if copy.is_stream else copy.parts:
                    writing.write(part)
        except BaseException as error:
            with _free_or_closed(self._connection) as is_copying:
                if is_copying:
                    writer.finish(error)
            raise


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
        return await cursor.fetchall() if ask.has_rows else []

    def copies(self) -> bool:
        return _copies(self._connection)

    async def copy(self, copy: Copy) -> None:
        cursor = psycopg.AsyncCursor(self._connection, row_factory=tuple_row)
        writer = _AsyncWriter(cursor)
        try:
            async with cursor.copy(_copy_statement(copy), writer=writer) as writing:
                for part in copy.parts:
                    await writing.write(part)
        except BaseException as error:
            with _free_or_closed(self._connection) as is_copying:
                if is_copying:
                    await writer.finish(error)
            raise


def _unlocked(parts: Iterator[bytes], lock: Lock) -> Iterator[bytes]:
    """Lets go of psycopg's lock of the connection, where its COPY holds it, while the application makes a part.

    If it uses the connection, which it must not, it would wait for itself: so it gets psycopg's error.
    """
    is_held = lock.locked()
    while True:
        if is_held:
            lock.release()
        try:
            part = next(parts, None)
        finally:
            if is_held:
                lock.acquire()
        if part is None:
            return
        yield part


class _Writer(LibpqWriter):
    def __init__(self, cursor: psycopg.Cursor[Any]) -> None:
        super().__init__(cursor)
        self._sending = _Sending(cursor.connection.pgconn)

    def write(self, data: Buffer) -> None:
        self.connection.wait(self._sending.pieces_of(data))

    def finish(self, exc: BaseException | None = None) -> None:
        # Of a closed connection nothing can be ended, and saying so would hide why.
        if exc is None or not self.connection.closed:
            super().finish(exc)


class _AsyncWriter(AsyncLibpqWriter):
    def __init__(self, cursor: psycopg.AsyncCursor[Any]) -> None:
        super().__init__(cursor)
        self._sending = _Sending(cursor.connection.pgconn)

    async def write(self, data: Buffer) -> None:
        await self.connection.wait(self._sending.pieces_of(data))

    async def finish(self, exc: BaseException | None = None) -> None:
        if exc is None or not self.connection.closed:
            await super().finish(exc)


class _Sending:
    """Lets libpq hold only a little that is not sent yet.

    libpq moves all of that with every piece it is given: where rows are large, this took most of the time.
    """

    def __init__(self, pgconn: PGconn) -> None:
        self._pgconn = pgconn
        self._held = 0

    def pieces_of(self, data: Buffer) -> PQGen[None]:
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            self._held += len(piece)
            send_all = self._held >= MOST_HELD
            try:
                yield from copy_to(self._pgconn, piece, flush=send_all)
            except psycopg.OperationalError as error:
                raise self._last_words() or error from None
            if send_all:
                self._held = 0

    def _last_words(self) -> psycopg.Error | None:
        """Why the server ended the connection: libpq has read it, and looks at it only after the end of a COPY."""
        if self._pgconn.status != ConnStatus.BAD:
            return None
        self._pgconn.put_copy_end()
        result = self._pgconn.get_result()
        return psycopg.errors.error_from_result(result) if result is not None else None


Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


@contextlib.contextmanager
def _free_or_closed(connection: Connection) -> Iterator[bool]:
    """Says whether an interrupted COPY still goes on. If it does so in the end, the connection is closed.

    Interrupted while it begins a COPY, psycopg lets it begin and does not end it: the connection would stay busy.
    """
    try:
        with contextlib.suppress(psycopg.Error):
            yield _is_busy(connection)
    finally:
        if _is_busy(connection):
            connection.pgconn.finish()


def _is_busy(connection: Connection) -> bool:
    return connection.pgconn.transaction_status == TransactionStatus.ACTIVE


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
