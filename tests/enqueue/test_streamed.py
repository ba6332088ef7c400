"""A stream of events is written while it is read: all of it or nothing, and the transaction stays usable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
import psycopg
import pytest
from psycopg.pq import TransactionStatus

from pulse_outbox import EnqueueError, NewEvent, Outbox
from pulse_outbox.bulk import FIRST_CHECKED, PART
from pulse_outbox.connections import Ask, Copy, Row
from tests.connections.drivers import parts_of
from tests.enqueue.reading import rows
from tests.support.waiting import wait_until_async

outbox = Outbox()
MANY = FIRST_CHECKED + 1300
LATE = MANY - 7
"""A place that is read when the COPY has long begun."""


def stream(number: int = MANY, late: NewEvent | Exception | None = None) -> Iterator[NewEvent]:
    """Events that are made as they are taken; *late* is or fails the one at that place."""
    for n in range(number):
        if n == LATE and isinstance(late, BaseException):
            raise late
        yield late if n == LATE and isinstance(late, NewEvent) else NewEvent("t", {"n": n})


@pytest.fixture
def statements(conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the connection is asked for."""
    from pulse_outbox.connections.psycopg import PsycopgRoute

    seen: list[str] = []
    ask, copy = PsycopgRoute.ask, PsycopgRoute.copy

    def watched_ask(self: PsycopgRoute, step: Ask) -> list[Row]:
        seen.append(step.text)
        return ask(self, step)

    def watched_copy(self: PsycopgRoute, step: Copy) -> None:
        seen.append(f"copy {step.columns}")
        copy(self, step)

    monkeypatch.setattr(PsycopgRoute, "ask", watched_ask)
    monkeypatch.setattr(PsycopgRoute, "copy", watched_copy)
    return seen


def number_of(statements: list[str], word: str) -> int:
    return sum(statement.startswith(word) for statement in statements)


def test_all_are_written_in_order(conn, statements):
    ids = outbox.enqueue_many(conn, stream(), stream=True)

    written = rows(conn)
    assert [row["event_id"] for row in written] == ids
    assert [row["idempotency_key"] for row in written] == [str(event_id) for event_id in ids]
    assert [row["payload"]["n"] for row in written] == list(range(MANY))
    assert (number_of(statements, "copy"), number_of(statements, "savepoint")) == (1, 1)


def test_the_events_are_read_while_the_server_writes(conn):
    """The server has got rows before the last event was made."""
    busy: list[bool] = []

    def events() -> Iterator[NewEvent]:
        for event in stream():
            busy.append(conn.info.transaction_status == TransactionStatus.ACTIVE)
            yield event

    outbox.enqueue_many(conn, events(), stream=True)

    assert not any(busy[: FIRST_CHECKED + 1])
    assert all(busy[FIRST_CHECKED + PART :])


@pytest.mark.parametrize(
    ("options", "number", "savepoints"),
    [
        ({"stream": True}, FIRST_CHECKED, 0),
        ({"stream": True}, FIRST_CHECKED + 1, 1),
        ({}, MANY, 0),
        ({"stream": True, "outside_transaction": True}, MANY, 0),
    ],
)
def test_a_savepoint_is_made_only_where_it_is_needed(conn, statements, options, number, savepoints):
    outbox.enqueue_many(conn, stream(number), **options)

    assert len(rows(conn)) == number
    assert (number_of(statements, "savepoint"), number_of(statements, "release")) == (savepoints, savepoints)
    assert number_of(statements, "copy") == 1


@pytest.mark.parametrize(
    ("options", "number"),
    [({"stream": True}, FIRST_CHECKED), ({}, MANY), ({"stream": True, "outside_transaction": True}, MANY)],
)
def test_where_nothing_could_be_undone_all_is_checked_before_any_sql(conn, options, number):
    events = [*stream(number - 1), NewEvent("t", "\0")]

    with pytest.raises(EnqueueError, match=rf"^events\[{number - 1}\]: payload: a NUL"):
        outbox.enqueue_many(conn, events, **options)

    assert conn.info.transaction_status == TransactionStatus.IDLE


