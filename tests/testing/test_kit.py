"""The kit on a database of the test's own: what it runs, when, and what it says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from pulse_outbox import (
    Event,
    EventNotFound,
    NewEvent,
    RetryPolicy,
    SettingsError,
    TransitionRefused,
    Verdict,
)
from pulse_outbox.testing import NeverEnds, TestKit
from tests.testing.shop import STEADY, Order, RetryLater, Shop, TerminalHandlerError


@pytest.fixture
def conn(outbox_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(outbox_dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture
def enqueue(shop: Shop, conn: psycopg.Connection[Any]) -> Any:
    """One event, committed."""

    def enqueue(topic: str, order_id: int = 7, **options: Any) -> UUID:
        return shop.outbox.enqueue(conn, topic, Order(order_id=order_id), outside_transaction=True, **options)

    return enqueue


# Running


@pytest.mark.parametrize("topic", ["order.sync", "order.async", "ledger.sync", "ledger.async", "order.gone"])
def test_runs_one_event_to_its_end(outbox_testkit, shop: Shop, enqueue, topic):
    ran = outbox_testkit.run(enqueue(topic))

    assert (ran.status, ran.attempt, ran.crashed_at) == ("COMPLETED", 1, None)
    assert shop.done == [7]
    assert outbox_testkit.drain() == []
    ran.raise_if_failed()


def test_runs_the_event_that_was_named(outbox_testkit, shop: Shop, enqueue):
    """Others of its lane are due as well, before and after it."""
    _, second, _ = [enqueue("order.sync", number) for number in (1, 2, 3)]

    outbox_testkit.run(second)

    assert shop.done == [2]
    assert [outbox_testkit.event(second).status] == ["COMPLETED"]


def test_a_transient_failure_waits_for_its_delay(outbox_testkit, shop: Shop, enqueue):
    event = enqueue("order.async")
    shop.trouble = ConnectionError("no route")

    ran = outbox_testkit.run(event)

    assert (ran.status, ran.retry_in) == ("RETRYING", timedelta(seconds=60))
    assert ran.verdict == Verdict(kind="transient", rule="default.transient", error_class="ConnectionError")
    assert ran.exception is shop.trouble
    with pytest.raises(ConnectionError):
        ran.raise_if_failed()
    with pytest.raises(SettingsError, match="is due in 0:01:00: advance"):
        outbox_testkit.run(event)

    shop.trouble = None
    outbox_testkit.advance(seconds=59.9)
    assert outbox_testkit.drain() == []
    outbox_testkit.advance(seconds=0.1)
    assert [(ran.status, ran.attempt) for ran in outbox_testkit.drain()] == [("COMPLETED", 2)]


def test_the_budget_ends_in_a_dead_letter_and_replay_gives_another(outbox_testkit, shop: Shop, enqueue):
    event = enqueue("order.sync")
    shop.trouble = OSError("down")
    for _ in range(3):
        outbox_testkit.drain()
        outbox_testkit.advance(minutes=1)

    [dead] = outbox_testkit.dead_letters()
    assert (dead.id, dead.attempts, dead.error) == (event, 3, "OSError: down")
    assert dead.verdict == Verdict(kind="transient", rule="default.transient", error_class="OSError")
    assert dead.completed_at is not None
    assert outbox_testkit.drain() == []

    shop.trouble = None
    outbox_testkit.replay(dead)
    assert [(ran.status, ran.attempt) for ran in outbox_testkit.drain()] == [("COMPLETED", 1)]
    [cycle] = outbox_testkit.event(event).history
    assert (cycle.attempts, cycle.last_error) == (3, "OSError: down")
    with pytest.raises(TransitionRefused):
        outbox_testkit.replay(event)


def test_a_terminal_failure_dies_at_once(outbox_testkit, shop: Shop, enqueue):
    shop.trouble = TerminalHandlerError("card declined")

    ran = outbox_testkit.run(enqueue("ledger.sync"))

    assert (ran.status, ran.retry_in) == ("DEAD_LETTERED", None)
    assert ran.verdict is not None
    assert ran.verdict.rule == "default.terminal"


def test_a_payload_that_does_not_fit_is_judged_like_in_a_dispatcher(outbox_testkit, shop: Shop, conn):
    event = shop.outbox.enqueue(conn, "order.sync", {"order_id": "many"}, outside_transaction=True)

    [found] = outbox_testkit.enqueued()
    ran = outbox_testkit.run(event)

    assert found.payload == {"order_id": "many"}
    assert (ran.status, ran.verdict.rule) == ("DEAD_LETTERED", "default.decoding")
    assert shop.done == []


def test_retry_later_comes_back_and_spends_no_attempt(outbox_testkit, shop: Shop, enqueue):
    event = enqueue("order.async")
    shop.trouble = RetryLater(timedelta(hours=2))

    ran = outbox_testkit.run(event)
    assert (ran.status, ran.retry_in, ran.verdict.kind) == ("RETRYING", timedelta(hours=2), "later")

    shop.trouble = None
    outbox_testkit.advance(ran.retry_in)
    assert [ran.attempt for ran in outbox_testkit.drain()] == [1]


@pytest.mark.parametrize("how", ["delay", "at"])
def test_a_transient_verdict_may_bring_its_own_delay(outbox_testkit, shop: Shop, enqueue, how):
    """Retry-After: the attempt is spent, and the policy's delay is not asked."""
    wait = timedelta(seconds=7)

    def classify(error: BaseException) -> Verdict:
        if how == "delay":
            return Verdict(kind="transient", rule="retry_after", delay=wait)
        return Verdict(kind="transient", rule="retry_after", at=outbox_testkit.now + wait)

    @shop.outbox.handler("limited", retry=RetryPolicy(max_attempts=2, base_delay=3600, classify=classify))
    def limited(event: Event) -> None:
        raise OSError

    event = enqueue("limited")

    ran = outbox_testkit.run(event)
    assert ran.verdict == Verdict(kind="transient", rule="classify:retry_after", error_class="OSError")
    outbox_testkit.advance(wait)
    assert outbox_testkit.run(event).status == "DEAD_LETTERED"


