"""Alerts that are owed: one for each kind, under an id that stays, and paid or cancelled once and for all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.sql.calls import Calls, Row, seconds
from tests.sql.mixture import Meter

LEASE = 20


def die(outbox: Calls, count: int = 1, topic: str = "mail", error_class: str = "Boom", **named: Any) -> list:
    """So many dead letters of one kind, in one statement."""
    ids = outbox.enqueue_many(count, topic, **named)
    failure = {
        "error_class": error_class,
        "handler": "shop.mail",
        "verdict": "terminal",
        "rule": "default:terminal",
    }
    outbox.fail(outbox.claim(topic, count), f"{error_class}: no", terminal=True, failure=failure)
    return ids


def next_alert(outbox: Calls, **named: Any) -> Row | None:
    rows = outbox.call("outbox_next_alert", **named)
    assert len(rows) <= 1
    return rows[0] if rows else None


def must_have(outbox: Calls, **named: Any) -> Row:
    alert = next_alert(outbox, **named)
    assert alert is not None
    return alert


def pay(outbox: Calls, alert: Row) -> int:
    paid: int = outbox.scalar("outbox_pay_alert", alert["alert_id"])
    return paid


def test_nothing_is_owed_for_what_lives(outbox):
    """On the transition to DEAD_LETTERED, and only then."""
    outbox.enqueue_many(3)
    outbox.complete(outbox.claim(limit=1))
    outbox.fail(outbox.claim(limit=1))

    assert next_alert(outbox) is None


def test_an_alert_says_what_died(outbox, t0):
    [event_id] = die(outbox, p_source="shop", p_target="mailer")

    alert = must_have(outbox)

    assert {name: value for name, value in alert.items() if name != "alert_id"} == {
        "topic": "mail",
        "error_class": "Boom",
        "count": 1,
        "event_id": event_id,
        "source": "shop",
        "target": "mailer",
        "handler_name": "shop.mail",
        "last_error": "Boom: no",
        "attempts": 1,
        "verdict": "terminal",
        "rule": "default:terminal",
        "first_failed_at": t0,
        "dead_lettered_at": t0,
        "last_dead_lettered_at": t0,
    }
    row = outbox.row(event_id)
    assert (row["alert_id"], row["alerted_at"]) == (alert["alert_id"], None), "stamped, and still owed"


def test_one_for_each_kind_with_a_count(outbox, t0):
    """FAULTS 36. The example is the first that died."""
    first = die(outbox, 300)
    outbox.forward(1)
    die(outbox, 200)
    outbox.forward(1)
    die(outbox, 7, error_class="Bang")
    outbox.forward(1)
    die(outbox, 5, topic="post")

    alerts = [must_have(outbox) for _ in range(3)]

    assert [(alert["topic"], alert["error_class"], alert["count"]) for alert in alerts] == [
        ("mail", "Boom", 500),
        ("mail", "Bang", 7),
        ("post", "Boom", 5),
    ]
    assert alerts[0]["event_id"] in first
    assert (alerts[0]["dead_lettered_at"], alerts[0]["last_dead_lettered_at"]) == (t0, t0 + seconds(1))
    assert next_alert(outbox) is None, "each is lent to one sender"
    assert [pay(outbox, alert) for alert in alerts] == [500, 7, 5]
    assert outbox.conn.execute("select 1 from pulse.outbox where alerted_at is null").fetchall() == []


def test_not_paid_comes_again_under_the_same_id(outbox):
    """FAULTS 3: whoever comes later sends what the dead sender may have sent; Sentry keeps one of them."""
    die(outbox, 3)
    alert = must_have(outbox)

    outbox.forward(LEASE)
    assert next_alert(outbox) is None
    outbox.forward(0.001)
    again = must_have(outbox)

    assert again == alert
    assert pay(outbox, again) == 3
    assert pay(outbox, alert) == 0, "a payment whose answer was lost"
    outbox.forward(3600)
    assert next_alert(outbox) is None


def test_a_clock_that_goes_back_delays_nothing(outbox):
    """After a failover the present may lie before the time at which an alert was lent."""
    die(outbox)
    outbox.forward(3600)
    alert = must_have(outbox)
    outbox.forward(-1800)

    assert must_have(outbox)["alert_id"] == alert["alert_id"]


def test_who_dies_after_the_stamp_is_another_alert(outbox):
    die(outbox, 2)
    first = must_have(outbox)
    [late] = die(outbox)

    assert pay(outbox, first) == 2
    second = must_have(outbox)
    assert (second["count"], second["event_id"]) == (1, late)
    assert second["alert_id"] != first["alert_id"]


@pytest.mark.parametrize("stamped", [False, True])
def test_replay_and_discard_cancel_the_debt(outbox, stamped):
    """Who replays has seen it."""
    replayed, discarded, third = die(outbox, 3)
    if stamped:
        must_have(outbox)
    outbox.replay(replayed)
    outbox.discard(discarded)
    outbox.forward(LEASE + 1)

    alert = must_have(outbox)
    assert (alert["count"], alert["event_id"]) == (1, third)
    assert outbox.row(replayed)["alert_id"] is None
    outbox.discard(third)
    outbox.forward(LEASE + 1)
    assert next_alert(outbox) is None


def test_a_new_death_of_a_replayed_event_is_owed_again(outbox):
    """And the payment of the first alert, which was under way, does not pay for it."""
    [event_id] = die(outbox)
    first = must_have(outbox)
    outbox.replay(event_id)
    outbox.fail(outbox.claim(), terminal=True)

    assert pay(outbox, first) == 0
    second = must_have(outbox)
    assert (second["event_id"], second["count"]) == (event_id, 1)
    assert second["alert_id"] != first["alert_id"]


def test_what_has_waited_longest_comes_first(outbox):
    """An alert that can't be delivered holds up no other, and new ones don't hold it up for ever."""
    die(outbox, topic="undeliverable")
    must_have(outbox)
    outbox.forward(1)
    die(outbox, topic="new")
    asked = []
    for _ in range(3):
        outbox.forward(LEASE + 1)
        asked.append(must_have(outbox)["topic"])

    assert asked == ["undeliverable", "new", "undeliverable"]


def test_quiet_kinds_gather(outbox):
    """A bug that kills ten jobs a second is no ten alerts a second."""
    die(outbox, 2)
    die(outbox, 1, error_class="Bang")
    quiet = {"p_quiet_topics": ["mail", "mail"], "p_quiet_classes": ["Boom", "Other"]}

    assert must_have(outbox, **quiet)["error_class"] == "Bang"
    assert next_alert(outbox, **quiet) is None
    assert must_have(outbox)["count"] == 2


def test_a_row_that_somebody_holds_holds_up_no_other(outbox, session):
    """FAULTS 41: an operator in an open transaction, before the stamp and after it."""
    [held] = die(outbox, error_class="Held")
    outbox.forward(1)
    free = die(outbox, 2)
    operator = session()
    with operator.conn.transaction():
        operator.conn.execute("select 1 from pulse.outbox where event_id = %s for update", (held,))
        alert = must_have(outbox)
        assert (alert["count"], alert["event_id"] in free) == (2, True)
        assert next_alert(outbox) is None
        outbox.forward(LEASE + 1)
        operator.conn.execute(
            "select 1 from pulse.outbox where event_id = %s for update", (alert["event_id"],)
        )
        assert next_alert(outbox) is None
        assert pay(outbox, alert) == 1, "the other row"

    assert {must_have(outbox)["error_class"], must_have(outbox)["error_class"]} == {"Held", "Boom"}


def test_two_dispatchers_at_once_make_one_alert(outbox, session):
    """Of the dead of one sweep neither gets a share."""
    die(outbox, 1000)
    sessions = [session() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = [alert for alert in pool.map(next_alert, sessions, timeout=30) if alert]

    assert [alert["count"] for alert in found] == [1000]


def test_a_failure_without_a_class_is_a_kind_too(outbox):
    """Recorded by hand, or so odd that it could not be stored as it was."""
    outbox.enqueue()
    outbox.fail(outbox.claim(), terminal=True, failure={"rule": "unstorable"})
    outbox.conn.execute("update pulse.outbox set last_failure = null, last_error = null")

    alert = must_have(outbox)
    assert (alert["error_class"], alert["handler_name"], alert["last_error"]) == ("", None, None)
    assert pay(outbox, alert) == 1


def test_costs_only_its_own_rows(outbox, dsn):
    """Every dispatcher asks every few seconds: dead letters alerted long ago, or by another now, cost nothing."""
    for paid in ("now()", "null"):
        outbox.conn.execute(
            f"""insert into pulse.outbox (event_id, topic, payload, idempotency_key, status, completed_at,
                                          alert_id, alert_offered_at, alerted_at)
                select gen_random_uuid(), 'mail', '{{}}', gen_random_uuid(), 'DEAD_LETTERED', now(),
                       'c0ffee00-0000-7000-8000-000000000000', %s, {paid}
                  from generate_series(1, 20000)""",
            (outbox.now + seconds(LEASE + 1),),
        )
    outbox.forward(LEASE + 1)
    die(outbox, 3)
    alert = must_have(outbox)
    with psycopg.connect(dsn) as conn:
        meter = Meter(conn)
        costs = {}
        for _ in range(2):  # the first call of a session reads the catalogs
            with meter.undone():
                costs["nothing"] = meter.buffers(
                    "select * from pulse.outbox_next_alert(p_now => %s)", outbox.now
                )
            with meter.undone():
                costs["pay"] = meter.buffers("select pulse.outbox_pay_alert(%s)", alert["alert_id"])
            with meter.undone():
                conn.execute(
                    "update pulse.outbox set alert_offered_at = '2000-01-01' where alert_id = %s",
                    (alert["alert_id"],),
                )
                costs["again"] = meter.buffers(
                    "select * from pulse.outbox_next_alert(p_now => %s)", outbox.now
                )

    assert {name: cost for name, cost in costs.items() if cost > 150} == {}
