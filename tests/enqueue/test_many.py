"""Many events at once: by COPY where nothing can exist already, else by the function; no difference in the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from pulse_outbox import EnqueueError, NewEvent, Outbox
from pulse_outbox.bulk import PART, encode_events
from tests.enqueue.reading import rows

outbox = Outbox()
FAR = datetime(2040, 1, 1, tzinfo=UTC)

EVENTS = [
    NewEvent("a", {"n": 1, "text": "ü😀\\u0000", "float": 1.5e300, "none": None}),
    NewEvent("b", [1, 2], ordering_key="o", priority=9, headers={"traceparent": "00", "n": 1}),
    NewEvent("b", None, ordering_key="o", dead_key="skip", source="shop", target="mail"),
    NewEvent("a", "text", ordering_key="p", generation=2**40),
    NewEvent("c" * 200, {}, run_at=FAR),
    NewEvent("d", {}, run_at=datetime(2000, 1, 1, tzinfo=UTC)),
    NewEvent("d", {}, delay=3600),
    NewEvent("d", {}, delay=timedelta(days=36_525)),
]


def comparable(row: dict[str, Any], ids: dict[Any, int]) -> dict[str, Any]:
    """A row without what must differ: its id, its number and the time, and whether it was born parked.

    COPY parks what it knows to wait for an event of its own batch; the function only behind a long queue.
    """
    wait = round((row["next_run_at"] - row["created_at"]).total_seconds())
    return {
        **row,
        "event_id": ids[row["event_id"]],
        "idempotency_key": row["idempotency_key"] == str(row["event_id"]),
        "next_run_at": FAR if row["next_run_at"] == FAR else wait,
        "seq": None,
        "created_at": None,
        "parked": None,
    }


def test_copy_and_function_write_the_same_rows(testbed, monkeypatch):
    """A reader can't tell how an event was written."""
    from pulse_outbox.connections import psycopg as route

    written, parked = [], []
    for copy_works in (True, False):
        monkeypatch.setattr(route, "_copies", lambda _, works=copy_works: works)
        with testbed.database() as dsn, psycopg.connect(dsn) as conn:
            ids = outbox.enqueue_many(conn, EVENTS)
            order = {event_id: number for number, event_id in enumerate(ids)}
            written.append([comparable(row, order) for row in rows(conn)])
            parked.append([row["parked"] for row in rows(conn)])

    assert written[0] == written[1]
    assert [row["event_id"] for row in written[0]] == list(range(len(EVENTS)))
    assert parked == [[False, False, True, False, False, False, False, False], [False] * 8]
    assert [row["next_run_at"] for row in written[0]] == [0, 0, 0, 0, FAR, 0, 3600, 36_525 * 86_400]


def test_the_producers_budget_is_written_either_way(conn):
    """The dispatcher stamps it into force when it claims."""
    outbox.enqueue_many(conn, [NewEvent("t", 1, max_attempts=7)])
    outbox.enqueue_many(conn, [NewEvent("t", 1, max_attempts=7, event_id=uuid4())])

    assert [row["producer_max_attempts"] for row in rows(conn)] == [7, 7]


def test_ids_come_back_in_order_and_rows_are_numbered_in_it(conn):
    """Ordering keys rely on `seq`."""
    ids = outbox.enqueue_many(conn, (NewEvent("t", {"n": n}) for n in range(500)))

    assert [row["event_id"] for row in rows(conn)] == ids
    assert [row["payload"]["n"] for row in rows(conn)] == list(range(500))


def test_given_keys_and_ids_are_looked_for(conn):
    """In what is there and within the batch; the order of the others holds."""
    there, given = outbox.enqueue(conn, "t", "there", idempotency_key="k0"), uuid4()
    ids = outbox.enqueue_many(
        conn,
        [
            NewEvent("t", 0, idempotency_key="k0"),
            NewEvent("t", 1),
            NewEvent("t", 2, idempotency_key="k1"),
            NewEvent("t", 3, idempotency_key="k1"),
            NewEvent("t", 4, event_id=given),
            NewEvent("t", 5, event_id=given),
        ],
    )

    assert (ids[0], ids[2], ids[4], ids[5]) == (there, ids[3], given, given)
    assert [row["payload"] for row in rows(conn)] == ["there", 1, 2, 4]


