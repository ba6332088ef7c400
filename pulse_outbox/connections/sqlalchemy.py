"""SQLAlchemy 2: Session, scoped_session and Connection, and their asynchronous twins.

Statements go through SQLAlchemy, so that its transaction begins as it always does; COPY goes to the driver beneath.
The asynchronous ones run the synchronous code where SQLAlchemy itself does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, exc
from sqlalchemy.ext import asyncio as sa_asyncio
from sqlalchemy.orm import Session, SessionTransaction, scoped_session, sessionmaker
from sqlalchemy.pool import Pool, PoolProxiedConnection
from sqlalchemy.util import await_only

from pulse_outbox import connections
from pulse_outbox.connections import Ask, Copy, Row, State, Unfit

R = TypeVar("R")

_SYNC = (Session, scoped_session, Connection)
_ASYNC = (sa_asyncio.AsyncSession, sa_asyncio.async_scoped_session, sa_asyncio.AsyncConnection)
_AUTOCOMMIT = 'use a connection or engine without isolation_level="AUTOCOMMIT"'


def find_route(connection: object) -> SQLAlchemyRoute | AsyncSQLAlchemyRoute | None:
    if isinstance(connection, _SYNC):
        return SQLAlchemyRoute(connection)
    if isinstance(connection, _ASYNC):
        return AsyncSQLAlchemyRoute(connection)
    if isinstance(connection, PoolProxiedConnection):
        return connections.find_route(connection.dbapi_connection)  # type: ignore[return-value]  # a driver's route
    if isinstance(connection, Pool):
        raise Unfit("this is a pool: pass a connection (`with engine.begin() as conn:`)")
    if isinstance(connection, Engine):
        raise Unfit("this is an engine: pass a connection of it (`with engine.begin() as conn:`)")
    if isinstance(connection, sa_asyncio.AsyncEngine):
        raise Unfit("this is an engine: pass a connection of it (`async with engine.begin() as conn:`)")
    if isinstance(connection, sessionmaker):
        raise Unfit("this makes sessions: pass a Session of it (`with maker.begin() as session:`)")
    if isinstance(connection, sa_asyncio.async_sessionmaker):
        raise Unfit(
            "this makes sessions: pass an AsyncSession of it (`async with maker.begin() as session:`)"
        )
    if isinstance(connection, SessionTransaction | sa_asyncio.AsyncSessionTransaction):
        raise Unfit("this is a transaction: pass its session")
    return None


class SQLAlchemyRoute:
    """A Session or Connection, with what SQLAlchemy runs it on."""

    __slots__ = ("_beneath", "_connection", "_given", "begin")
    is_async = False
    call = None

    def __init__(self, given: Any) -> None:
        self._given = given
        self._connection: Any = None
        self._beneath: Any = None
        self.begin = _AUTOCOMMIT

    def state(self) -> State:
        given = self._given() if isinstance(self._given, scoped_session) else self._given
        if isinstance(given, Session):
            if not given.is_active:
                return State.FAILED  # a flush has failed
            if not given.autobegin and not given.in_transaction():
                self.begin = "use `with session.begin():`"
                return State.OUTSIDE
            given = _connection_of(given)
        elif given.closed:
            return State.CLOSED
        if given.dialect.name != "postgresql":
            raise Unfit(f"this is a connection to {given.dialect.name}: pass one to the PostgreSQL database")
        return self._state_of(given)

    def _state_of(self, connection: Connection) -> State:
        self._connection = connection
        driver = connection.connection.driver_connection
        self._beneath = connections.find_route(driver)
        state: State = await_only(self._beneath.state()) if self._beneath.is_async else self._beneath.state()
        # Not in a transaction yet, but SQLAlchemy begins one with the next statement.
        if state is State.OUTSIDE and not getattr(
            connection.connection.dbapi_connection, "autocommit", False
        ):
            return State.OPEN
        return state

    def ask(self, ask: Ask) -> list[Row]:
        dialect = self._connection.dialect
        text = ask.text if dialect.paramstyle == "numeric_dollar" else ask.text_with_percents
        result = self._connection.exec_driver_sql(text, ask.parameters)
        return [tuple(row) for row in result] if ask.has_rows else []

    def copies(self) -> bool:
        return bool(self._beneath.copies())

    def copy(self, copy: Copy) -> None:
        # SQLAlchemy must know that a transaction is open, or its commit would do nothing.
        self._connection.exec_driver_sql("select 1")
        if self._beneath.is_async:
            await_only(self._beneath.copy(copy))
        else:
            self._beneath.copy(copy)


class AsyncSQLAlchemyRoute:
    """An AsyncSession or AsyncConnection."""

    __slots__ = ("_given", "_inner")
    is_async = True
    call = None

    def __init__(self, given: Any) -> None:
        if isinstance(given, sa_asyncio.async_scoped_session):
            given = given()
        if isinstance(given, sa_asyncio.AsyncConnection) and given.sync_connection is None:
            raise Unfit(
                "this connection was never opened: pass one that was (`async with engine.begin() as conn:`)"
            )
        self._given = given
        self._inner = SQLAlchemyRoute(
            given.sync_session if isinstance(given, sa_asyncio.AsyncSession) else given.sync_connection
        )

    @property
    def begin(self) -> str:
        return self._inner.begin.replace("`with", "`async with")

    async def state(self) -> State:
        return await self._in_greenlet(self._inner.state)

    async def ask(self, ask: Ask) -> list[Row]:
        return await self._in_greenlet(lambda: self._inner.ask(ask))

    def copies(self) -> bool:
        return self._inner.copies()

    async def copy(self, copy: Copy) -> None:
        await self._in_greenlet(lambda: self._inner.copy(copy))

    async def _in_greenlet(self, function: Callable[[], R]) -> R:
        return await self._given.run_sync(lambda _: function())  # type: ignore[no-any-return]  # what it returns


def _connection_of(session: Session) -> Connection:
    """The session's connection, which begins its transaction and flushes nothing."""
    try:
        return session.connection()
    except exc.UnboundExecutionError as error:
        raise Unfit(
            "this Session has several engines: pass one connection (`session.connection(bind_arguments=…)`)"
        ) from error
