"""The same rules on every connection that an application may have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from pulse_outbox import EnqueueError, Event, NewEvent, Outbox, SchemaError, TransactionNeeded, bulk, enqueue
from pulse_outbox.connections import Ask
from tests.connections.drivers import DRIVERS, Driver, Open, opening
from tests.enqueue.reading import rows
from tests.support.testbed import Testbed

outbox = Outbox()


@pytest.fixture(scope="module")
def shared_dsn(testbed: Testbed) -> Iterator[str]:
    """One database for all of them, empty at the beginning of each test."""
    with testbed.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create table orders (id integer)")
        yield dsn


@pytest.fixture
def watcher(shared_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """Another connection, which sees what was committed."""
    with psycopg.connect(shared_dsn, autocommit=True) as conn:
        conn.execute("truncate pulse.outbox, pulse.event_handled, orders")
        yield conn


@pytest.fixture
def open_driver() -> Iterator[Open]:
    with opening() as open_one:
        yield open_one


@pytest.fixture(params=DRIVERS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[Driver]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def driver(kind: type[Driver], open_driver: Open, shared_dsn: str, watcher: object) -> Driver:
    return open_driver(kind, shared_dsn)


def orders(watcher: psycopg.Connection[Any]) -> list[Any]:
    return [number for (number,) in watcher.execute("select id from orders order by id")]


def test_an_event_commits_with_the_data(driver, watcher):
    driver.execute("insert into orders values (7)")
    event_id = driver.enqueue(outbox, "order.paid", {"order": 7, "text": "ü % \\ $1 'x'"})
    assert rows(watcher) == [], "nothing is committed by enqueue itself"
    driver.commit()

    [row] = rows(watcher)
    assert isinstance(event_id, UUID)
    assert (row["event_id"], row["topic"]) == (event_id, "order.paid")
    assert row["payload"] == {"order": 7, "text": "ü % \\ $1 'x'"}
    assert orders(watcher) == [7]


def test_an_event_alone_commits_too(driver, watcher):
    """Without a statement of the application's before it: the transaction begins with the event."""
    driver.enqueue(outbox, "one")
    driver.commit()
    driver.enqueue_many(outbox, [NewEvent("many", 1)])
    driver.commit()

    assert [row["topic"] for row in rows(watcher)] == ["one", "many"]


def test_events_alone_roll_back_too(driver, watcher):
    """COPY may not overtake the transaction that a library begins with its first statement."""
    driver.enqueue_many(outbox, [NewEvent("t", 1)])
    driver.rollback()
    driver.enqueue(outbox, "t")
    driver.rollback()

    assert rows(watcher) == []


def test_a_delay_may_be_zero(driver, watcher):
    """Computed ones are, at times."""
    driver.enqueue(outbox, "one", delay=0)
    driver.enqueue_many(outbox, [NewEvent("many", 1, delay=timedelta(0))])
    driver.enqueue_many(outbox, [NewEvent("keyed", 1, delay=0, idempotency_key="k")])
    driver.commit()

    assert [row["topic"] for row in rows(watcher)] == ["one", "many", "keyed"]


def test_a_rolled_back_event_never_was(driver, watcher):
    driver.execute("insert into orders values (7)")
    driver.enqueue(outbox, "t")
    driver.enqueue_many(outbox, [NewEvent("t", 1), NewEvent("t", 2, idempotency_key="k")])
    driver.enqueue_many(outbox, [NewEvent("t", 1)])
    driver.rollback()
    driver.commit()

    assert (rows(watcher), orders(watcher)) == ([], [])


def test_a_savepoint_takes_its_events_with_it(driver, watcher):
    driver.enqueue(outbox, "before")
    with suppress(KeyError), driver.savepoint():
        driver.enqueue(outbox, "inside")
        driver.enqueue_many(outbox, [NewEvent("inside", 1)])
        raise KeyError
    with driver.savepoint():
        driver.enqueue(outbox, "kept")
    driver.enqueue(outbox, "after")
    driver.commit()

    assert [row["topic"] for row in rows(watcher)] == ["before", "kept", "after"]


def test_autocommit_is_refused_in_the_same_words(kind, open_driver, shared_dsn, watcher):
    """With each library's own remedy."""
    driver = open_driver(kind, shared_dsn, autocommit=True)
    words = (
        "the connection is in autocommit and no transaction is open, so the event would not commit together "
        "with your data: "
    )
    for refused in (
        lambda: driver.enqueue(outbox, "t"),
        lambda: driver.enqueue_many(outbox, [NewEvent("t", 1)]),
    ):
        with pytest.raises(EnqueueError) as caught:
            refused()
        assert str(caught.value).startswith(words)
        assert driver.begin in str(caught.value)
        assert str(caught.value).endswith(", or say outside_transaction=True if that is meant")
    with pytest.raises(TransactionNeeded, match="the record would not commit together with your work"):
        driver.first_time(outbox, event_of("k"), "effect")

    assert rows(watcher) == []
    driver.enqueue(outbox, "meant", outside_transaction=True)
    driver.enqueue_many(outbox, [NewEvent("meant", 1)], outside_transaction=True)
    assert [row["topic"] for row in rows(watcher)] == ["meant", "meant"]


