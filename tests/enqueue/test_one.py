"""One event at a time: part of the caller's transaction, whatever the caller's connection is like."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row, scalar_row
from psycopg.types.string import TextLoader
from pydantic import BaseModel

from pulse_outbox import EnqueueError, Outbox
from tests.enqueue.reading import rows
from tests.support.waiting import wait_until

outbox = Outbox()


class OrderPaid(BaseModel):
    order_id: int


def test_an_event_is_committed_with_the_callers_data(conn, connect):
    """Either both exist or neither."""
    event_id = outbox.enqueue(conn, "order.paid", OrderPaid(order_id=7))
    assert rows(connect()) == [], "nothing is committed by enqueue itself"
    conn.commit()

    [row] = rows(connect())
    assert (row["event_id"], row["topic"], row["payload"]) == (event_id, "order.paid", {"order_id": 7})
    assert (row["status"], row["idempotency_key"], row["headers"]) == ("PENDING", str(event_id), {})
    assert event_id.version == 7


def test_a_rolled_back_event_never_was(conn):
    """Also when only a savepoint is rolled back."""
    outbox.enqueue(conn, "t", {})
    conn.rollback()
    kept = outbox.enqueue(conn, "t", {})
    with conn.transaction(force_rollback=True):
        outbox.enqueue(conn, "t", {})

    assert [row["event_id"] for row in rows(conn)] == [kept]


def test_a_plain_event_is_what_the_function_writes(conn):
    """An event with nothing but topic and payload is inserted without the function; nobody can tell."""
    outbox.enqueue(conn, "t", [1])
    outbox.enqueue(conn, "t", [1], event_id=uuid4())
    conn.execute("select pulse.outbox_enqueue('t', '[1]')")

    ours = [
        {
            name: value
            for name, value in row.items()
            if name not in ("event_id", "idempotency_key", "seq", "created_at", "next_run_at")
        }
        for row in rows(conn)
    ]
    assert ours[0] == ours[1] == ours[2]
    assert all(row["idempotency_key"] == str(row["event_id"]) for row in rows(conn))


@pytest.mark.parametrize("options", [{}, {"priority": 1}, {"idempotency_key": "k"}])
def test_a_sleeping_dispatcher_of_the_topic_is_woken(conn, connect, options):
    """Otherwise an event waits for the next poll."""
    conn.execute(
        """insert into pulse.dispatcher (worker, host, pid, version, topics, sleeping)
           values ('w', 'h', 1, '1', '{t}', true)"""
    )
    conn.commit()
    listener = connect(autocommit=True)
    listener.execute("listen pulse_outbox_wake")
    outbox.enqueue(conn, "other", {}, **options)
    conn.commit()
    listener.execute("select 1")
    assert list(listener.notifies(timeout=0)) == [], "nobody who serves this topic sleeps"

    event_id = outbox.enqueue(conn, "t", {}, **options)
    conn.commit()

    assert len(list(listener.notifies(timeout=10, stop_after=1))) == 1
    assert rows(conn)[-1]["event_id"] == event_id


def test_every_option_reaches_its_column(conn):
    """As the specification of the row names them."""
    event_id, run_at = uuid4(), datetime(2040, 1, 1, tzinfo=UTC)
    outbox.enqueue(
        conn,
        "t",
        [1],
        idempotency_key="k",
        ordering_key="o",
        headers={"traceparent": "00"},
        priority=-3,
        run_at=run_at,
        max_attempts=4,
        generation=6,
        source="shop",
        target="mail",
        event_id=event_id,
        dead_key="skip",
    )

    [row] = rows(conn)
    assert (row["event_id"], row["idempotency_key"], row["ordering_key"]) == (event_id, "k", "o")
    assert (row["headers"], row["priority"], row["next_run_at"]) == ({"traceparent": "00"}, -3, run_at)
    assert (row["producer_max_attempts"], row["generation"]) == (4, 6)
    assert (row["source"], row["target"], row["holds_key"]) == ("shop", "mail", False)


@pytest.mark.parametrize("delay", [90, 90.0, timedelta(seconds=90)])
def test_a_delay_counts_on_the_databases_clock(conn, delay):
    """From the time of the call, also late in a long transaction."""
    conn.execute("select pg_sleep(0.05)")
    outbox.enqueue(conn, "t", {}, delay=delay)

    [row] = rows(conn)
    assert timedelta(seconds=89.9) < row["next_run_at"] - row["created_at"] < timedelta(seconds=90.1)
    [started] = conn.execute("select transaction_timestamp()").fetchone()
    assert row["next_run_at"] - started > timedelta(seconds=90.04)


def test_the_same_key_twice_is_one_event(conn):
    """In one transaction and in the next; in another topic it is another event."""
    first = outbox.enqueue(conn, "t", {"n": 1}, idempotency_key="k")
    again = outbox.enqueue(conn, "t", {"n": 2}, idempotency_key="k")
    conn.commit()
    later = outbox.enqueue(conn, "t", {"n": 3}, idempotency_key="k")
    elsewhere = outbox.enqueue(conn, "u", {"n": 4}, idempotency_key="k")

    assert first == again == later != elsewhere
    assert [row["payload"] for row in rows(conn)] == [{"n": 1}, {"n": 4}]


def test_a_repeated_event_id_returns_the_event_that_is_there(conn):
    """A producer that lost the answer may ask again."""
    event_id = uuid4()

    assert outbox.enqueue(conn, "t", {"n": 1}, event_id=event_id) == event_id
    assert outbox.enqueue(conn, "t", {"n": 2}, event_id=event_id) == event_id
    assert [row["payload"] for row in rows(conn)] == [{"n": 1}]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_the_same_key_from_two_transactions_at_once(conn, connect, ending):
    """The second waits for the first to end, and is the event itself if the first is rolled back."""
    other = connect()
    waiting_pid = other.info.backend_pid
    first = outbox.enqueue(conn, "t", {"by": "first"}, idempotency_key="k")
    with ThreadPoolExecutor(1) as pool, connect(autocommit=True) as watcher:
        second = pool.submit(outbox.enqueue, other, "t", {"by": "second"}, idempotency_key="k")
        wait_until(
            lambda: (
                watcher.execute(
                    "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s", [waiting_pid]
                ).fetchone()
                == (True,)
            )
        )
        getattr(conn, ending)()
        answer = second.result(timeout=20)
    other.commit()

    [row] = rows(conn)
    assert answer == row["event_id"]
    assert (answer == first) is (ending == "commit")
    assert row["payload"] == {"by": "first" if ending == "commit" else "second"}


def test_a_refused_event_leaves_the_transaction_usable(conn):
    """The reason for checking before any SQL."""
    conn.execute("create temp table orders (id int)")
    hostile: list[tuple[str, Any, dict[str, Any]]] = [
        ("t", {"a": "\0"}, {}),
        ("t", {"a": float("nan")}, {}),
        ("t" * 10_000, {}, {}),
        ("t", {}, {"headers": {"a": "\ud800"}}),
        ("t", {}, {"priority": 99}),
        ("t", "x" * 100_000_000, {}),
    ]
    for topic, payload, options in hostile:
        with pytest.raises(EnqueueError):
            outbox.enqueue(conn, topic, payload, **options)
    conn.execute("insert into orders values (1)")

    assert conn.info.transaction_status == TransactionStatus.INTRANS
    assert rows(conn) == []


def test_a_refused_event_sends_nothing(conn):
    """Not even the BEGIN."""
    with pytest.raises(EnqueueError):
        outbox.enqueue(conn, "t", {"a": "\0"})

    assert conn.info.transaction_status == TransactionStatus.IDLE


def test_the_limit_of_the_payload_is_the_outboxs(conn):
    """One application's bulk is another's mistake."""
    Outbox(max_payload_bytes=3 * 1024 * 1024).enqueue(conn, "t", "x" * 2_000_000)

    with pytest.raises(EnqueueError, match="above the limit of 10"):
        Outbox(max_payload_bytes=10).enqueue(conn, "t", "x" * 9)


# The caller's connection


def test_autocommit_without_a_transaction_is_refused(connect):
    """The event would be committed even if the data is not."""
    conn = connect(autocommit=True)

    with pytest.raises(EnqueueError, match=r"with conn\.transaction\(\).*outside_transaction=True"):
        outbox.enqueue(conn, "t", {})
    assert rows(conn) == []


def test_autocommit_with_a_transaction_or_on_purpose_is_fine(connect):
    """Both say what is meant."""
    conn = connect(autocommit=True)
    with conn.transaction():
        outbox.enqueue(conn, "t", 1)
    outbox.enqueue(conn, "t", 2, outside_transaction=True)

    assert [row["payload"] for row in rows(connect())] == [1, 2]


def test_a_closed_connection_is_refused(connect):
    """Closed here, or by the server."""
    closed, killed = connect(), connect(autocommit=True)
    closed.close()
    with pytest.raises(psycopg.Error):
        killed.execute("select pg_terminate_backend(pg_backend_pid())")

    for conn in (closed, killed):
        with pytest.raises(EnqueueError, match="the connection is closed"):
            outbox.enqueue(conn, "t", {}, outside_transaction=True)


def test_an_aborted_transaction_is_refused(conn):
    """Its commit would be a rollback."""
    with pytest.raises(psycopg.Error):
        conn.execute("select 1 / 0")

    with pytest.raises(EnqueueError, match=r"has failed.*roll back"):
        outbox.enqueue(conn, "t", {})


def test_a_busy_connection_is_refused(conn):
    """In the middle of a COPY nothing else can be sent."""
    with (
        conn.cursor().copy("copy (select 1) to stdout"),
        pytest.raises(EnqueueError, match="in the middle of a COPY"),
    ):
        outbox.enqueue(conn, "t", {})


@pytest.mark.parametrize("thing", [None, "postgresql://", object()])
def test_what_is_no_connection_is_refused(thing: Any):
    """With the type that was given."""
    with pytest.raises(
        EnqueueError,
        match=r"a connection is needed, not (None|builtins\.\w+): pass the psycopg, SQLAlchemy, ",
    ):
        outbox.enqueue(thing, "t", {})


async def test_synchronous_and_asynchronous_are_told_apart(conn, aconn):
    """A coroutine that nobody awaits would write nothing."""
    wrong: Any = outbox

    with pytest.raises(EnqueueError, match="await enqueue_async"):
        wrong.enqueue(aconn, "t", {})
    with pytest.raises(EnqueueError, match="await enqueue_async"):
        wrong.enqueue_many(aconn, [])
    with pytest.raises(EnqueueError, match="call enqueue"):
        await wrong.enqueue_async(conn, "t", {})
    with pytest.raises(EnqueueError, match="call enqueue"):
        await wrong.enqueue_many_async(conn, [])
    with pytest.raises(EnqueueError, match="this is a cursor: pass its connection"):
        wrong.enqueue(conn.cursor(), "t", {})


async def test_enqueue_async_obeys_the_same_rules(aconn):
    """Only enqueue exists twice."""
    event_id = await outbox.enqueue_async(aconn, "t", {"n": 1}, idempotency_key="k", delay=60)
    assert await outbox.enqueue_async(aconn, "t", {"n": 2}, idempotency_key="k") == event_id
    await aconn.commit()
    await aconn.set_autocommit(True)

    with pytest.raises(EnqueueError, match="autocommit"):
        await outbox.enqueue_async(aconn, "t", {})
    async with aconn.pipeline(), aconn.transaction():
        await aconn.execute("select 1")
        await outbox.enqueue_async(aconn, "t", {"n": 3})
    await outbox.enqueue_async(aconn, "t", {"n": 4}, outside_transaction=True)
    cursor = await aconn.execute("select payload ->> 'n' from pulse.outbox order by seq")
    assert await cursor.fetchall() == [("1",), ("3",), ("4",)]


@pytest.mark.parametrize(
    "options",
    [
        {"row_factory": dict_row},
        {"row_factory": scalar_row},
        {"cursor_factory": psycopg.ClientCursor},
        {"cursor_factory": psycopg.RawCursor},
        {"prepare_threshold": 0},
        {"prepare_threshold": None},
        {"options": "-c search_path=nowhere -c timezone=Asia/Kathmandu"},
        {"options": "-c datestyle=german -c intervalstyle=sql_standard"},
        {"client_encoding": "latin1"},
    ],
)
def test_the_settings_of_the_connection_do_not_matter(connect, options):
    """It belongs to the application."""
    conn = connect(**options)
    ids = [outbox.enqueue(conn, "t", {"ü": "ü"}, delay=1.5) for _ in range(7)]
    conn.commit()

    written = rows(connect())
    assert [row["event_id"] for row in written] == ids
    assert {str(row["payload"]) for row in written} == {"{'ü': 'ü'}"}


def test_a_loader_of_the_application_for_uuid_does_not_matter(conn):
    """Some want strings everywhere; the id is still a UUID."""
    conn.adapters.register_loader("uuid", TextLoader)

    assert isinstance(outbox.enqueue(conn, "t", {}), UUID)


def test_a_pipeline_is_no_obstacle(connect):
    """Its statements are under way when enqueue looks at the connection's state."""
    conn = connect(autocommit=True)
    with conn.pipeline(), conn.transaction():
        conn.execute("select 1")
        outbox.enqueue(conn, "t", 1)
    with pytest.raises(EnqueueError, match="autocommit"), conn.pipeline():
        outbox.enqueue(conn, "t", 2)

    assert [row["payload"] for row in rows(conn)] == [1]


# The database


def test_an_unmigrated_database_is_told(empty_dsn):
    """With the command."""
    with (
        psycopg.connect(empty_dsn) as conn,
        pytest.raises(EnqueueError, match=r"'pulse'.*pulse-outbox migrate"),
    ):
        outbox.enqueue(conn, "t", {})


def test_a_user_without_rights_is_told(conn):
    """With the grant."""
    conn.execute("create role nobody_here")
    conn.execute("set local role nobody_here")

    with pytest.raises(EnqueueError, match="grant pulse_producer to"):
        outbox.enqueue(conn, "t", {})


def test_the_producers_role_suffices(conn):
    """Least privilege: enqueue and nothing else."""
    conn.execute("set local role pulse_producer")
    outbox.enqueue(conn, "t", {}, idempotency_key="k", ordering_key="o", delay=1)

    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("select * from pulse.outbox")


def test_other_database_errors_reach_the_caller_as_they_are(conn):
    """An application's own retry looks for them."""
    conn.execute("set transaction read only")

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        outbox.enqueue(conn, "t", {})