BAD = [
    (NewEvent("t", {"a": ["\0"]}), EnqueueError, rf"^events\[{LATE}\]: payload\.a\[0\]: a NUL"),
    (NewEvent("t", float("nan")), EnqueueError, rf"^events\[{LATE}\]: payload: NaN"),
    (NewEvent("t", {"a": "x" * 2_000_000}), EnqueueError, rf"^events\[{LATE}\]: payload: .* above the limit"),
    (ZeroDivisionError("their own"), ZeroDivisionError, "^their own$"),
    (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    # The database's complaint about another table is not one about ours.
    (psycopg.errors.UndefinedTable("theirs"), psycopg.errors.UndefinedTable, "^theirs$"),
]


@pytest.mark.parametrize(("late", "error", "text"), BAD)
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "idle"])
def test_a_bad_late_event_refuses_all_and_nothing_else(conn, connect, late, error, text, begun):
    """What the transaction wrote before stays, and it can go on."""
    conn.execute("create table orders (id integer)")
    conn.commit()
    if begun:
        conn.execute("insert into orders values (1)")

    with pytest.raises(error, match=text):
        outbox.enqueue_many(conn, stream(late=late), stream=True)

    assert conn.info.transaction_status == TransactionStatus.INTRANS
    assert rows(conn) == []
    with pytest.raises(psycopg.errors.InvalidSavepointSpecification), conn.transaction():
        conn.execute("release savepoint pulse_outbox_enqueue_many")
    conn.execute("insert into orders values (2)")
    outbox.enqueue_many(conn, stream(), stream=True)
    conn.commit()
    watcher = connect()
    assert watcher.execute("select id from orders").fetchall() == ([(1,), (2,)] if begun else [(2,)])
    assert len(rows(watcher)) == MANY


def test_what_is_no_event_is_refused_late_too(conn):
    mistyped: Any = [*stream(), ("t", 1)]

    with pytest.raises(EnqueueError, match=rf"^events\[{MANY}\]: a NewEvent is needed, not tuple"):
        outbox.enqueue_many(conn, mistyped, stream=True)

    assert rows(conn) == []


def test_the_servers_refusal_leaves_the_transaction_usable_too(conn):
    conn.execute(
        "alter table pulse.outbox add constraint stumble check (payload <> cast('{\"n\": 1400}' as jsonb))"
    )

    with pytest.raises(psycopg.errors.CheckViolation):
        outbox.enqueue_many(conn, stream(), stream=True)

    assert conn.info.transaction_status == TransactionStatus.INTRANS
    assert rows(conn) == []


def test_the_savepoints_of_the_application_are_its_own(conn):
    """Also one of the same name."""
    conn.execute("savepoint pulse_outbox_enqueue_many")
    outbox.enqueue(conn, "first", 1)
    conn.execute("savepoint theirs")
    with pytest.raises(ZeroDivisionError):
        outbox.enqueue_many(conn, stream(late=ZeroDivisionError()), stream=True)
    assert [row["topic"] for row in rows(conn)] == ["first"]
    with conn.transaction():
        outbox.enqueue_many(conn, stream(), stream=True)
    assert len(rows(conn)) == MANY + 1

    conn.execute("rollback to savepoint theirs")
    assert [row["topic"] for row in rows(conn)] == ["first"]
    conn.execute("rollback to savepoint pulse_outbox_enqueue_many")
    assert rows(conn) == []


