"""`first_time`: a handler's own record that its work is done, in the transaction that does it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
import pytest

from pulse_outbox import Event, Outbox, SchemaError, SettingsError, TransactionNeeded, schema
from tests.support.waiting import wait_until, wait_until_async

outbox = Outbox()


@outbox.handler("order.paid")
def receipt(event: Event) -> None: ...


NAME = outbox.handlers["order.paid"].name


def event_of(key: str = "k", topic: str = "order.paid") -> Event[Any]:
    return Event(UUID(int=1), topic, {}, {}, key, None, 1, 5, 0, 1, datetime(2030, 1, 1, tzinfo=UTC))


def recorded(conn: psycopg.Connection[Any], schema: str = "pulse") -> list[tuple[str, str]]:
    return conn.execute(
        psycopg.sql.SQL("select handler_name, idempotency_key from {} order by 1, 2").format(
            psycopg.sql.Identifier(schema, "event_handled")
        )
    ).fetchall()


def waits_for_lock(conn: psycopg.Connection[Any]) -> bool:
    return conn.execute("select exists (select from pg_locks where not granted)").fetchone() == (True,)


def test_the_first_time_is_recorded_under_the_handlers_name(conn, connect):
    first = outbox.first_time(conn, event_of())
    again = outbox.first_time(conn, event_of())
    assert recorded(connect()) == [], "nothing is committed by the call itself"
    conn.commit()

    assert (first, again) == (True, False)
    assert outbox.first_time(connect(), event_of()) is False
    assert recorded(conn) == [(NAME, "k")]


def test_another_key_or_another_name_is_another_effect(conn):
    assert outbox.first_time(conn, event_of("a"))
    assert outbox.first_time(conn, event_of("b"))
    assert outbox.first_time(conn, event_of("a"), name="second effect")
    assert not outbox.first_time(conn, event_of("a"), name="second effect")


def test_a_rolled_back_record_never_was(conn):
    """The work was rolled back with it, so it is still to be done. Also when only a savepoint is."""
    assert outbox.first_time(conn, event_of())
    conn.rollback()
    with conn.transaction(force_rollback=True):
        assert outbox.first_time(conn, event_of())

    assert outbox.first_time(conn, event_of())


@pytest.mark.parametrize("commits", [True, False])
def test_of_two_at_once_the_second_waits_for_the_first(conn, connect, commits):
    """Until the first has ended nobody can know whether the work is done."""
    other, watcher = connect(), connect(autocommit=True)
    assert outbox.first_time(conn, event_of())
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(outbox.first_time, other, event_of())
        wait_until(lambda: waits_for_lock(watcher))
        assert not asking.done()

        (conn.commit if commits else conn.rollback)()

        assert asking.result(10) is not commits


async def test_the_same_on_asynchronous_connections(aconn, dsn, connect):
    watcher = connect(autocommit=True)
    async with await psycopg.AsyncConnection.connect(dsn) as other:
        assert await outbox.first_time_async(aconn, event_of())
        asking = asyncio.create_task(outbox.first_time_async(other, event_of()))

        async def waits() -> bool:
            return waits_for_lock(watcher)

        await wait_until_async(waits)
        await aconn.commit()

        assert await asking is False


def test_it_works_in_a_pipeline_and_in_autocommit_with_a_transaction(connect):
    conn = connect(autocommit=True)
    with conn.pipeline(), conn.transaction():
        conn.execute("select 1")
        assert outbox.first_time(conn, event_of())
        assert not outbox.first_time(conn, event_of())

    assert recorded(conn) == [(NAME, "k")]


def test_the_schema_is_the_outboxs(dsn, conn):
    schema.migrate(dsn, schema="shop")
    elsewhere = Outbox("shop")

    assert elsewhere.first_time(conn, event_of(), name="mine")

    assert recorded(conn, "shop") == [("mine", "k")]
    assert recorded(conn) == []


def test_an_unregistered_topic_needs_a_name(conn):
    with pytest.raises(SettingsError, match=r"no handler of 'other'; give a name="):
        outbox.first_time(conn, event_of(topic="other"))

    assert outbox.first_time(conn, event_of(topic="other"), name="x")


@pytest.mark.parametrize("name", ["", "x" * 201, "a\0b"])
def test_a_bad_name_is_refused_before_any_sql(conn, name):
    with pytest.raises(SettingsError):
        outbox.first_time(conn, event_of(), name=name)

    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_the_longest_name_and_key_fit(conn):
    """PostgreSQL refuses index entries above 2,704 bytes."""
    assert outbox.first_time(conn, event_of("\N{EARTH GLOBE EUROPE-AFRICA}" * 400), name="\N{SNOWMAN}" * 200)


def test_a_connection_without_a_transaction_is_refused(connect):
    """The record would stay when the work is rolled back, and the work would never be done."""
    with pytest.raises(TransactionNeeded, match="autocommit"):
        outbox.first_time(connect(autocommit=True), event_of())


def test_other_connections_that_will_not_do(conn, connect):
    closed, failed = connect(), connect()
    closed.close()
    with pytest.raises(psycopg.Error):
        failed.execute("select 1 / 0")

    with pytest.raises(TransactionNeeded, match="closed"):
        outbox.first_time(closed, event_of())
    with pytest.raises(TransactionNeeded, match="roll back"):
        outbox.first_time(failed, event_of())
    with pytest.raises(TransactionNeeded, match=r"a connection is needed, not builtins\.str"):
        outbox.first_time("conn", event_of())  # type: ignore[arg-type]  # the mistake
    with conn.cursor().copy("copy pulse.pause from stdin"), pytest.raises(TransactionNeeded, match="COPY"):
        outbox.first_time(conn, event_of())


async def test_the_wrong_kind_names_the_right_call(conn, aconn):
    with pytest.raises(TransactionNeeded, match="await first_time_async"):
        outbox.first_time(aconn, event_of())
    with pytest.raises(TransactionNeeded, match="call first_time"):
        await outbox.first_time_async(conn, event_of())


def test_what_the_database_lacks_is_said(conn, empty_dsn):
    with psycopg.connect(empty_dsn) as empty, pytest.raises(SchemaError, match="pulse-outbox migrate"):
        outbox.first_time(empty, event_of())
    conn.execute("set role pulse_producer")
    with pytest.raises(TransactionNeeded, match=r"grant insert on pulse\.event_handled"):
        outbox.first_time(conn, event_of())
