"""Links to the database: the kit's own connection, or the one that the application's test has and rolls back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg

from pulse_outbox import connections
from pulse_outbox.claims import Rows, raw_time
from pulse_outbox.connections import Ask, State
from pulse_outbox.dispatcher.transactions import HandlerTransaction
from pulse_outbox.errors import SettingsError
from pulse_outbox.link import Sent, Written
from pulse_outbox.store import UuidArray

if TYPE_CHECKING:
    from pulse_outbox.dispatcher.jobs import Job
    from pulse_outbox.events import Event
    from pulse_outbox.store import Clock

_SAVEPOINT = "pulse_outbox_testkit"


def is_async(connection: object) -> bool:
    """Whether this connection belongs to an event loop."""
    return bool(_route_of(connection).is_async)


def _route_of(connection: object) -> connections.SyncRoute | connections.AsyncRoute:
    try:
        return connections.find_route(connection)
    except connections.Unfit as unfit:
        raise SettingsError(f"the test kit's connection: {unfit}") from unfit


class Borrowed:
    """The application's own connection (session, …): one transaction, which the test rolls back.

    A synchronous one is used in the thread of *here*, the test's, and nowhere else. *outside*: what to say where no
    transaction is open.
    """

    def __init__(self, connection: object, here: Executor | None, outside: str = "") -> None:
        self._given = connection
        self._here = here
        self._outside = outside

    server = None

    def write(self, query: bytes, parameters: Sequence[object]) -> None:
        """Nothing is sent ahead: the test's connection answers one call after the other …"""

    def send(self, written: Written) -> None:
        """… so nothing is ever written that could be."""

    async def rows(
        self, query: bytes, parameters: Sequence[object], sent: Sent | None = None, *, raw: bool = False
    ) -> Rows:
        """What the query returns, inside the open transaction."""
        rows = await self._answer(Ask(*_as_one_text(query.decode(), parameters)))
        return [tuple(map(_as_raw, row)) for row in rows] if raw else rows

    async def _answer(self, ask: Ask) -> Rows:
        if self._here is not None:
            rows: Rows = await self._call(lambda: self._rows(ask))
            return rows
        route: Any = _route_of(self._given)
        if not route.is_async:
            raise SettingsError(
                "this connection is synchronous: call run, drain and their like, in a sync test"
            )
        self._require_transaction(await route.state(), route.begin)
        return [_with_event_id(row) for row in await route.ask(ask)]

    def _rows(self, ask: Ask) -> Rows:
        route: Any = _route_of(self._given)
        if route.is_async:
            raise SettingsError(
                "this connection is asynchronous: await run_async, drain_async and their like"
            )
        self._require_transaction(route.state(), route.begin)
        return [_with_event_id(row) for row in route.ask(ask)]

    def _require_transaction(self, state: State, begin: str) -> None:
        if state is State.FAILED:
            raise SettingsError(
                "the test's transaction has failed: roll it back to a savepoint, or start again"
            )
        if state is not State.OPEN:
            raise SettingsError(
                self._outside
                or "no transaction is open on the test kit's connection, so nothing could be rolled back: "
                f"{begin}"
            )

    async def close(self) -> None:
        """It isn't ours."""

    @asynccontextmanager
    async def around_handler(self) -> AsyncIterator[None]:
        """In a savepoint: where the handler leaves a failed transaction, it is rolled back to before the handler."""
        await self._execute(f"savepoint {_SAVEPOINT}")
        await self._keep_open(True)
        try:
            yield
        finally:
            await self._keep_open(False)
        try:
            await self._execute(f"release savepoint {_SAVEPOINT}")
        except Exception:  # whatever the driver calls it
            await self._execute(f"rollback to savepoint {_SAVEPOINT}")
            await self._execute(f"release savepoint {_SAVEPOINT}")

    async def _keep_open(self, keep: bool) -> None:
        if self._here is not None:
            await self._call(lambda: _keep_open(self._given, keep))

    async def _execute(self, text: str) -> None:
        if self._here is not None:
            await self._call(lambda: _execute(self._given, text))
        else:
            await _execute_async(self._given, text)

    async def _call(self, function: Callable[[], Any]) -> Any:
        assert self._here is not None
        return await asyncio.wrap_future(self._here.submit(function))


