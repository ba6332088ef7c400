"""Connections as applications really have them: with codecs and factories of their own, shared, pooled, mixed."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import asyncpg
import pg8000.dbapi
import psycopg
import psycopg2.extras
import pytest
import sqlalchemy as sa
from psycopg.types.json import set_json_dumps
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool, StaticPool

from pulse_outbox import EnqueueError, NewEvent, Outbox
from tests.connections import drivers
from tests.connections.drivers import parts_of, url_of, use_django
from tests.connections.test_refused import Base, Order
from tests.enqueue.reading import rows

outbox = Outbox()
PAYLOAD = {"ü": ["%s", None, {"a": 1}]}
MANY = [NewEvent("t", PAYLOAD, headers={"h": 1}), NewEvent("t", PAYLOAD, headers={"h": 1}, delay=1)]


def check(conn: psycopg.Connection[Any], count: int) -> None:
    """All events arrived as they were meant."""
    written = rows(conn)
    assert len(written) == count
    assert all(row["payload"] == PAYLOAD and row["headers"] == {"h": 1} for row in written)


# Mixed


def test_two_drivers_in_one_process_and_transaction_each(dsn, conn):
    """Each event belongs to the transaction that it was written in."""
    with drivers.opening() as open_driver:
        opened = [open_driver(kind, dsn) for kind in drivers.DRIVERS if kind is not drivers.DjangoNamed]
        for number, driver in enumerate(opened):
            driver.enqueue(outbox, type(driver).__name__, number)
        for driver in opened[::2]:
            driver.commit()
        for driver in opened[1::2]:
            driver.rollback()

    kept = [type(driver).__name__ for driver in opened[::2]]
    assert sorted(row["topic"] for row in rows(conn)) == sorted(kept)


# SQLAlchemy


def test_a_session_flushes_nothing_of_its_own(dsn):
    """Objects that wait for the application's flush still do."""
    engine = sa.create_engine(url_of(dsn, "psycopg"), poolclass=NullPool)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        order = Order(id=7)
        session.add(order)
        outbox.enqueue(session, "t", 1)
        outbox.enqueue_many(session, [NewEvent("t", 2)])
        assert order in session.new
        session.commit()

    with psycopg.connect(dsn) as conn:
        assert [row["payload"] for row in rows(conn)] == [1, 2]


def test_a_scoped_session_is_each_threads_own(dsn, conn):
    engine = sa.create_engine(url_of(dsn, "psycopg"), pool_size=4)
    registry = scoped_session(sessionmaker(engine))

    def request(number: int) -> None:
        outbox.enqueue(registry, "t", number)
        registry.commit() if number % 2 else registry.rollback()
        registry.remove()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(request, range(20)))
    engine.dispose()

    assert sorted(row["payload"] for row in rows(conn)) == list(range(1, 20, 2))


def test_a_session_on_a_tests_connection_is_rolled_back_with_it(dsn, conn):
    """The pattern of SQLAlchemy's own manual for tests."""
    engine = sa.create_engine(url_of(dsn, "psycopg"), poolclass=NullPool)
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            outbox.enqueue(session, "t", 1)
            outbox.enqueue_many(session, [NewEvent("t", 2)])
            session.commit()
        [count] = connection.exec_driver_sql("select count(*) from pulse.outbox").one()
        outer.rollback()

    assert (count, rows(conn)) == (2, [])


def test_a_raw_connection_of_the_pool_is_its_drivers(dsn, conn):
    engine = sa.create_engine(url_of(dsn, "psycopg"), poolclass=StaticPool)
    raw = engine.raw_connection()
    outbox.enqueue(raw, "t", 1)
    raw.commit()
    raw.close()
    engine.dispose()

    assert len(rows(conn)) == 1


@pytest.mark.parametrize("name", ["psycopg", "asyncpg"])
async def test_synchronous_code_inside_an_async_session(dsn, conn, name):
    """`run_sync` hands it a Session on an asynchronous driver."""
    engine = create_async_engine(url_of(dsn, name), poolclass=NullPool)

    def save(session: Session) -> None:
        outbox.enqueue(session, "t", PAYLOAD, headers={"h": 1})
        outbox.enqueue_many(session, MANY)

    async with AsyncSession(engine) as session, session.begin():
        await session.run_sync(save)

    check(conn, 3)


def test_sqlalchemy_sees_the_statement(dsn):
    """Its events and echo are where people look."""
    engine = sa.create_engine(url_of(dsn, "psycopg"), poolclass=NullPool)
    seen: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    with engine.begin() as connection:
        outbox.enqueue(connection, "t", 1)

    assert sum("outbox_enqueue" in statement for statement in seen) == 1


# asyncpg


