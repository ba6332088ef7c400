"""A link: one connection to the database that is made again when it is lost, and never waited for without end."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import socket
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg import errors
from psycopg.adapt import PyFormat, Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ExecStatus, Format

from pulse_outbox.storage_retry import CallTimedOut, loses_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGresult

Rows = list[tuple[Any, ...]]

CALL_TIMEOUT = timedelta(seconds=15)
CONNECT_TIMEOUT = timedelta(seconds=10)
PREPARED = 100
"""How many statements a connection keeps prepared."""
_PLACEHOLDER = re.compile(rb"%[s%]")


class AnyLink(Protocol):
    """What a store asks of its link."""

    async def rows(self, query: bytes, parameters: Sequence[object]) -> Rows: ...
    async def close(self) -> None: ...


class Link:
    """One connection, made when it is needed and made again after it was lost.

    Calls may overlap: the server gets to one after the other, in the order in which they were made, each in a
    transaction of its own (behind a pooler they take turns). A call that outlives its deadline costs the connection:
    whatever the server still does with it is harmless, since every call may be repeated.
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
        self._connecting = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._line: _Line | None = None

    async def rows(self, query: bytes, parameters: Sequence[object]) -> Rows:
        """What the query returns, or an error; a hung server is an error too."""
        line = self._line
        if line is None or line.is_lost:
            line = await self._connected()
        if line.is_direct:
            rows = await self._ask(line, query, parameters)
        else:
            async with self._turn:
                rows = await self._ask(line, query, parameters)
        self._succeeded()
        return rows

    async def close(self) -> None:
        """Ends the connection."""
        line, self._line = self._line, None
        if line is not None:
            line.end(psycopg.OperationalError("the link was closed"))

    async def _connected(self) -> _Line:
        async with self._connecting:
            if self._line is None or self._line.is_lost:
                self._line = await self._connect()
            return self._line

    async def _ask(self, line: _Line, query: bytes, parameters: Sequence[object]) -> Rows:
        """One call within its deadline; an error that costs the connection throws it away."""
        deadline = asyncio.get_running_loop().call_later(self._call_timeout, line.cut)
        try:
            return line.rows_of(await line.ask(query, parameters))
        except BaseException as error:
            if loses_connection(error):
                line.end(psycopg.OperationalError("the connection was given up for another call on it"))
            if isinstance(error, psycopg.Error) and deadline.when() <= asyncio.get_running_loop().time():
                raise CallTimedOut(f"no answer within {self._call_timeout:g} s") from error
            raise
        finally:
            deadline.cancel()

    async def _connect(self) -> _Line:
        line = _Line(
            await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        )
        # Prepared statements halve the time of a call. Behind a pooler in transaction mode they would belong to
        # somebody else's session; a pooler shows by a process number that is not the server's.
        [(server_pid,)] = await self._ask(line, b"select pg_catalog.pg_backend_pid()", ())
        if server_pid == line.backend_pid:
            line.is_direct = True
            # A call that was given up may still finish, and its repetition finds what it did. But one that a stalled
            # server gets to long after its repetition must not run: a claim would take rows that nobody holds.
            milliseconds = int(self._call_timeout * 4000)
            await self._ask(line, b"select set_config('statement_timeout', %s, false)", (str(milliseconds),))
        return line


