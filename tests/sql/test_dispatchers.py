"""Who is alive, and who has to be woken."""

from __future__ import annotations

import pytest

from tests.sql.calls import seconds


@pytest.fixture
def listener(session):
    calls = session()
    calls.conn.execute("listen pulse_outbox_wake")
    return calls


def heard(listener):
    """Notifications that have arrived: what was sent before our own round trip is there after it."""
    listener.conn.execute("select 1")
    return len(list(listener.conn.notifies(timeout=0.05)))


def test_a_notification_names_a_single_topic(outbox, listener):
    """Who is woken asks for that one at once; of several, only a listing shows which have work."""
    outbox.call("dispatcher_seen", "w1", "host-a", 17, "0.1.0", ["mail", "fax"], None, 0, True)
    outbox.enqueue("mail")
    outbox.call("outbox_wake", ["fax"])
    outbox.call("outbox_wake", ["mail", "fax"])

    listener.conn.execute("select 1")
    payloads = [notify.payload for notify in listener.conn.notifies(timeout=5, stop_after=3)]
    assert payloads == ["mail", "fax", ""]


def workers(outbox):
    return {row["worker"]: row for row in outbox.conn.execute("select * from pulse.dispatcher").fetchall()}


def test_dispatcher_says_that_it_is_alive(outbox, t0):
    outbox.call("dispatcher_seen", "w1", "host-a", 17, "0.1.0", ["mail", "fax"], [1, 2], 3, False)
    outbox.forward(10)
    outbox.call("dispatcher_seen", "w1", "host-a", 17, "0.1.0", ["mail"], [1, 2], 5, True)

    row = workers(outbox)["w1"]
    assert (row["host"], row["pid"], row["version"], row["topics"], row["generations"]) == (
        "host-a",
        17,
        "0.1.0",
        ["mail"],
        [1, 2],
    )
    assert (row["started_at"], row["last_seen_at"]) == (t0, t0 + seconds(10))
    assert (row["in_flight"], row["sleeping"]) == (5, True)


def test_restarted_dispatcher_starts_anew(outbox, t0):
    outbox.call("dispatcher_seen", "w1", "host-a", 17, "0.1.0", ["mail"], None, 0, False)
    outbox.forward(10)
    outbox.call("dispatcher_seen", "w1", "host-a", 18, "0.1.0", ["mail"], None, 0, False)

    assert workers(outbox)["w1"]["started_at"] == t0 + seconds(10)


def test_silent_dispatcher_is_forgotten_after_ten_leases(outbox):
    outbox.seen("silent")
    outbox.forward(300)
    outbox.seen("alive")
    assert set(workers(outbox)) == {"silent", "alive"}
    outbox.forward(0.001)
    outbox.seen("alive")

    assert set(workers(outbox)) == {"alive"}


def test_dispatcher_that_leaves_is_gone(outbox):
    outbox.seen("w1")
    outbox.seen("w2")
    outbox.call("dispatcher_gone", "w1")

    assert set(workers(outbox)) == {"w2"}


def test_stuck_row_of_a_silent_dispatcher_blocks_nobody(outbox, session):
    outbox.seen("silent")
    outbox.forward(301)
    stranger = session()
    outbox.conn.execute("set lock_timeout = '2s'")
    with stranger.conn.transaction():
        stranger.conn.execute("select from pulse.dispatcher for update")
        outbox.seen("alive")
        outbox.enqueue()

    assert "alive" in workers(outbox)


def test_nobody_sleeps_nobody_is_notified(outbox, listener):
    """Under load no producer reaches the lock that all notifications of the server share."""
    outbox.seen("busy", ["mail"], sleeping=False)
    outbox.seen("elsewhere", ["fax"], sleeping=True)
    outbox.enqueue_many(3)

    assert heard(listener) == 0


def test_sleeping_dispatcher_is_notified_of_its_topics(outbox, listener):
    outbox.seen("w", ["mail", "fax"], sleeping=True)
    outbox.enqueue("sms")
    assert heard(listener) == 0
    outbox.enqueue("fax")

    assert heard(listener) == 1


def test_one_transaction_notifies_once(outbox, listener):
    outbox.seen(sleeping=True)
    with outbox.conn.transaction():
        outbox.enqueue_many(10)

    assert heard(listener) == 1


def test_rolled_back_producer_wakes_nobody(outbox, listener):
    outbox.seen(sleeping=True)
    with outbox.conn.transaction(force_rollback=True):
        outbox.enqueue()

    assert heard(listener) == 0


def test_everything_that_becomes_claimable_wakes(outbox, listener):
    """Else it would wait for the next poll."""
    head, _ = outbox.enqueue_many(2, key="k")
    dead = outbox.dead("other")
    outbox.enqueue_many(20, key="deep")
    outbox.seen("w", ["mail", "other"], sleeping=True)

    claim = outbox.claim(limit=1)
    assert heard(listener) == 0, "a claim makes nothing claimable"
    outbox.release(claim)
    assert heard(listener) == 1, "release"
    claim = outbox.claim()
    outbox.complete(claim)
    assert heard(listener) == 1, "the next of a key"
    outbox.replay(dead)
    assert heard(listener) == 1, "replay"
    outbox.pause("mail")
    assert heard(listener) == 0
    outbox.resume("mail")
    assert heard(listener) == 1, "resume"
    outbox.claim()
    outbox.keep_sweeping(40)
    assert heard(listener) >= 1, "reap"
    assert head in claim.ids


def test_bulk_writers_wake_by_themselves(outbox, listener):
    outbox.seen(sleeping=True)
    outbox.insert()
    assert heard(listener) == 0
    outbox.call("outbox_wake", ["fax", "mail"])

    assert heard(listener) == 1
