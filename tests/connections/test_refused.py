"""What is no connection, or one of the wrong kind: one line that says what to pass instead."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import psycopg_pool
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.pool import NullPool

from pulse_outbox import EnqueueError, Event, Outbox, TransactionNeeded
from tests.connections.drivers import url_of, use_django

outbox: Any = Outbox()  # of which the type checker would find each of these mistakes


def nowhere(driver: str) -> sa.URL:
    return sa.URL.create(f"postgresql+{driver}", host="/nowhere", database="nowhere")


@pytest.fixture
def things() -> dict[str, Callable[[], Any]]:
    engine = sa.create_engine(nowhere("psycopg"))
    async_engine = create_async_engine(nowhere("asyncpg"))
    return {
        "engine": lambda: engine,
        "its pool": lambda: engine.pool,
        "async engine": lambda: async_engine,
        "sessionmaker": lambda: sessionmaker(engine),
        "async_sessionmaker": lambda: async_sessionmaker(async_engine),
        "a session's transaction": lambda: Session(engine).begin(),
        "a connection that nobody awaited": async_engine.connect,
        "psycopg pool": lambda: psycopg_pool.ConnectionPool("", open=False),
        "async psycopg pool": lambda: psycopg_pool.AsyncConnectionPool("", open=False),
        "asyncpg pool": lambda: asyncpg.Pool.__new__(asyncpg.Pool),
        "class": lambda: Session,
        "sqlite": lambda: sqlite3.Connection.__new__(sqlite3.Connection),
        "session on sqlite": lambda: Session(sa.create_engine("sqlite://")),
        "nothing": lambda: None,
        "text": lambda: "postgresql://",
    }


@pytest.mark.parametrize(
    ("thing", "remedy"),
    [
        ("engine", "an engine: pass a connection of it (`with engine.begin() as conn:`)"),
        ("its pool", "a pool: pass a connection (`with engine.begin() as conn:`)"),
        ("async engine", "an engine: pass a connection of it (`async with engine.begin() as conn:`)"),
        ("sessionmaker", "makes sessions: pass a Session of it (`with maker.begin() as session:`)"),
        ("async_sessionmaker", "pass an AsyncSession of it (`async with maker.begin() as session:`)"),
        ("a session's transaction", "a transaction: pass its session"),
        ("a connection that nobody awaited", "never opened: pass one that was"),
        ("psycopg pool", "a pool: pass a connection of it (`with pool.connection() as conn:`)"),
        ("async psycopg pool", "a pool: pass a connection of it (`async with pool.connection() as conn:`)"),
        ("asyncpg pool", "a pool: pass a connection of it (`async with pool.acquire() as conn:`)"),
        ("class", "Session is a class: pass a connection"),
        ("sqlite", "a connection to SQLite: pass one to the PostgreSQL database"),
        ("session on sqlite", "a connection to sqlite: pass one to the PostgreSQL database"),
        (
            "nothing",
            "a connection is needed, not None: pass the psycopg, SQLAlchemy, Django, asyncpg or other",
        ),
        ("text", "a connection is needed, not builtins.str: pass the psycopg, SQLAlchemy, Django, asyncpg"),
    ],
)
async def test_what_is_no_connection_is_told_apart(things, thing, remedy):
    """Whichever function it was given to."""
    given = things[thing]()
    calls = [
        lambda: outbox.enqueue_many(given, []),
        lambda: outbox.enqueue(given, "t", {}),
    ]
    for call in calls:
        with pytest.raises(EnqueueError) as caught:
            call()
        assert remedy in str(caught.value)
        assert "\n" not in str(caught.value)
    if thing != "session on sqlite":  # which is synchronous, and that is said first
        with pytest.raises(EnqueueError) as caught:
            await outbox.enqueue_async(given, "t", {})
        assert remedy in str(caught.value)


async def test_sync_and_async_are_told_apart(dsn, conn):
    engine, async_engine = sa.create_engine(nowhere("psycopg")), create_async_engine(nowhere("asyncpg"))
    raw = await asyncpg.connect(
        host=conn.info.host, port=conn.info.port, user="postgres", database=conn.info.dbname
    )
    for asynchronous in (
        AsyncSession(async_engine),
        AsyncConnection(async_engine, sa.Connection.__new__(sa.Connection)),
        raw,
    ):
        with pytest.raises(EnqueueError, match="an asynchronous connection: await enqueue_async"):
            outbox.enqueue(asynchronous, "t", {})
    await raw.close()
    for synchronous in (Session(engine), conn):
        with pytest.raises(EnqueueError, match="a synchronous connection: call enqueue or"):
            await outbox.enqueue_async(synchronous, "t", {})
    event: Event[Any] = Event(
        UUID(int=1), "t", {}, {}, "k", None, 1, 5, 0, 1, datetime(2030, 1, 1, tzinfo=UTC)
    )
    with pytest.raises(TransactionNeeded, match="a synchronous connection: call first_time"):
        await outbox.first_time_async(conn, event, name="x")


async def test_django_in_async_code_is_told_how(dsn):
    """Its connections are synchronous, and those of another thread are others."""
    from django.db import connection, connections

    use_django(dsn)
    for call in (outbox.enqueue, outbox.enqueue_async):
        with pytest.raises(EnqueueError, match=r"`await sync_to_async\(function\)\(\)`"):
            await call(connection, "t", {})
    with pytest.raises(EnqueueError, match=r'pass one \(`connections\["default"\]`\)'):
        outbox.enqueue(connections, "t", {})


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def test_a_session_of_several_engines_is_told_how(dsn):
    engine = sa.create_engine(url_of(dsn, "psycopg"), poolclass=NullPool)
    with Session(binds={Order: engine}) as session:
        with pytest.raises(EnqueueError, match=r"session\.connection\(bind_arguments=…\)"):
            outbox.enqueue(session, "t", {})

        outbox.enqueue(session.connection(bind_arguments={"mapper": Order}), "t", {})
        session.commit()
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select count(*) from pulse.outbox").fetchone() == (1,)


def test_a_session_that_begins_nothing_by_itself_needs_a_transaction(dsn):
    engine = sa.create_engine(url_of(dsn, "psycopg"), poolclass=NullPool)
    with Session(engine, autobegin=False) as session:
        with pytest.raises(EnqueueError, match=r"no transaction is open.*use `with session\.begin\(\):`"):
            outbox.enqueue(session, "t", {})
        with session.begin():
            outbox.enqueue(session, "t", {})


def test_a_session_whose_flush_failed_is_refused(dsn):
    engine = sa.create_engine(url_of(dsn, "psycopg"), poolclass=NullPool)
    with Session(engine) as session:
        session.add(Order(id=1))
        with pytest.raises(sa.exc.ProgrammingError):
            session.flush()  # there is no such table

        with pytest.raises(EnqueueError, match="transaction has failed"):
            outbox.enqueue(session, "t", {})


@pytest.mark.parametrize("how", ["engine", "connection"])
def test_autocommit_of_sqlalchemy_is_found_however_it_was_set(dsn, how):
    """Inside `begin()` too: SQLAlchemy says that a transaction is open, and the server has none."""
    engine = sa.create_engine(url_of(dsn, "psycopg"), poolclass=NullPool)
    if how == "engine":
        engine = engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as conn:
        if how == "connection":
            conn = conn.execution_options(isolation_level="AUTOCOMMIT")
        with conn.begin(), pytest.raises(EnqueueError, match='without isolation_level="AUTOCOMMIT"'):
            outbox.enqueue(conn, "t", {})


def test_an_asynchronous_library_that_nobody_knows_is_refused():
    class Other:
        def cursor(self) -> None: ...
        async def commit(self) -> None: ...
        async def rollback(self) -> None: ...

    with pytest.raises(
        EnqueueError, match="of the asynchronous libraries psycopg, SQLAlchemy and asyncpg are known"
    ):
        outbox.enqueue(Other(), "t", {})
