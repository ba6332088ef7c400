"""A link: one connection to the database that is made again when it is lost, and never waited for without end."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import socket
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import psycopg
from psycopg import capabilities, errors, pq
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.types.datetime import TimestamptzBinaryLoader
from psycopg.types.numeric import Int8BinaryLoader
from psycopg.types.string import ByteaBinaryLoader
from psycopg.types.uuid import UUIDBinaryLoader

from pulse_outbox.errors import SettingsError
from pulse_outbox.storage_retry import CallTimedOut, loses_connection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from psycopg.abc import Buffer
    from psycopg.adapt import Loader
    from psycopg.pq.abc import PGresult

    from pulse_outbox.claims import Rows

CALL_TIMEOUT = timedelta(seconds=15)
CONNECT_TIMEOUT = timedelta(seconds=10)
PREPARED = 100
"""How many statements a connection keeps prepared."""
_PLACEHOLDER = re.compile(rb"%[s%]")


class AnyLink(Protocol):
    """What a store asks of its link."""

    @property
    def server(self) -> object: ...
    async def rows(
        self, query: bytes, parameters: Sequence[object], sent: Sent | None = None, *, raw: bool = False
    ) -> Rows: ...
    def write(self, query: bytes, parameters: Sequence[object]) -> Written | None: ...
    def send(self, written: Written) -> Sent | None: ...
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
        self._is_closed = False

    async def rows(
        self, query: bytes, parameters: Sequence[object], sent: Sent | None = None, *, raw: bool = False
    ) -> Rows:
        """What the query returns, or an error; a hung server is an error too. *sent*: what `send` said of the same.

        *raw*: ids and times as they are on the wire, see `pulse_outbox.claims`.
        """
        if sent is not None:
            rows = await self._answer(sent, raw=raw)
        else:
            line = await self._connected()
            if line.is_direct:
                rows = await self._ask(line, query, parameters, raw=raw)
            else:
                async with self._turn:
                    rows = await self._ask(await self._connected(), query, parameters, raw=raw)
        self._succeeded()
        return rows

    @property
    def server(self) -> object:
        """The server that the connection leads to, the same while that one is up; None without a connection."""
        return self._line.server if self._line and not self._line.is_lost else None

    def write(self, query: bytes, parameters: Sequence[object]) -> Written | None:
        """Makes a call ready to be sent, which takes longer than to send it.

        None where the connection has to be made first, or where calls take turns.
        """
        line = self._line
        return line.write(query, parameters) if line and line.is_direct and not line.is_lost else None

    def send(self, written: Written) -> Sent | None:
        """Sends a call at once; None where its connection was lost. `rows` gives the answer, if anybody asks for it."""
        line = written.line
        if line.is_lost:
            return None
        return Sent(line, line.ask(written))

    async def close(self) -> None:
        """Ends the connection."""
        self._is_closed = True
        if self._line is not None:
            self._line.end(psycopg.OperationalError("the link was closed"))

    async def _connected(self) -> _Line:
        if self._line is None or self._line.is_lost:
            async with self._connecting:
                if self._line is None or self._line.is_lost:
                    self._line = await self._connect()
        return self._line

    async def _ask(
        self, line: _Line, query: bytes, parameters: Sequence[object], *, raw: bool = False
    ) -> Rows:
        return await self._answer(Sent(line, line.ask(line.write(query, parameters))), raw=raw)

    async def _answer(self, sent: Sent, *, raw: bool) -> Rows:
        """The answer of one call; an error that costs the connection throws it away."""
        line = sent.line
        try:
            result = await sent.answer
        except BaseException as error:
            if loses_connection(error):
                line.end(
                    psycopg.OperationalError("the connection was given up because of another call on it")
                )
            raise
        return line.rows_of(result, raw=raw)

    async def _connect(self) -> _Line:
        if not capabilities.has_pipeline():
            raise SettingsError(
                f"the dispatcher needs libpq 14 or newer, and found {pq.version()}: "
                "pip install 'pulse-outbox[binary]' brings one along"
            )
        conn = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        line = _Line(conn, self._call_timeout)
        try:
            # Prepared statements halve the time of a call. Behind a pooler in transaction mode they would belong to
            # somebody else's session; a pooler shows by a process number that is not the server's.
            [(server_pid, line.server)] = await self._ask(
                line, b"select pg_catalog.pg_backend_pid(), pg_catalog.pg_postmaster_start_time()", ()
            )
            if server_pid == conn.info.backend_pid:
                line.is_direct = True
                # A call that was given up may still finish, and its repetition finds what it did. But one that a
                # stalled server gets to long after its repetition must not run: a claim would take rows that nobody
                # holds.
                milliseconds = int(self._call_timeout * 4000)
                await self._ask(
                    line, b"select set_config('statement_timeout', %s, false)", (str(milliseconds),)
                )
            if self._is_closed:
                raise psycopg.OperationalError("the link was closed")
        except BaseException:
            line.end(psycopg.OperationalError("the connection could not be set up"))
            raise
        return line


class Written(NamedTuple):
    """A call that can be sent on its line, and on no other."""

    line: _Line
    statement: tuple[bytes, tuple[int, ...] | None]
    """Its query, and the types of its parameters."""
    text: bytes
    values: Sequence[Buffer | None]
    formats: list[Format] | None


class Sent(NamedTuple):
    """A call that was sent, and whose answer nobody has taken yet."""

    line: _Line
    answer: asyncio.Future[PGresult]

    @property
    def is_lost(self) -> bool:
        """Whether its answer will never come: the connection was lost before."""
        failed = self.answer.done() and (self.answer.cancelled() or self.answer.exception() is not None)
        return failed and self.line.is_lost


class _Question:
    """A call that is on its way."""

    __slots__ = ("answer", "error", "prepares", "result")

    def __init__(self, answer: asyncio.Future[PGresult]) -> None:
        self.answer = answer
        self.prepares: tuple[object, bytes] | None = None
        """The statement that it prepares, and the name that it gives it."""
        self.result: PGresult | None = None
        self.error: psycopg.Error | None = None

    def give(self) -> None:
        """The answer is complete."""
        if self.answer.done():
            return  # nobody waits for it any more
        if self.error is None and self.result is not None:
            self.answer.set_result(self.result)
            return
        self.answer.set_exception(self.error or psycopg.ProgrammingError("the statement returned no rows"))
        self.answer.exception()  # else asyncio complains where nobody asks for the answer


# How ids and times of an answer are read: as psycopg reads them, whatever the application has registered for all of
# its connections; or not at all.
_OWN = {"uuid": UUIDBinaryLoader, "timestamptz": TimestamptzBinaryLoader}
_RAW = {"uuid": ByteaBinaryLoader, "timestamptz": Int8BinaryLoader}


class _Reading:
    """What a Transformer wants to know: a connection, and how its values are read."""

    def __init__(self, conn: psycopg.AsyncConnection[Any], loaders: Mapping[str, type[Loader]]) -> None:
        self.connection = conn
        self.adapters = AdaptersMap(conn.adapters)
        for name, loader in loaders.items():
            self.adapters.register_loader(name, loader)


class _Line:
    """A connection, and the questions whose answers it owes, in their order.

    It speaks with libpq itself, in its pipeline mode: so the next question is with the server before the last one is
    answered, and costs this side less than through a cursor.
    """

    def __init__(self, conn: psycopg.AsyncConnection[Any], call_timeout: float) -> None:
        self._pgconn = conn.pgconn
        self._transformer = Transformer(_Reading(conn, _OWN))
        self._raw_transformer = Transformer(_Reading(conn, _RAW))
        self._call_timeout = call_timeout
        self._due_at = 0.0
        """When the first question has to be answered: those behind it can't be before."""
        self._deadline: asyncio.TimerHandle | None = None
        self._questions: deque[_Question] = deque()
        self._texts: dict[bytes, bytes] = {}
        self._names: dict[object, bytes] = {}
        """Prepared statements, by their text and the types of their parameters."""
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        # A descriptor of our own: libpq closes its one as soon as it finds the connection lost.
        self._socket = socket.socket(fileno=os.dup(conn.fileno()))
        self._is_writing = False
        """A part of a question waits until the socket takes more."""
        self.server: object = None
        """When it was started, by its own clock: of two servers it is not the same."""
        self.is_direct = False
        """No pooler stands between."""
        self.is_lost = False
        self._pgconn.enter_pipeline_mode()
        self._loop.add_reader(self._socket, self._read)

    def write(self, query: bytes, parameters: Sequence[object]) -> Written:
        """A question, whose parameters stand as %s."""
        text = self._texts.get(query)
        if text is None:
            text = self._texts[query] = _numbered(query)
        transformer = self._transformer
        values = transformer.dump_sequence(parameters, [PyFormat.AUTO] * len(parameters))
        return Written(self, (query, transformer.types), text, values, transformer.formats)

    def ask(self, written: Written) -> asyncio.Future[PGresult]:
        """Sends a question."""
        if self.is_lost:
            raise psycopg.OperationalError("the connection is lost")
        question = _Question(self._loop.create_future())
        try:
            self._send(question, written)
        except psycopg.Error as error:
            self.end(error)
            raise
        self._questions.append(question)
        is_first = len(self._questions) == 1
        self._write()  # before anything else: the server may begin
        if is_first and self._questions:
            self._set_deadline()
        return question.answer

    def _send(self, question: _Question, written: Written) -> None:
        _, statement, text, values, formats = written
        name = self._names.get(statement)
        if name is None and self.is_direct and len(self._names) < PREPARED:
            name = b"pulse_outbox_%d" % next(self._numbers)
            question.prepares = statement, name
            self._pgconn.send_prepare(name, text, statement[1])
        if name is not None:
            self._pgconn.send_query_prepared(name, values, formats, Format.BINARY)
        else:
            self._pgconn.send_query_params(text, values, statement[1], formats, Format.BINARY)
        self._pgconn.pipeline_sync()

    def rows_of(self, result: PGresult, *, raw: bool = False) -> Rows:
        """The rows of an answer."""
        transformer = self._raw_transformer if raw else self._transformer
        try:
            transformer.set_pgresult(result, format=Format.BINARY)
            return transformer.load_rows(0, result.ntuples, tuple)
        finally:
            transformer.set_pgresult(None)  # which may be large

    def end(self, error: psycopg.Error) -> None:
        """Ends the connection, politely when it is idle; whoever waits for an answer gets this error at once."""
        if self.is_lost:
            return
        self.is_lost = True
        is_busy = bool(self._questions)
        for question in self._questions:
            question.error = question.error or error
            question.give()
        self._questions.clear()
        if self._deadline is not None:
            self._deadline.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if is_busy:
            cut(self._socket)  # the server may be waiting for this side to read
        self._pgconn.finish()
        self._socket.close()

    def _set_deadline(self) -> None:
        """For the question that is first now. The timer stays: to make one for each question would delay its answer."""
        if not self._questions:
            return
        self._due_at = self._loop.time() + self._call_timeout
        if self._deadline is None:
            self._deadline = self._loop.call_at(self._due_at, self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        if self._loop.time() >= self._due_at:
            self._read()  # the loop may have stood still while the answer came
        self._deadline = None
        if not self._questions:
            return
        if self._loop.time() < self._due_at:
            self._deadline = self._loop.call_at(self._due_at, self._look_at_deadline)
            return
        self._questions[0].error = CallTimedOut(f"no answer within {self._call_timeout:g} s")
        self.end(psycopg.OperationalError("the connection was given up: a call on it got no answer"))

    def _write(self) -> None:
        """Sends what has not been sent yet; the rest when the socket takes more."""
        try:
            is_sent = not self._pgconn.flush()
        except psycopg.Error as error:
            self.end(error)
            return
        if is_sent and self._is_writing:
            self._loop.remove_writer(self._socket)
        elif not is_sent:
            self._loop.add_writer(self._socket, self._write)
        self._is_writing = not is_sent
        if self._is_writing or len(self._questions) > 1:
            self._read()  # libpq may have looked for answers meanwhile: the socket would not tell

    def _read(self) -> None:
        try:
            self._pgconn.consume_input()
            while self._questions and not self._pgconn.is_busy():
                self._take(self._pgconn.get_result())
                if self._pgconn.status != ConnStatus.OK:
                    raise psycopg.OperationalError(
                        f"the connection is lost: {self._pgconn.get_error_message()}"
                    )
        except psycopg.Error as error:
            self.end(error)

    def _take(self, result: PGresult | None) -> None:
        if result is None:
            return  # the end of a statement
        question = self._questions[0]
        match result.status:
            case ExecStatus.PIPELINE_SYNC:
                self._questions.popleft()
                self._set_deadline()
                question.give()
            case ExecStatus.FATAL_ERROR:
                question.error = errors.error_from_result(result, self._transformer.encoding)
            case ExecStatus.TUPLES_OK:
                question.result = result
            case ExecStatus.COMMAND_OK if question.prepares is not None:
                statement, self._names[statement] = question.prepares
                question.prepares = None
            case ExecStatus.COMMAND_OK | ExecStatus.EMPTY_QUERY | ExecStatus.PIPELINE_ABORTED:
                pass  # it returns no rows, or was not reached after an error
            case status:
                raise psycopg.ProgrammingError(f"a link can't ask for that: {ExecStatus(status).name}")


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
        cut(duplicate)


def cut(connected: socket.socket) -> None:
    """Ends a socket's connection for all who have it open."""
    try:
        connected.shutdown(socket.SHUT_RDWR)
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