def test_a_handler_that_outlives_its_timeout_has_failed(outbox_testkit, shop: Shop, enqueue):
    @shop.outbox.handler("slow", timeout=0.05, retry=STEADY)
    async def slow(event: Event) -> None:
        await asyncio.Event().wait()

    ran = outbox_testkit.run(enqueue("slow"))

    assert (ran.status, type(ran.exception).__name__) == ("RETRYING", "TimedOut")


def test_jitter_is_the_same_in_every_run(shop: Shop, outbox_dsn, enqueue):
    """A test that advances by what a failure said must not depend on chance."""

    @shop.outbox.handler("shaky", retry=RetryPolicy())
    def shaky(event: Event) -> None:
        raise OSError

    delays = []
    for _ in range(2):
        with TestKit(shop.outbox, dsn=outbox_dsn) as kit:
            delays.append(kit.run(enqueue("shaky")).retry_in)

    assert delays[0] == delays[1]


# Draining and time


def test_drain_runs_what_becomes_due_by_running(outbox_testkit, shop: Shop, conn, outbox_dsn, enqueue):
    """Events that a handler enqueues are part of what is due; delayed ones are not."""

    @shop.outbox.handler("first")
    async def first(event: Event) -> None:
        async with await psycopg.AsyncConnection.connect(outbox_dsn) as mine:
            await shop.outbox.enqueue_async(mine, "order.async", Order(order_id=8))
            await shop.outbox.enqueue_many_async(
                mine, [NewEvent("order.sync", Order(order_id=9), delay=3600)]
            )

    outbox_testkit.advance(days=1)
    enqueue("first")

    assert [ran.topic for ran in outbox_testkit.drain()] == ["first", "order.async"]
    outbox_testkit.advance(seconds=3599)
    assert outbox_testkit.drain() == []
    outbox_testkit.advance(seconds=1)
    assert [ran.topic for ran in outbox_testkit.drain()] == ["order.sync"]
    assert shop.done == [8, 9]


def test_a_delay_counts_from_the_simulated_time(outbox_testkit, shop: Shop, enqueue):
    enqueue("order.sync", 1, delay=60)
    outbox_testkit.advance(seconds=60)
    enqueue("order.sync", 2, delay=60)
    enqueue("order.sync", 3, run_at=outbox_testkit.now + timedelta(seconds=30))

    outbox_testkit.drain()
    assert shop.done == [1]
    outbox_testkit.advance(seconds=30)
    outbox_testkit.drain()
    assert shop.done == [1, 3]
    outbox_testkit.advance(seconds=30)
    outbox_testkit.drain()
    assert shop.done == [1, 3, 2]