def _keep_open(connection: Any, keep: bool) -> None:
    """Lets Django's `close_old_connections`, which handlers call, not end the test's own transaction."""
    housekeeping = "close_if_unusable_or_obsolete"
    if hasattr(connection, housekeeping):
        if keep:
            setattr(connection, housekeeping, lambda: None)
        else:
            delattr(connection, housekeeping)


def _execute(connection: Any, text: str) -> None:
    if hasattr(connection, "scalars") and callable(getattr(connection, "connection", None)):
        connection = connection.connection()  # SQLAlchemy's Session
    if hasattr(connection, "exec_driver_sql"):
        connection.exec_driver_sql(text)
        return
    cursor = connection.cursor()
    try:
        cursor.execute(text)
    finally:
        cursor.close()


async def _execute_async(connection: Any, text: str) -> None:
    if hasattr(connection, "scalars") and hasattr(connection, "sync_session"):
        connection = await connection.connection()  # SQLAlchemy's AsyncSession
    if hasattr(connection, "exec_driver_sql"):
        await connection.exec_driver_sql(text)
    else:
        await connection.execute(text)


# Values as one text


def _as_one_text(query: str, parameters: Sequence[object]) -> tuple[str, tuple[str, ...]]:
    """The statement with one parameter, a JSON array of what PostgreSQL reads: no driver's own types are needed."""
    if not parameters:
        return query, ()
    numbers = iter(range(len(parameters)))
    text = re.sub(
        r"%s::([a-z]+(?:\[\])?)",
        lambda match: f"(select (v ->> {next(numbers)})::{match[1]} from given)",  # noqa: S608  the store's own text
        query,
    )
    assert next(numbers, None) is None, "a parameter without a type"
    values = json.dumps([_as_text(value) for value in parameters])
    return f"with given as (select $1::text::json as v) {text}", (values,)


def _as_text(value: object) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return str(value).lower()
        case datetime():
            return value.isoformat()
        case timedelta():
            return f"{value // timedelta(microseconds=1)} microseconds"
        case UuidArray():
            return "{" + ",".join(map(str, value.uuids())) + "}"
        case list() | tuple():
            return "{" + ",".join(map(_as_element, value)) + "}"
        case _:
            return str(value)


def _as_element(value: object) -> str:
    text = _as_text(value)
    if text is None:
        return "null"
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'


def _with_event_id(row: Sequence[Any]) -> tuple[Any, ...]:
    """An event's id comes first, where there is one; as text, or as whatever the application reads it as."""
    if row and row[0] is not None and not isinstance(row[0], UUID):
        with suppress(ValueError):
            return UUID(str(row[0])), *row[1:]
    return tuple(row)


def _as_raw(value: object) -> object:
    """An id or a time as it would be on the wire."""
    if isinstance(value, UUID):
        return value.bytes
    return raw_time(value) if isinstance(value, datetime) else value


# Transactional handlers


class BorrowedTransactions:
    """Runs a transactional handler inside the test's own transaction, in a savepoint of it."""

    def __init__(self, connection: object, *, schema: str, clock: Clock) -> None:
        self._given = connection
        self._transaction = HandlerTransaction(schema, clock)

    async def run_async(self, job: Job, build: Callable[[Any], Event[Any]]) -> None:
        """Runs an async handler and completes its event in one savepoint."""
        given: Any = self._given
        if hasattr(given, "sync_session"):
            given = await given.connection()
        if hasattr(given, "get_raw_connection"):
            given = (await given.get_raw_connection()).driver_connection
        if not isinstance(given, psycopg.AsyncConnection):
            raise _wrong_driver(job, "psycopg.AsyncConnection", given)
        await self._transaction.run_async(given, job, build)

    def run_sync(self, job: Job, build: Callable[[Any], Event[Any]]) -> None:
        """Runs a sync handler and completes its event in one savepoint."""
        given: Any = self._given
        if callable(getattr(given, "connection", None)):
            given = given.connection()  # SQLAlchemy's Session
        if hasattr(given, "connection"):
            given = given.connection  # what SQLAlchemy's Connection or Django's wrapper stands on
        given = getattr(given, "driver_connection", given)
        if not isinstance(given, psycopg.Connection):
            raise _wrong_driver(job, "psycopg.Connection", given)
        self._transaction.run_sync(given, job, build)


def _wrong_driver(job: Job, wanted: str, given: object) -> SettingsError:
    return SettingsError(
        f"{job.handler.name} is transactional and gets a {wanted}, but this test's transaction is of "
        f"{type(given).__module__}: test it on a database of its own (without outbox_connection)"
    )
