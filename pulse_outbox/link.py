"""A link: one connection to the database that is made again when it is lost, and never waited for without end."""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg import waiting
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import tuple_row

from pulse_outbox.storage_retry import CallTimedOut, loses_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.abc import RV, PQGen

Rows = list[tuple[Any, ...]]

CALL_TIMEOUT = timedelta(seconds=15)
CONNECT_TIMEOUT = timedelta(seconds=10)
WAIT_INTERVAL = 1.0
"""How often psycopg looks up while it waits, in seconds."""


class AnyLink(Protocol):
    """What a store asks of its link."""

    async def rows(self, query: bytes, parameters: Sequence[object]) -> Rows: ...
    async def close(self) -> None: ...


class Link:
    """One connection, made when it is needed and made again after it was lost.

    Calls take turns. A call that outlives its deadline costs the connection: whatever the server still does with it
    is harmless, since every call may be repeated.
    """

    def __init__(
        self,
        dsn: str,
        *,
        name: str = "pulse-outbox",
        call_timeout: timedelta = CALL_TIMEOUT,
        succeeded: Callable[[], None] = lambda: None,
    ) -> None:
        self._conninfo = connection_string(dsn, name, call_timeout)
        self._call_timeout = call_timeout.total_seconds()
        self._succeeded = succeeded
        self._turn = asyncio.Lock()
        self._conn: psycopg.AsyncConnection[Any] | None = None

    async def rows(self, query: bytes, parameters: Sequence[object]) -> Rows:
        """What the query returns, or an error; a hung server is an error too."""
        async with self._turn:
            if self._conn is None or self._conn.closed:
                self._conn = await self._connect()
            rows = await self._ask(self._conn, query, parameters)
            self._succeeded()
            return rows

    async def close(self) -> None:
        """Ends the connection, politely when it is idle."""
        conn, self._conn = self._conn, None
        if conn is not None and not conn.closed:
            await conn.close()

    async def _ask(
        self, conn: psycopg.AsyncConnection[Any], query: bytes, parameters: Sequence[object]
    ) -> Rows:
        """One call within its deadline; an error that costs the connection throws it away."""
        deadline = asyncio.get_running_loop().call_later(self._call_timeout, shut_down, conn)
        try:
            cursor = conn.cursor(binary=True, row_factory=tuple_row)
            await cursor.execute(query, parameters)
            return await cursor.fetchall()
        except BaseException as error:
            if loses_connection(error):
                self._throw_away(conn)
            if isinstance(error, psycopg.Error) and deadline.when() <= asyncio.get_running_loop().time():
                raise CallTimedOut(f"no answer within {self._call_timeout:g} s") from error
            raise
        finally:
            deadline.cancel()

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        conn = await _Connection.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        # Prepared statements halve the time of a call. Behind a pooler in transaction mode they would belong to
        # somebody else's session; a pooler shows by a process number that is not the server's.
        [(server_pid,)] = await self._ask(conn, b"select pg_catalog.pg_backend_pid()", ())
        if server_pid == conn.info.backend_pid:
            conn.prepare_threshold = 2
            # A call that was given up may still finish, and its repetition finds what it did. But one that a stalled
            # server gets to long after its repetition must not run: a claim would take rows that nobody holds.
            milliseconds = int(self._call_timeout * 4000)
            await self._ask(conn, b"select set_config('statement_timeout', %s, false)", (str(milliseconds),))
        return conn

    def _throw_away(self, conn: psycopg.AsyncConnection[Any]) -> None:
        self._conn = None
        shut_down(conn)
        conn.pgconn.finish()


class _Connection(psycopg.AsyncConnection[Any]):
    """A connection whose calls can be cancelled at once, at the price of the connection.

    psycopg would ask the server to cancel the call, and wait for a server that may not answer.
    """

    async def wait(self, gen: PQGen[RV], *_: object, **__: object) -> RV:
        return await waiting.wait_async(gen, self.pgconn.socket, interval=WAIT_INTERVAL)


def shut_down(conn: psycopg.AsyncConnection[Any] | psycopg.Connection[Any]) -> None:
    """Cuts a connection off at once, without asking the server."""
    try:
        descriptor = os.dup(conn.fileno())
    except (OSError, psycopg.Error):
        return  # closed already
    with socket.socket(fileno=descriptor) as duplicate:
        try:
            duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was faster


def connection_string(dsn: str, name: str, call_timeout: timedelta = CALL_TIMEOUT) -> str:
    """The DSN, with a name for pg_stat_activity and with keep-alives unless it has its own."""
    given = conninfo_to_dict(dsn)
    wanted = {
        "application_name": name,
        # libpq takes no less than two seconds.
        "connect_timeout": str(max(2, int(min(CONNECT_TIMEOUT, call_timeout).total_seconds()))),
        "keepalives_idle": "10",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "20000",
    }
    return make_conninfo(dsn, **{key: value for key, value in wanted.items() if key not in given})