def test_an_aborted_transaction_is_refused(driver, watcher):
    """Its commit would be a rollback."""
    with pytest.raises(Exception, match="division by zero"):
        driver.execute("select 1 / 0")

    for refused in (
        lambda: driver.enqueue(outbox, "t"),
        lambda: driver.enqueue_many(outbox, [NewEvent("t", 1)]),
    ):
        with pytest.raises(EnqueueError, match=r"transaction has failed.*: roll back and start again"):
            refused()
    driver.rollback()
    driver.enqueue(outbox, "again")
    driver.commit()
    assert [row["topic"] for row in rows(watcher)] == ["again"]


def test_a_closed_connection_is_refused(driver):
    driver.enqueue(outbox, "t")
    driver.close()

    with pytest.raises(EnqueueError, match="the connection is closed: write the event before closing it"):
        driver.enqueue(outbox, "t")


def test_the_same_key_twice_is_one_event(driver, watcher):
    first = driver.enqueue(outbox, "t", 1, idempotency_key="k")
    again = driver.enqueue(outbox, "t", 2, idempotency_key="k")
    driver.commit()
    many = driver.enqueue_many(outbox, [NewEvent("t", 3, idempotency_key="k"), NewEvent("t", 4)])
    driver.commit()

    assert first == again == many[0] != many[1]
    assert [row["payload"] for row in rows(watcher)] == [1, 4]


HOSTILE = [
    NewEvent("a", {"n": 1, "text": "ü😀\\u0000\t\n\r\\N\\.", "float": 1.5, "none": None}),
    NewEvent("b\t", [1, 2], ordering_key="o\n\\", priority=9, headers={"traceparent": "00", "n": 1}),
    NewEvent("b", None, ordering_key="\\N", dead_key="skip", source="shop\r", target="''"),
    NewEvent("a", "text", generation=2**40, max_attempts=7),
    NewEvent("d", {}, run_at=datetime(2040, 1, 1, tzinfo=UTC)),
    NewEvent("d", {}, delay=3600.5),
]


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    wait = round((row["next_run_at"] - row["created_at"]).total_seconds())
    changing = dict.fromkeys(("event_id", "idempotency_key", "seq", "created_at", "parked"))
    return {**row, **changing, "next_run_at": "far" if wait > 10_000 else wait}


def test_many_are_written_as_one_at_a_time(driver, watcher):
    """By COPY, by the function, one by one: a reader can't tell; and each route copies where its driver can."""
    ids = driver.enqueue_many(outbox, HOSTILE)
    driver.commit()
    copied = [comparable(row) for row in rows(watcher)]
    assert [row["event_id"] for row in rows(watcher)] == ids
    given = [NewEvent(**{**fields(event), "event_id": uuid4()}) for event in HOSTILE]
    assert driver.enqueue_many(outbox, given) == [event.event_id for event in given]
    for event in HOSTILE:
        driver.enqueue(outbox, **fields(event))
    driver.commit()

    written = [comparable(row) for row in rows(watcher)]
    assert written[:6] == written[6:12] == written[12:] == copied
    assert copied[0]["payload"] == HOSTILE[0].payload
    assert [row["next_run_at"] for row in copied] == [0, 0, 0, 0, "far", 3600]


def fields(event: NewEvent) -> dict[str, Any]:
    return event._asdict()


def test_many_go_by_copy_where_the_driver_has_it(driver, watcher):
    """Of one ordering key, COPY parks the second itself; the function leaves a short queue alone."""
    driver.enqueue_many(outbox, [NewEvent("t", 1, ordering_key="o"), NewEvent("t", 2, ordering_key="o")])
    driver.commit()

    assert [row["parked"] for row in rows(watcher)] == [False, driver.copies]
    assert driver.enqueue_many(outbox, []) == []