@pytest.mark.parametrize("use", ["execute", "commit", "enqueue"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_stream_that_uses_its_connection_is_told_so(conn, use, is_late):
    """psycopg would let it wait for itself, for ever. Before the COPY begins, and without a stream, it may."""

    def events() -> Iterator[NewEvent]:
        yield from stream(FIRST_CHECKED)
        if is_late:
            yield from stream(2 * PART)
        {
            "execute": lambda: conn.execute("select 1"),
            "commit": conn.commit,
            "enqueue": lambda: outbox.enqueue(conn, "t", 1),
        }[use]()
        yield from stream(10)

    if is_late:
        with pytest.raises(
            (psycopg.OperationalError, EnqueueError), match=r"already in progress|in the middle of"
        ):
            outbox.enqueue_many(conn, events(), stream=True)
        assert rows(conn) == []
        assert conn.info.transaction_status == TransactionStatus.INTRANS
        assert len(outbox.enqueue_many(conn, events())) == FIRST_CHECKED + 2 * PART + 10
    else:
        assert len(outbox.enqueue_many(conn, events(), stream=True)) == FIRST_CHECKED + 10


def test_a_lost_connection_says_why(dsn, connect):
    """And not that the savepoint is gone too."""
    conn = connect()

    def events() -> Iterator[NewEvent]:
        yield from stream()
        connect(autocommit=True).execute("select pg_terminate_backend(%s, 10000)", [conn.info.backend_pid])
        yield from stream(20_000)

    with pytest.raises(psycopg.errors.AdminShutdown):
        outbox.enqueue_many(conn, events(), stream=True)

    assert conn.closed


# What one part has to know of those before


@pytest.mark.parametrize("there", [False, True])
def test_a_key_in_a_later_part_is_looked_for(conn, there):
    """COPY can't do that: it ends, and the rest is written by the function."""
    first = outbox.enqueue(conn, "t", "there", idempotency_key="k") if there else None
    late = NewEvent("t", {"n": LATE}, idempotency_key="k")
    ids = outbox.enqueue_many(conn, stream(late=late), stream=True)

    written = rows(conn)[1 if there else 0 :]
    expected = [n for n in range(MANY) if not (there and n == LATE)]
    assert [row["payload"]["n"] for row in written] == expected
    assert [row["event_id"] for row in written] == [ids[n] for n in expected]
    assert len(set(ids)) == MANY
    assert not there or ids[LATE] == first


def test_a_bad_event_behind_a_late_key_refuses_all(conn):
    events = [*stream(late=NewEvent("t", 1, idempotency_key="k")), *stream(500), NewEvent("t", "\0")]

    with pytest.raises(EnqueueError, match=rf"^events\[{MANY + 500}\]"):
        outbox.enqueue_many(conn, iter(events), stream=True)

    assert rows(conn) == []
    assert conn.info.transaction_status == TransactionStatus.INTRANS


def test_columns_of_later_parts_are_added(conn, statements):
    """Each time the COPY ends and another begins with more columns; parts with fewer go into the same one."""
    events = [*stream()]
    changes: dict[int, dict[str, Any]] = {
        700: {"priority": 3},
        900: {"headers": {"a": 1}, "source": "shop"},
        1100: {"priority": -3},
        1300: {"target": "mail", "dead_key": "skip", "generation": 5, "max_attempts": 7},
    }
    for place, options in changes.items():
        events[place] = NewEvent("t", {"n": place}, **options)
    ids = outbox.enqueue_many(conn, events, stream=True)

    written = rows(conn)
    assert [row["event_id"] for row in written] == ids
    assert [row["payload"]["n"] for row in written] == list(range(MANY))
    assert {n: row["priority"] for n, row in enumerate(written) if row["priority"]} == {700: 3, 1100: -3}
    assert [n for n, row in enumerate(written) if row["headers"] or row["source"]] == [900]
    assert [n for n, row in enumerate(written) if row["target"] or not row["holds_key"]] == [1300]
    assert [n for n, row in enumerate(written) if row["generation"] or row["producer_max_attempts"]] == [1300]
    assert number_of(statements, "copy") == 4
    assert number_of(statements, "savepoint") == 1


def test_ordering_keys_wait_for_those_of_earlier_parts(conn):
    """COPY parks what it knows to wait for an event of its own batch, wherever in it."""
    keys = {10: "a", 800: "b", 810: "a", 1400: "b", 1401: "c"}
    events = [NewEvent("t", n, ordering_key=keys.get(n)) for n in range(MANY)]
    outbox.enqueue_many(conn, events, stream=True)

    written = rows(conn)
    assert {n: row["ordering_key"] for n, row in enumerate(written) if row["ordering_key"]} == keys
    assert [n for n, row in enumerate(written) if row["parked"]] == [810, 1400]


@pytest.mark.parametrize("place", [10, LATE])
def test_a_delay_in_any_part_counts_on_the_databases_clock(conn, place):
    events = [*stream()]
    events[place] = NewEvent("t", {"n": place}, delay=3600)
    outbox.enqueue_many(conn, events, stream=True)

    waits = [round((row["next_run_at"] - row["created_at"]).total_seconds()) for row in rows(conn)]
    assert {n: wait for n, wait in enumerate(waits) if wait} == {place: 3600}


def test_every_topic_of_a_stream_wakes_its_dispatcher(conn, connect):
    conn.execute(
        "insert into pulse.dispatcher (worker, host, pid, version, topics, sleeping)"
        " values ('w', 'h', 1, '0.1.0', '{late}', true)"
    )
    listener = connect(autocommit=True)
    listener.execute("listen pulse_outbox_wake")
    outbox.enqueue_many(conn, stream(late=NewEvent("late", 1)), stream=True)
    conn.commit()

    assert [notify.channel for notify in listener.notifies(timeout=10, stop_after=1)] == ["pulse_outbox_wake"]


# Asynchronous


async def test_a_stream_on_an_asynchronous_connection(aconn):
    with pytest.raises(EnqueueError, match=rf"^events\[{LATE}\]: payload: a NUL"):
        await outbox.enqueue_many_async(aconn, stream(late=NewEvent("t", "\0")), stream=True)
    assert aconn.info.transaction_status == TransactionStatus.INTRANS
    late = NewEvent("t", {"n": LATE}, idempotency_key="k", ordering_key="o", delay=1)
    ids = await outbox.enqueue_many_async(aconn, stream(late=late), stream=True)

    cursor = await aconn.execute("select event_id, payload from pulse.outbox order by seq")
    assert await cursor.fetchall() == [(event_id, {"n": n}) for n, event_id in enumerate(ids)]


@pytest.mark.parametrize("pauses", [*range(12), 20, 30])
async def test_cancelled_at_any_moment_nothing_of_it_is_there_and_the_transaction_goes_on(dsn, pauses):
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await conn.execute("create temporary table orders as select 1 as id")
        events = (NewEvent("t", {"n": n, "text": "x" * 20_000}) for n in range(MANY))
        writing = asyncio.ensure_future(outbox.enqueue_many_async(conn, events, stream=True))
        for _ in range(pauses):
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing

        assert conn.info.transaction_status == TransactionStatus.INTRANS
        cursor = await conn.execute("select count(*), (select count(*) from orders) from pulse.outbox")
        assert await cursor.fetchone() == (0, 1)


async def test_a_stream_on_asyncpg(dsn):
    conn = await asyncpg.connect(**parts_of(dsn))
    try:
        async with conn.transaction():
            await conn.execute("create temporary table orders as select 1 as id")
            with pytest.raises(EnqueueError, match=rf"^events\[{LATE}\]: payload: a NUL"):
                await outbox.enqueue_many_async(conn, stream(late=NewEvent("t", "\0")), stream=True)
            assert await conn.fetchval("select count(*) from pulse.outbox") == 0
            ids = await outbox.enqueue_many_async(
                conn, stream(late=NewEvent("t", {"n": LATE}, idempotency_key="k")), stream=True
            )

        written = await conn.fetch("select event_id, payload from pulse.outbox order by seq")
        assert [(row[0], json.loads(row[1])) for row in written] == [(i, {"n": n}) for n, i in enumerate(ids)]
    finally:
        await conn.close()


async def test_a_stream_on_asyncpg_is_cancelled(dsn):
    """In the middle of the COPY, which waits for a lock."""
    conn, other = await asyncpg.connect(**parts_of(dsn)), await asyncpg.connect(**parts_of(dsn))
    try:
        await other.execute("begin; lock table pulse.outbox")
        async with conn.transaction():
            await conn.execute("create temporary table orders as select 1 as id")
            writing = asyncio.ensure_future(outbox.enqueue_many_async(conn, stream(), stream=True))

            async def waits() -> bool:
                waiting = "select exists (select from pg_locks where pid = $1 and not granted)"
                return bool(await other.fetchval(waiting, conn.get_server_pid()))

            await wait_until_async(waits)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            await other.execute("rollback")

            assert await conn.fetchval("select count(*) from orders") == 1
            assert await conn.fetchval("select count(*) from pulse.outbox") == 0
    finally:
        await conn.close()
        await other.close()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_generator_may_use_an_object_again(conn, streamed):
    """An event is written as it was when it was taken."""

    def used_again() -> Iterator[NewEvent]:
        flat: dict[str, Any] = {}
        nested: dict[str, Any] = {"list": []}
        headers: dict[str, Any] = {}
        for n in range(MANY):
            flat["n"], nested["list"][:], headers["n"] = n, [n], n
            yield NewEvent("t", flat)
            yield NewEvent("t", nested)
            yield NewEvent("t", {}, headers=headers)

    outbox.enqueue_many(conn, used_again(), stream=streamed)

    written = rows(conn)
    assert [row["payload"] for row in written[::3]] == [{"n": n} for n in range(MANY)]
    assert [row["payload"] for row in written[1::3]] == [{"list": [n]} for n in range(MANY)]
    assert [row["headers"] for row in written[2::3]] == [{"n": n} for n in range(MANY)]


def test_what_nobody_takes_back_can_not_be_committed(conn, monkeypatch):
    """Interrupted right before it is rolled back, a refused batch leaves a failed transaction and no half of it."""
    from pulse_outbox.connections.psycopg import PsycopgRoute

    ask = PsycopgRoute.ask

    def interrupted(self: PsycopgRoute, step: Ask) -> list[Row]:
        if step.text.startswith("rollback"):
            raise KeyboardInterrupt
        return ask(self, step)

    monkeypatch.setattr(PsycopgRoute, "ask", interrupted)

    with pytest.raises(KeyboardInterrupt):
        outbox.enqueue_many(conn, stream(late=NewEvent("t", {"bad": "\0"})), stream=True)

    assert conn.info.transaction_status == TransactionStatus.INERROR


def test_both_hours_of_a_night_that_has_one_twice(conn):
    """Python takes the two times for equal."""
    first = datetime(2030, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    second = first.replace(fold=1)

    outbox.enqueue_many(conn, [NewEvent("t", {}, run_at=first), NewEvent("t", {}, run_at=second)])

    assert [row["next_run_at"].astimezone(UTC).hour for row in rows(conn)] == [0, 1]
