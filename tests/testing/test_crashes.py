"""Crash points: what is left when a run stops there, and what happens after the lease."""

from __future__ import annotations

import psycopg
import pytest

from pulse_outbox import Event, RetryPolicy, SettingsError
from tests.testing.shop import Order, Shop

POINTS = ["after_claim", "before_handler", "after_handler", "before_complete", "after_complete"]


@pytest.fixture
def conn(outbox_dsn):
    with psycopg.connect(outbox_dsn, autocommit=True) as conn:
        yield conn


def enqueue(shop: Shop, conn, topic):
    return shop.outbox.enqueue(conn, topic, Order(order_id=7), outside_transaction=True)


@pytest.mark.parametrize("topic", ["order.sync", "order.async"])
@pytest.mark.parametrize(
    ("point", "runs_before", "status", "runs_in_all"),
    [
        ("after_claim", 0, "RUNNING", 1),
        ("before_handler", 0, "RUNNING", 1),
        ("after_handler", 1, "RUNNING", 2),
        ("before_complete", 1, "RUNNING", 2),
        ("after_complete", 1, "COMPLETED", 1),
    ],
)
def test_a_crash_leaves_what_a_killed_process_would(
    outbox_testkit, shop: Shop, conn, topic, point, runs_before, status, runs_in_all
):
    event = enqueue(shop, conn, topic)

    with outbox_testkit.crash_at(point):
        [ran] = outbox_testkit.drain()
    assert (ran.crashed_at, ran.status, len(shop.done)) == (point, status, runs_before)
    assert outbox_testkit.event(event).status == status
    outbox_testkit.advance(seconds=29)
    assert outbox_testkit.drain() == []

    outbox_testkit.advance(seconds=2)
    again = outbox_testkit.drain()
    assert [ran.status for ran in again] == ["COMPLETED"] * (status == "RUNNING")
    assert shop.done == [7] * runs_in_all


@pytest.mark.parametrize("topic", ["ledger.sync", "ledger.async"])
@pytest.mark.parametrize("point", POINTS)
def test_a_transactional_handler_has_one_effect_wherever_it_crashes(
    outbox_testkit, shop: Shop, conn, topic, point
):
    event = enqueue(shop, conn, topic)
    with outbox_testkit.crash_at(point):
        outbox_testkit.run(event)

    outbox_testkit.advance(minutes=1)
    outbox_testkit.drain()

    assert conn.execute("select * from ledger").fetchall() == [(7,)]
    assert outbox_testkit.event(event).status == "COMPLETED"


@pytest.mark.parametrize("point", POINTS)
def test_first_time_makes_a_handler_idempotent(outbox_testkit, shop: Shop, conn, outbox_dsn, point):
    """And the control without it pays twice."""

    @shop.outbox.handler("pay.once")
    def pay_once(event: Event[Order]) -> None:
        with psycopg.connect(outbox_dsn) as mine:
            if shop.outbox.first_time(mine, event):
                mine.execute("insert into ledger values (1)")

    @shop.outbox.handler("pay.twice")
    def pay_twice(event: Event[Order]) -> None:
        with psycopg.connect(outbox_dsn) as mine:
            mine.execute("insert into ledger values (2)")

    for topic in ("pay.once", "pay.twice"):
        event = enqueue(shop, conn, topic)
        with outbox_testkit.crash_at(point):
            outbox_testkit.run(event)
        outbox_testkit.advance(minutes=1)
        outbox_testkit.drain()

    [(once, twice)] = conn.execute(
        "select count(*) filter (where order_id = 1), count(*) filter (where order_id = 2) from ledger"
    ).fetchall()
    assert once == 1
    assert twice == (2 if point in ("after_handler", "before_complete") else 1)


def test_a_budget_of_one_dies_with_its_process(outbox_testkit, shop: Shop, conn):
    """It promised not to start twice."""

    @shop.outbox.handler("once", retry=RetryPolicy(max_attempts=1))
    def once(event: Event) -> None:
        shop.did("once")

    event = enqueue(shop, conn, "once")
    with outbox_testkit.crash_at("after_claim"):
        outbox_testkit.run(event)
    outbox_testkit.advance(minutes=1)

    [dead] = outbox_testkit.dead_letters()
    assert (dead.verdict.rule, dead.error) == ("lease.expired", "worker lease expired")


def test_a_crash_ends_the_drain_and_only_the_named_topic_crashes(outbox_testkit, shop: Shop, conn):
    first, second, third = (
        enqueue(shop, conn, topic) for topic in ("order.sync", "order.async", "order.sync")
    )

    with outbox_testkit.crash_at("after_claim", topic="order.async"):
        ran = outbox_testkit.drain()

    # By age, so that a topic's turn comes with its oldest event.
    assert [(one.id, one.status) for one in ran] == [(first, "COMPLETED"), (second, "RUNNING")]
    assert outbox_testkit.event(third).status == "PENDING"


def test_the_applications_classifier_never_sees_a_crash(outbox_testkit, shop: Shop, conn):
    seen: list[BaseException] = []

    @shop.outbox.handler("judged", retry=RetryPolicy(classify=seen.append))
    def judged(event: Event) -> None:
        pass

    event = enqueue(shop, conn, "judged")
    with outbox_testkit.crash_at("after_handler"):
        outbox_testkit.run(event)

    assert seen == []


def test_a_crash_point_that_nothing_reached_fails_the_test(outbox_testkit):
    """A test that shows nothing must not pass."""
    nothing = pytest.raises(AssertionError, match="no run reached before_complete")
    with nothing, outbox_testkit.crash_at("before_complete"):
        outbox_testkit.drain()


def test_a_misspelt_crash_point_is_refused(outbox_testkit):
    with pytest.raises(SettingsError, match="after_claim, before_handler"), outbox_testkit.crash_at("later"):
        pass


def test_the_error_inside_the_block_is_the_one_that_is_seen(outbox_testkit):
    with pytest.raises(ZeroDivisionError), outbox_testkit.crash_at("after_claim"):
        raise ZeroDivisionError