def test_simulated_time_ends_with_the_kit(shop: Shop, outbox_dsn, conn):
    with TestKit(shop.outbox, dsn=outbox_dsn) as kit:
        kit.advance(days=1)
    shop.outbox.enqueue(conn, "order.sync", Order(order_id=1), outside_transaction=True, delay=60)

    [(wait,)] = conn.execute("select next_run_at - clock_timestamp() from pulse.outbox").fetchall()
    assert wait <= timedelta(seconds=60)


def test_drain_goes_by_age_and_priority(outbox_testkit, shop: Shop, enqueue):
    enqueue("order.sync", 1)
    enqueue("order.async", 2)
    enqueue("order.sync", 3, priority=5)

    outbox_testkit.drain()

    assert shop.done == [3, 1, 2]


def test_ordering_keys_hold_in_the_kit(outbox_testkit, shop: Shop, enqueue):
    """The second event of a key waits for the first one's retry; run() says so."""
    first = enqueue("order.sync", 1, ordering_key="o")
    second = enqueue("order.async", 2, ordering_key="o")
    with pytest.raises(SettingsError, match="waits for an earlier event of its ordering key 'o'"):
        outbox_testkit.run(second)
    shop.trouble = OSError()

    assert [ran.id for ran in outbox_testkit.drain()] == [first]
    shop.trouble = None
    outbox_testkit.advance(minutes=1)
    assert [ran.id for ran in outbox_testkit.drain()] == [first, second]


def test_a_drain_that_never_ends_says_so(outbox_testkit, shop: Shop, outbox_dsn, enqueue):
    @shop.outbox.handler("endless")
    def endless(event: Event) -> None:
        with psycopg.connect(outbox_dsn) as mine:
            shop.outbox.enqueue(mine, "endless", {})

    enqueue("endless")

    with pytest.raises(NeverEnds, match=r"drain has run 5 events and more are due \(endless × 5\)"):
        outbox_testkit.drain(limit=5)


def test_time_goes_forward_only(outbox_testkit):
    with pytest.raises(SettingsError, match="forward"):
        outbox_testkit.advance(seconds=-1)


# Where handlers run


def test_sync_handlers_run_in_the_thread_of_the_test(outbox_testkit, shop: Shop, enqueue):
    """Whatever belongs to that thread is there: Django's connection, a debugger."""

    @shop.outbox.handler("where")
    def where(event: Event) -> None:
        shop.did(threading.current_thread())

    outbox_testkit.run(enqueue("where"))

    assert shop.done == [threading.current_thread()]


async def test_in_an_async_test_async_handlers_run_in_its_loop(outbox_testkit, shop: Shop, enqueue):
    @shop.outbox.handler("where")
    async def where(event: Event) -> None:
        shop.did(asyncio.get_running_loop())

    event = enqueue("where")
    with pytest.raises(SettingsError, match="this test is async: await"):
        outbox_testkit.run(event)
    ran = await outbox_testkit.run_async(event)

    assert ran.status == "COMPLETED"
    assert shop.done == [asyncio.get_running_loop()]


async def test_every_question_has_its_async_form(outbox_testkit, shop: Shop, enqueue):
    shop.trouble = TerminalHandlerError()
    for topic in ("order.sync", "order.async", "ledger.sync", "ledger.async"):
        enqueue(topic)

    await outbox_testkit.drain_async()
    dead = await outbox_testkit.dead_letters_async()
    shop.trouble = None
    for event in dead:
        await outbox_testkit.replay_async(event)
    await outbox_testkit.drain_async()

    assert len(dead) == 4
    assert {event.status for event in await outbox_testkit.enqueued_async()} == {"COMPLETED"}
    assert (await outbox_testkit.event_async(dead[0])).history != ()


def test_resources_come_from_the_lifespan_unless_the_test_gives_its_own(outbox_testkit, shop: Shop, enqueue):
    outbox_testkit.run(enqueue("resources"))
    outbox_testkit.resources = "a double"
    outbox_testkit.run(enqueue("resources"))

    assert shop.done == ["the mailer", "a double"]
    assert shop.opened == 1


# Looking