async def test_codecs_of_the_application_change_nothing(dsn, conn):
    """asyncpg asks them for every value of their type."""
    raw = await asyncpg.connect(**parts_of(dsn))
    for kind in ("jsonb", "json", "uuid", "timestamptz", "interval", "int8", "float8"):
        await raw.set_type_codec(
            kind, schema="pg_catalog", encoder=lambda _: "'broken'", decoder=lambda _: object()
        )
    async with raw.transaction():
        await outbox.enqueue_async(raw, "t", PAYLOAD, headers={"h": 1}, delay=1)
        await outbox.enqueue_many_async(raw, MANY[:1])
        assert isinstance(
            await outbox.enqueue_async(raw, "t", PAYLOAD, headers={"h": 1}, idempotency_key="k"), uuid.UUID
        )
    await raw.close()

    check(conn, 3)


class CustomRecord(asyncpg.Record):  # type: ignore[misc]  # asyncpg ships no types
    def __getitem__(self, key: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize("options", [{"statement_cache_size": 0}, {"record_class": CustomRecord}])
async def test_settings_of_asyncpg_change_nothing(dsn, conn, options):
    """The first is what PgBouncer wants."""
    raw = await asyncpg.connect(**parts_of(dsn), **options)
    for _ in range(3):
        async with raw.transaction():
            await outbox.enqueue_async(raw, "t", PAYLOAD, headers={"h": 1})
            await outbox.enqueue_many_async(raw, MANY)
    await raw.close()

    check(conn, 9)


async def test_sqlalchemy_on_asyncpg_behind_a_pooler(dsn, conn):
    """As SQLAlchemy's manual sets it up for PgBouncer."""
    engine = create_async_engine(
        url_of(dsn, "asyncpg"),
        poolclass=NullPool,
        connect_args={"statement_cache_size": 0, "prepared_statement_cache_size": 0},
    )
    for _ in range(2):
        async with engine.begin() as connection:
            await outbox.enqueue_async(connection, "t", PAYLOAD, headers={"h": 1})
            await outbox.enqueue_many_async(connection, MANY)
    await engine.dispose()

    check(conn, 6)


# psycopg and the DB-API


def test_json_of_the_application_changes_nothing(conn, connect):
    """psycopg's encoder can be replaced on a connection."""
    set_json_dumps(lambda _: "broken", conn)
    outbox.enqueue(conn, "t", PAYLOAD, headers={"h": 1})
    outbox.enqueue_many(conn, MANY)
    outbox.enqueue_many(conn, [NewEvent("t", PAYLOAD, headers={"h": 1}, idempotency_key="k")])
    conn.commit()

    check(connect(), 4)


@pytest.mark.parametrize(
    "factory",
    [
        psycopg2.extras.RealDictCursor,
        psycopg2.extras.DictCursor,
        psycopg2.extras.NamedTupleCursor,
    ],
)
def test_cursors_of_the_application_change_nothing(dsn, conn, factory):
    raw = psycopg2.connect(dsn, cursor_factory=factory)
    outbox.enqueue(raw, "t", PAYLOAD, headers={"h": 1})
    outbox.enqueue_many(raw, MANY)
    raw.commit()
    raw.close()

    check(conn, 3)


def test_adapters_of_the_application_change_nothing(dsn, conn):
    """`register_adapter(dict, Json)` and the same for lists are common, and global."""
    raw = psycopg2.connect(dsn)
    adapters = psycopg2.extensions.adapters
    before = dict(adapters)
    for kind in (dict, list, tuple):
        psycopg2.extensions.register_adapter(kind, psycopg2.extras.Json)
    try:
        outbox.enqueue(raw, "t", PAYLOAD, headers={"h": 1})
        outbox.enqueue_many(raw, MANY)
        raw.commit()
    finally:
        adapters.clear()
        adapters.update(before)
        raw.close()

    check(conn, 3)


@pytest.mark.parametrize("kind", [drivers.Psycopg, drivers.Psycopg2, drivers.Pg8000, drivers.Asyncpg])
def test_a_transaction_that_was_opened_by_hand_is_one(dsn, conn, kind):
    """In autocommit, by a statement of the application's own."""
    with drivers.opening() as open_driver:
        driver = open_driver(kind, dsn, autocommit=True)
        driver.execute("begin")
        driver.enqueue(outbox, "t", PAYLOAD, headers={"h": 1})
        driver.execute("commit")
        driver.execute("begin")
        with pytest.raises(Exception, match="division by zero"):
            driver.execute("select 1 / 0")
        with pytest.raises(EnqueueError, match="transaction has failed"):
            driver.enqueue(outbox, "t", 1)
        driver.execute("rollback")

    check(conn, 1)


@pytest.mark.parametrize("style", ["format", "pyformat", "qmark", "numeric", "named"])
def test_every_paramstyle_is_understood(dsn, conn, monkeypatch, style):
    """pg8000 reads it from a variable that applications may set."""
    monkeypatch.setattr(pg8000.dbapi, "paramstyle", style)
    driver = drivers.Pg8000(dsn)
    driver.open()
    driver.enqueue(outbox, "t", PAYLOAD, headers={"h": 1})
    driver.enqueue_many(outbox, MANY)
    driver.commit()
    driver.dispose()

    check(conn, 3)


@pytest.mark.parametrize("kind", [drivers.Psycopg, drivers.Psycopg2, drivers.Asyncpg, drivers.SASession])
def test_a_hostile_search_path_changes_nothing(dsn, conn, kind):
    """Functions and operators of another schema that stand before the built-in ones are not called."""
    conn.execute(HOSTILE.encode())
    conn.commit()
    with drivers.opening() as open_driver:
        driver = open_driver(kind, dsn)
        driver.execute("set local search_path = hostile, pg_catalog")
        driver.enqueue(outbox, "t", PAYLOAD, headers={"h": 1}, delay=1)
        driver.enqueue_many(outbox, MANY)
        driver.enqueue_many(outbox, [NewEvent("t", PAYLOAD, headers={"h": 1}, idempotency_key="k")])
        driver.commit()

    check(conn, 4)


_CALLED = "returns {} language plpgsql as $$ begin raise exception 'called'; end $$;"
HOSTILE = "\n".join(
    [
        "create schema hostile;",
        "create function hostile.clock_timestamp() " + _CALLED.format("timestamptz"),
        "create function hostile.make_interval(secs float8) " + _CALLED.format("interval"),
        "create function hostile.json_to_recordset(json) " + _CALLED.format("setof record"),
        "create function hostile.json_array_elements_text(json) " + _CALLED.format("setof text"),
        "create function hostile.plus(timestamptz, interval) " + _CALLED.format("timestamptz"),
        "create operator hostile.+ (function = hostile.plus, leftarg = timestamptz, rightarg = interval);",
    ]
)


# Django


@contextmanager
def in_django(dsn: str, **options: Any) -> Iterator[Any]:
    from django.db import connection, connections

    use_django(dsn)
    before = dict(connections.settings["default"])
    connections.settings["default"].update(options)
    try:
        yield connection
    finally:
        connection.close()
        connections.settings["default"].update(before)


def test_django_counts_the_query(dsn):
    """Through Django's own cursor: its tests count, its toolbar shows."""
    from django.db import transaction
    from django.test.utils import CaptureQueriesContext

    with in_django(dsn) as connection, transaction.atomic(), CaptureQueriesContext(connection) as seen:
        outbox.enqueue(connection, "t", 1)

    assert ["outbox_enqueue" in query["sql"] for query in seen.captured_queries] == [True]


def test_django_without_autocommit_has_a_transaction(dsn, conn):
    from django.db import transaction

    with in_django(dsn) as connection:
        transaction.set_autocommit(False)
        outbox.enqueue(connection, "t", 1)
        outbox.enqueue_many(connection, [NewEvent("t", 2)])
        transaction.rollback()
        outbox.enqueue(connection, "t", 3)
        transaction.commit()

    assert [row["payload"] for row in rows(conn)] == [3]


def test_a_broken_atomic_block_is_refused(dsn):
    """Django refuses queries in it; so does enqueue, in its own words."""
    from django.db import transaction

    with in_django(dsn) as connection, transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(EnqueueError, match="transaction has failed"):
            outbox.enqueue(connection, "t", 1)


@pytest.mark.parametrize("binding", [True, False])
def test_a_persistent_connection_of_django_goes_on(dsn, conn, binding):
    """CONN_MAX_AGE keeps it between requests; one that died in between is closed by Django at the next request."""
    from django.db import close_old_connections, transaction

    with in_django(dsn, CONN_MAX_AGE=600, OPTIONS={"server_side_binding": binding}) as connection:
        for _ in range(3):
            with transaction.atomic():
                outbox.enqueue(connection, "t", PAYLOAD, headers={"h": 1})
            close_old_connections()
        conn.execute("select pg_terminate_backend(%s)", [connection.connection.info.backend_pid])
        with pytest.raises(Exception, match=r"terminat|closed"), transaction.atomic():
            outbox.enqueue(connection, "t", 1)
        close_old_connections()
        with transaction.atomic():
            outbox.enqueue(connection, "t", PAYLOAD, headers={"h": 1})

    check(conn, 4)


def test_a_view_in_an_atomic_request_rolls_back_with_it(dsn, conn):
    """ATOMIC_REQUESTS: the view's failure takes its event with it; a view outside of it is refused."""
    from django.core.handlers.base import BaseHandler
    from django.db import connection, transaction
    from django.http import HttpRequest, HttpResponse

    def view(request: Any, then: str) -> Any:
        outbox.enqueue(connection, then, 1)
        if then == "fail":
            raise KeyError
        return HttpResponse()

    with in_django(dsn, ATOMIC_REQUESTS=True):
        handler = BaseHandler()
        handler.make_view_atomic(view)(HttpRequest(), "succeed")
        with pytest.raises(KeyError):
            handler.make_view_atomic(view)(HttpRequest(), "fail")
        with pytest.raises(EnqueueError, match=r"use `with transaction\.atomic\(\):`"):
            handler.make_view_atomic(transaction.non_atomic_requests(view))(HttpRequest(), "refused")

    assert [row["topic"] for row in rows(conn)] == ["succeed"]


async def test_async_code_of_django_by_sync_to_async(dsn, conn):
    """What the refusal tells."""
    from asgiref.sync import sync_to_async
    from django.db import connection, transaction

    def save() -> None:
        use_django(dsn)
        with transaction.atomic():
            outbox.enqueue(connection, "t", 1)
        connection.close()

    await sync_to_async(save)()

    assert len(rows(conn)) == 1


# What a web process loads

PROGRAM = """
import asyncio, sys
{imports}
from pulse_outbox import NewEvent, Outbox

dsn = sys.argv[1]
{program}
packages = {{name.partition(".")[0] for name in sys.modules}}
print(*sorted(packages & set({watched!r})), *sorted(name for name in sys.modules if "pulse_outbox." in name))
"""
WATCHED = [
    "alembic",
    "asyncpg",
    "django",
    "pg8000",
    "psycopg",
    "psycopg2",
    "psycopg_pool",
    "sentry_sdk",
    "sqlalchemy",
    "structlog",
    "tenacity",
]
OUTBOX_MODULES = [
    "bulk",
    "connections",
    "connections.copying",
    "enqueue",
    "errors",
    "events",
    "failures",
    "handlers",
    "outbox",
    "retry",
    "trace",
]
PROGRAMS = {
    "psycopg": (
        "import psycopg",
        "with psycopg.connect(dsn) as conn: Outbox().enqueue_many(conn, [NewEvent('t', 1)])",
    ),
    "asyncpg": (
        "import asyncpg, json",
        """
async def main():
    conn = await asyncpg.connect(**json.loads(sys.argv[2]))
    async with conn.transaction():
        await Outbox().enqueue_async(conn, "t", 1)
    await conn.close()
asyncio.run(main())
""",
    ),
}


DJANGO_WITH_PSYCOPG2 = """
import json, sys
sys.modules["psycopg"] = None  # an installation without it: Django then takes psycopg2
import django
from django.conf import settings
settings.configure(DATABASES={"default": json.loads(sys.argv[1])})
django.setup()
from django.db import connection, transaction
from pulse_outbox import EnqueueError, NewEvent, Outbox

outbox = Outbox()
try:
    outbox.enqueue(connection, "refused", 0)
except EnqueueError as error:
    print(error)
with transaction.atomic():
    outbox.enqueue(connection, "t", 1)
    outbox.enqueue_many(connection, [NewEvent("t", 2), NewEvent("t", 3)])
try:
    with transaction.atomic():
        outbox.enqueue(connection, "t", 4)
        raise KeyError
except KeyError:
    print(type(connection.connection).__module__)
"""


def test_django_on_psycopg2_needs_no_psycopg(dsn, conn):
    """The older driver of Django's, in a process of its own because Django looks for the newer one first."""
    parts = parts_of(dsn)
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": parts["database"]} | {
        name.upper(): parts[name] for name in ("user", "password", "host", "port") if name in parts
    }
    done = subprocess.run(
        [sys.executable, "-c", DJANGO_WITH_PSYCOPG2, json.dumps(database)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    refusal, module = done.stdout.splitlines()
    assert "use `with transaction.atomic():`" in refusal
    assert module.startswith("psycopg2")
    assert [row["payload"] for row in rows(conn)] == [1, 2, 3]


@pytest.mark.parametrize("library", PROGRAMS)
def test_a_web_process_loads_its_own_library_and_no_other(dsn, library):
    """No worker, no Sentry, no library that the application has not: 100 ms and many megabytes each."""
    imports, program = PROGRAMS[library]
    code = PROGRAM.format(imports=imports, program=program, watched=WATCHED)
    done = subprocess.run(
        [sys.executable, "-c", code, dsn, json.dumps(parts_of(dsn))],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    wanted = [*OUTBOX_MODULES, f"connections.{library}"]
    assert done.stdout.split() == [library, *sorted(f"pulse_outbox.{name}" for name in wanted)]