@pytest.mark.parametrize("outside", [False, True])
def test_a_large_batch_is_written_in_parts(driver, watcher, monkeypatch, outside):
    """No value of a gigabyte is sent. What may be outside a transaction stays whole, to be written or not."""
    sent: list[str] = []

    def ask(text: str, values: tuple[str, ...], **options: bool) -> Ask:
        sent.extend(values)
        return Ask(text, values, **options)

    monkeypatch.setattr(enqueue, "STATEMENT_CHARACTERS", 1000)
    monkeypatch.setattr(bulk, "Ask", ask)
    sizes = [10, 300, 10, 2000, 10, 400, 400]
    given = [NewEvent("t", "x" * size, idempotency_key=f"k{n}") for n, size in enumerate(sizes)]
    ids = driver.enqueue_many(outbox, given, outside_transaction=outside)
    driver.commit()

    assert [row["event_id"] for row in rows(watcher)] == ids
    assert [row["payload"] for row in rows(watcher)] == [event.payload for event in given]
    assert [len(json.loads(text)) for text in sent] == ([7] if outside else [3, 1, 2, 1])


def test_a_stream_is_written_whole_or_not_at_all(driver, watcher):
    """By COPY under a savepoint, or as any batch where the driver has no COPY."""
    events = [NewEvent("t", n) for n in range(2 * bulk.FIRST_CHECKED)]
    driver.execute("insert into orders values (7)")
    with pytest.raises(EnqueueError, match=rf"^events\[{len(events)}\]: payload: a NUL"):
        driver.enqueue_many(outbox, iter([*events, NewEvent("t", "\0")]), stream=True)
    driver.execute("insert into orders values (8)")
    ids = driver.enqueue_many(outbox, iter(events), stream=True)
    driver.commit()

    assert orders(watcher) == [7, 8]
    assert [row["event_id"] for row in rows(watcher)] == ids
    assert [row["payload"] for row in rows(watcher)] == [event.payload for event in events]


def test_ordering_keys_and_ids_are_kept(driver, watcher):
    given = uuid4()
    first = driver.enqueue(outbox, "t", 1, ordering_key="o")
    second = driver.enqueue(outbox, "u", 2, ordering_key="o", event_id=given)
    driver.commit()

    assert second == given == driver.enqueue(outbox, "u", 3, event_id=given)
    assert [(row["event_id"], row["ordering_key"]) for row in rows(watcher)] == [(first, "o"), (given, "o")]


def test_a_refused_payload_leaves_the_transaction_usable(driver, watcher):
    """It is refused before any SQL."""
    small = Outbox(max_payload_bytes=100)
    driver.execute("insert into orders values (7)")
    with pytest.raises(EnqueueError, match="above the limit of 100"):
        driver.enqueue(small, "t", "x" * 200)
    with pytest.raises(EnqueueError, match=r"events\[0\]: payload: a NUL"):
        driver.enqueue_many(small, [NewEvent("t", "\0")])
    driver.execute("insert into orders values (8)")
    driver.commit()

    assert (orders(watcher), rows(watcher)) == ([7, 8], [])


def event_of(key: str) -> Event[Any]:
    return Event(UUID(int=1), "t", {}, {}, key, None, 1, 5, 0, 1, datetime(2030, 1, 1, tzinfo=UTC))


def test_the_first_time_is_known(driver):
    assert driver.first_time(outbox, event_of("k"), "effect") is True
    assert driver.first_time(outbox, event_of("k"), "effect") is False
    driver.rollback()
    assert driver.first_time(outbox, event_of("k"), "effect") is True
    driver.commit()
    assert driver.first_time(outbox, event_of("k"), "effect") is False


def test_an_unmigrated_schema_is_told(driver):
    """With the command; each time in a transaction that then has to be rolled back."""
    elsewhere = Outbox("elsewhere")
    for refused in (
        lambda: driver.enqueue(elsewhere, "t"),
        lambda: driver.enqueue_many(elsewhere, [NewEvent("t", 1)]),
    ):
        with pytest.raises(EnqueueError, match="run `pulse-outbox migrate --schema elsewhere`") as caught:
            refused()
        assert caught.value.__cause__ is not None
        driver.rollback()
    with pytest.raises(SchemaError, match="run `pulse-outbox migrate --schema elsewhere`"):
        driver.first_time(elsewhere, event_of("k"), "effect")
    driver.rollback()


def test_what_the_function_refuses_is_ours(driver, monkeypatch):
    """PO003 of the SQL function becomes BadArgument whatever the driver wraps it into."""
    from pulse_outbox import BadArgument, events

    monkeypatch.setattr(events, "_check_integer", lambda *_: None)
    with pytest.raises(BadArgument, match=r"^priority must be between -9 and 9$"):
        driver.enqueue(outbox, "t", priority=99)
    driver.rollback()


def test_other_errors_reach_the_caller_as_they_are(driver):
    """An application's own retry looks for them."""
    driver.execute("set transaction read only")

    with pytest.raises(Exception, match="read-only") as caught:
        driver.enqueue(outbox, "t")
    assert not type(caught.value).__module__.startswith("pulse_outbox")
    driver.rollback()