def test_what_a_transaction_has_enqueued_is_seen_before_it_commits(outbox_testkit, shop: Shop, conn):
    """Its own, savepoints included; neither what was there before nor what others have committed."""
    shop.outbox.enqueue(conn, "order.sync", Order(order_id=1), outside_transaction=True)
    with conn.transaction(force_rollback=True):
        shop.outbox.enqueue(conn, "order.sync", Order(order_id=2), ordering_key="o:2")
        with conn.transaction():
            shop.outbox.enqueue(conn, "order.async", Order(order_id=3))
        with conn.transaction(force_rollback=True):
            shop.outbox.enqueue(conn, "order.async", Order(order_id=4))

        [mine, other] = outbox_testkit.enqueued(conn)
        [typed] = outbox_testkit.enqueued(conn, topic="order.sync", payload_type=dict)

    assert (mine.payload, mine.ordering_key, other.payload) == (Order(order_id=2), "o:2", Order(order_id=3))
    assert typed.payload == {"order_id": 2}
    assert [event.payload.order_id for event in outbox_testkit.enqueued()] == [1]
    with pytest.raises(SettingsError, match="no transaction is open"):
        outbox_testkit.enqueued(conn)


def test_assert_enqueued_returns_what_fits(outbox_testkit, enqueue):
    enqueue("order.sync", 1, priority=3)
    enqueue("order.sync", 2)

    [one] = outbox_testkit.assert_enqueued(topic="order.sync", payload={"order_id": 1}, priority=3, count=1)
    assert one.payload == Order(order_id=1)
    assert len(outbox_testkit.assert_enqueued(topic="order.sync")) == 2
    outbox_testkit.assert_enqueued(topic="order.sync", payload=Order(order_id=2))
    outbox_testkit.assert_enqueued(topic="order.async", count=0)


def test_assert_enqueued_shows_what_is_there_instead(outbox_testkit, enqueue):
    enqueue("order.sync", 1)

    with pytest.raises(AssertionError) as failure:
        outbox_testkit.assert_enqueued(topic="order.sync", payload=Order(order_id=2), ordering_key="o:2")

    assert str(failure.value).splitlines() == [
        "no such event was enqueued, at least one is expected:",
        "  order.sync  payload Order {\"order_id\": 2}  ordering_key='o:2'",
        "enqueued:",
        '  order.sync  Order {"order_id": 1}  ordering_key=None',
    ]


@pytest.mark.parametrize(("count", "found"), [(0, "1 such"), (2, "1 such")])
def test_assert_enqueued_counts(outbox_testkit, enqueue, count, found):
    enqueue("order.sync", 1)

    with pytest.raises(AssertionError, match=f"{found} event was enqueued, exactly {count} is expected"):
        outbox_testkit.assert_enqueued(topic="order.sync", count=count)


# Mistakes


def test_an_event_without_a_handler_is_left_alone_and_mentioned(outbox_testkit, enqueue, caplog):
    event = enqueue("order.typo")

    assert outbox_testkit.drain() == []
    assert "drain left 1 event(s) of 'order.typo' alone: the topic has no handler here" in caplog.text
    with pytest.raises(SettingsError, match=r"'order.typo' has no handler \(registered: .*order\.sync"):
        outbox_testkit.run(event)


def test_what_cant_be_run_says_why(outbox_testkit, shop: Shop, enqueue):
    with pytest.raises(EventNotFound, match="is its transaction committed"):
        outbox_testkit.run(uuid4())
    done = enqueue("order.sync")
    outbox_testkit.run(done)
    with pytest.raises(SettingsError, match="is COMPLETED and can't be run again"):
        outbox_testkit.run(done)
    shop.trouble = TerminalHandlerError()
    dead = enqueue("order.sync")
    outbox_testkit.run(dead)
    with pytest.raises(SettingsError, match="is DEAD_LETTERED and can't be run: replay"):
        outbox_testkit.run(dead)
    with pytest.raises(SettingsError, match="an event or its id is needed, not int"):
        outbox_testkit.run(7)


def test_a_kit_needs_an_outbox_and_a_place(shop: Shop, outbox_dsn):
    with pytest.raises(SettingsError, match="needs the application's Outbox, not list"):
        TestKit([], dsn=outbox_dsn)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="either a dsn or a connection"):
        TestKit(shop.outbox)