def test_one_bad_event_refuses_all_before_any_sql(conn):
    """And says which one."""
    events = [NewEvent("t", 1), NewEvent("t", {"a": ["\0"]}), NewEvent("t", 3)]

    with pytest.raises(EnqueueError, match=r"events\[1\]: payload\.a\[0\]: a NUL"):
        outbox.enqueue_many(conn, events)
    assert conn.info.transaction_status == TransactionStatus.IDLE

    mistyped: Any = [("t", 1)]
    with pytest.raises(EnqueueError, match=r"events\[0\]: a NewEvent is needed, not tuple"):
        outbox.enqueue_many(conn, mistyped)


def test_nothing_to_write_is_fine(conn):
    """A loop that found nothing."""
    assert outbox.enqueue_many(conn, []) == []
    assert conn.info.transaction_status == TransactionStatus.IDLE


def test_the_transaction_is_the_callers(conn, connect):
    """COPY or not."""
    outbox.enqueue_many(conn, EVENTS)
    assert rows(connect()) == []
    conn.rollback()

    assert rows(conn) == []
    with pytest.raises(EnqueueError, match="autocommit"):
        outbox.enqueue_many(connect(autocommit=True), EVENTS)


@pytest.mark.parametrize("options", [{"client_encoding": "latin1"}, {"cursor_factory": psycopg.RawCursor}])
def test_the_settings_of_the_connection_do_not_matter(connect, options):
    """A COPY in another encoding would write other characters."""
    conn = connect(**options)
    outbox.enqueue_many(conn, [NewEvent("t", "ü", headers={"ü": "ü"})])
    conn.commit()

    [row] = rows(connect())
    assert (row["payload"], row["headers"]) == ("ü", {"ü": "ü"})


def test_a_pipeline_is_no_obstacle(connect):
    """COPY is not possible in one."""
    conn = connect(autocommit=True)
    with conn.pipeline(), conn.transaction():
        conn.execute("select 1")
        ids = outbox.enqueue_many(conn, [NewEvent("t", 1), NewEvent("t", 2)])

    assert [row["event_id"] for row in rows(conn)] == ids


def test_the_producers_role_suffices(conn):
    """COPY needs INSERT on exactly the columns that it writes."""
    conn.execute("set local role pulse_producer")

    assert len(outbox.enqueue_many(conn, EVENTS)) == len(EVENTS)


async def test_enqueue_many_async_obeys_the_same_rules(aconn):
    """By COPY, by the function, with and without times."""
    await outbox.enqueue_many_async(aconn, EVENTS)
    await outbox.enqueue_many_async(aconn, [NewEvent("t", 1)])
    ids = await outbox.enqueue_many_async(aconn, [NewEvent("t", 1, idempotency_key="k")] * 2)
    async with aconn.pipeline():
        await aconn.execute("select 1")
        await outbox.enqueue_many_async(aconn, [NewEvent("t", 1)])

    assert ids[0] == ids[1]
    assert await outbox.enqueue_many_async(aconn, []) == []
    cursor = await aconn.execute("select count(*) from pulse.outbox")
    assert await cursor.fetchone() == (len(EVENTS) + 3,)


@pytest.mark.parametrize("key", [None, "k"])
def test_a_sleeping_dispatcher_is_woken(conn, connect, key):
    """By COPY as by the function."""
    conn.execute(
        "insert into pulse.dispatcher (worker, host, pid, version, topics, sleeping)"
        " values ('w', 'h', 1, '0.1.0', '{t}', true)"
    )
    listener = connect(autocommit=True)
    listener.execute("listen pulse_outbox_wake")
    outbox.enqueue_many(conn, [NewEvent("t", 1, idempotency_key=key)])
    conn.commit()

    assert [notify.channel for notify in listener.notifies(timeout=10, stop_after=1)] == ["pulse_outbox_wake"]


def test_payloads_of_a_generator_are_not_kept():
    """Only their JSON is, but for a part: an application may stream what would not fit into memory as objects."""

    @dataclass(eq=False)
    class Payload:
        n: int

    alive: WeakSet[Payload] = WeakSet()
    most = 0

    def events() -> Iterator[NewEvent]:
        nonlocal most
        for n in range(5 * PART):
            payload = Payload(n=n)
            alive.add(payload)
            yield NewEvent("t", payload)
            most = max(most, len(alive))

    encode_events(events(), 1000)

    assert 1 <= most <= 2 * PART + 3