class _Line:
    """A connection, and the questions whose answers it owes, in their order.

    It speaks with libpq itself, in its pipeline mode: so the next question is with the server before the last one is
    answered, and costs this side less than through a cursor.
    """

    def __init__(self, conn: psycopg.AsyncConnection[Any]) -> None:
        self._conn = conn
        self._pgconn = conn.pgconn
        self._transformer = Transformer(conn)
        self._questions: deque[_Question] = deque()
        self._texts: dict[bytes, bytes] = {}
        self._names: dict[object, bytes] = {}
        """Prepared statements, by their text and the types of their parameters."""
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._descriptor = conn.fileno()
        self.backend_pid = conn.info.backend_pid
        self.is_direct = False
        self.is_lost = False
        self._pgconn.enter_pipeline_mode()
        self._loop.add_reader(self._descriptor, self._read)

    def ask(self, query: bytes, parameters: Sequence[object]) -> asyncio.Future[PGresult]:
        """Sends a question whose parameters stand as %s."""
        if self.is_lost:
            raise psycopg.OperationalError("the connection is lost")
        text = self._texts.get(query)
        if text is None:
            text = self._texts[query] = _numbered(query)
        pgconn, transformer = self._pgconn, self._transformer
        values = transformer.dump_sequence(parameters, [PyFormat.AUTO] * len(parameters))
        types, formats = transformer.types, transformer.formats
        question = _Question(self._loop.create_future())
        name = self._names.get((query, types))
        if name is None and self.is_direct and len(self._names) < PREPARED:
            name = b"pulse_outbox_%d" % next(self._numbers)
            question.prepares = (query, types), name
            pgconn.send_prepare(name, text, types)
        if name is not None:
            pgconn.send_query_prepared(name, values, formats, Format.BINARY)
        else:
            pgconn.send_query_params(text, values, types, formats, Format.BINARY)
        pgconn.pipeline_sync()
        self._questions.append(question)
        self._write()
        return question.answer

    def rows_of(self, result: PGresult) -> Rows:
        """The rows of an answer."""
        if not result.ntuples:
            return []
        self._transformer.set_pgresult(result, format=Format.BINARY)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def cut(self) -> None:
        """Cuts the connection off at once; whoever waits for an answer gets an error."""
        shut_down(self._conn)

    def end(self, error: psycopg.Error) -> None:
        """Gives the connection up; whoever waits for an answer gets this error."""
        if self.is_lost:
            return
        self.is_lost = True
        # At once: the next socket that is opened may get its number.
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        if self._questions:
            self.cut()  # the server may be waiting for this side to read
        self._pgconn.finish()
        for question in self._questions:
            if not question.answer.done():
                question.answer.set_exception(error)
        self._questions.clear()

    def _write(self) -> None:
        if self._pgconn.flush():
            self._loop.add_writer(self._descriptor, self._write_rest)

    def _write_rest(self) -> None:
        try:
            if not self._pgconn.flush():
                self._loop.remove_writer(self._descriptor)
        except psycopg.Error as error:
            self.end(error)

    def _read(self) -> None:
        pgconn = self._pgconn
        try:
            pgconn.consume_input()
            while self._questions and not pgconn.is_busy():
                self._take(pgconn.get_result())
        except psycopg.Error as error:
            self.end(error)

    def _take(self, result: PGresult | None) -> None:
        if result is None:
            return  # the end of a statement
        question = self._questions[0]
        match result.status:
            case ExecStatus.PIPELINE_SYNC:
                self._questions.popleft()
                question.give(self._names)
            case ExecStatus.FATAL_ERROR:
                question.error = errors.error_from_result(result, self._transformer.encoding)
            case ExecStatus.TUPLES_OK:
                question.result = result
            case _:
                pass  # a statement is prepared, or was not reached after an error


class _Question:
    """A call that is on its way."""

    __slots__ = ("answer", "error", "prepares", "result")

    def __init__(self, answer: asyncio.Future[PGresult]) -> None:
        self.answer = answer
        self.prepares: tuple[object, bytes] | None = None
        """The statement that it prepares, and the name that it gives it."""
        self.result: PGresult | None = None
        self.error: psycopg.Error | None = None

    def give(self, names: dict[object, bytes]) -> None:
        """The answer is complete."""
        if self.answer.done():
            return  # nobody waits for it any more
        if self.error is not None:
            self.answer.set_exception(self.error)
            return
        if self.prepares is not None:
            statement, names[statement] = self.prepares
        assert self.result is not None
        self.answer.set_result(self.result)


def _numbered(query: bytes) -> bytes:
    """The query with $1, $2 … in the places of %s, and %% for a percent sign."""
    numbers = itertools.count(1)
    return _PLACEHOLDER.sub(lambda found: b"%" if found[0] == b"%%" else b"$%d" % next(numbers), query)


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
