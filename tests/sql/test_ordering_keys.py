"""Events of one ordering key: one at a time, in the order of insertion, and never stuck."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest

from tests.sql.calls import ids, seconds


def drain(outbox, topics=("mail",)):
    """Claim and complete until nothing is due; the order in which the events ran."""
    order = []
    while claim := outbox.claim(topics, 100):
        order += claim.ids
        assert outbox.complete(claim) == {}
    return order


def test_one_at_a_time_in_order(outbox):
    first, second, third = outbox.enqueue_many(3, key="order:7")
    other = outbox.enqueue(key="order:8")
    free = outbox.enqueue()

    claim = outbox.claim()

    assert set(claim.ids) == {first, other, free}
    assert outbox.claim() == []
    outbox.complete(claim)
    assert drain(outbox) == [second, third]


def test_a_key_is_one_across_topics(outbox):
    paid = outbox.enqueue("order.paid", key="order:7")
    shipped = outbox.enqueue("order.shipped", key="order:7")

    claim = outbox.claim(["order.shipped", "order.paid"])

    assert claim.ids == [paid]
    outbox.complete(claim)
    assert outbox.claim(["order.shipped", "order.paid"]).ids == [shipped]


def test_priority_does_not_overtake_within_a_key(outbox):
    low = outbox.enqueue(key="k", p_priority=-5)
    outbox.enqueue(key="k", p_priority=9)

    assert outbox.claim().ids == [low]


@pytest.mark.parametrize("how", ["enqueue", "insert", "insert parked"])
def test_followers_wait_however_they_were_written(outbox, how):
    """COPY writes followers of its own batch parked and knows nothing of other batches."""
    head = outbox.enqueue(key="k")
    for _ in range(3):
        if how == "enqueue":
            outbox.enqueue(key="k")
        else:
            outbox.insert(ordering_key="k", parked=how.endswith("parked"))

    claim = outbox.claim()

    assert claim.ids == [head]
    assert outbox.claim() == []
    outbox.complete(claim)
    assert len(drain(outbox)) == 3


def test_key_waits_for_its_heads_backoff(outbox):
    head, second = outbox.enqueue_many(2, key="k")
    outbox.fail(outbox.claim(), delay=60)
    outbox.forward(59)

    assert outbox.claim() == []
    outbox.forward(1)
    assert drain(outbox) == [head, second]


def test_key_waits_for_its_heads_schedule(outbox, t0):
    head = outbox.enqueue(key="k", p_run_at=t0 + seconds(60))
    second = outbox.enqueue(key="k")

    assert outbox.claim() == []
    outbox.forward(60)
    assert drain(outbox) == [head, second]


def test_key_waits_for_its_heads_pause(outbox):
    head = outbox.enqueue("mail", key="k")
    second = outbox.enqueue("fax", key="k")
    outbox.pause("mail")

    assert outbox.claim(["mail", "fax"]) == []
    outbox.resume("mail")
    assert drain(outbox, ["mail", "fax"]) == [head, second]


def test_follower_keeps_its_own_schedule(outbox, t0):
    outbox.enqueue(key="k")
    later = outbox.enqueue(key="k", p_run_at=t0 + seconds(60))
    assert len(drain(outbox)) == 1

    assert outbox.claim() == []
    outbox.forward(60)
    assert outbox.claim().ids == [later]


@pytest.mark.parametrize("settle", ["release", "snooze", "lapse", "fail", "reap"])
def test_head_that_comes_back_is_still_the_head(outbox, settle):
    head, second = outbox.enqueue_many(2, key="k")
    claim = outbox.claim()
    if settle == "reap":
        outbox.keep_sweeping(40)
    else:
        getattr(outbox, settle)(claim)
    outbox.forward(10)

    assert drain(outbox) == [head, second]


def test_dead_letter_holds_its_key(outbox):
    head, second = outbox.enqueue_many(2, key="k")
    outbox.fail(outbox.claim(), terminal=True)
    third = outbox.enqueue(key="k")
    outbox.forward(10**6)

    assert outbox.claim() == []
    outbox.replay(head)
    assert drain(outbox) == [head, second, third]


def test_discarded_dead_letter_lets_its_key_go_on(outbox):
    head, second = outbox.enqueue_many(2, key="k")
    outbox.fail(outbox.claim(), terminal=True)
    outbox.discard(head)

    assert drain(outbox) == [second]


def test_pruned_dead_letter_lets_its_key_go_on(outbox):
    _, second = outbox.enqueue_many(2, key="k")
    outbox.fail(outbox.claim(), terminal=True)
    outbox.call("outbox_prune", p_retention=seconds(-0), p_dead=True)
    assert outbox.claim() == [], "not older than the retention"
    outbox.forward(1)
    outbox.call("outbox_prune", p_retention=seconds(0), p_dead=True)

    assert drain(outbox) == [second]


def test_dead_letter_that_skips_lets_its_key_go_on(outbox):
    """And when it is replayed, it is again the first that may run, but not beside one that is running."""
    head = outbox.enqueue(key="k", p_dead_key="skip")
    second, third = outbox.enqueue_many(2, key="k")
    outbox.fail(outbox.claim(), terminal=True)

    running = outbox.claim()
    assert running.ids == [second]
    outbox.replay(head)
    assert outbox.claim() == []
    outbox.complete(running)
    assert drain(outbox) == [head, third]


def test_reaped_dead_letter_that_skips_lets_its_key_go_on(outbox):
    outbox.enqueue(key="k", p_dead_key="skip", p_max_attempts=1)
    second = outbox.enqueue(key="k")
    outbox.claim()
    [reaped] = outbox.keep_sweeping(40)

    assert reaped["answer"] == "DEAD_LETTERED"
    assert drain(outbox) == [second]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_discarding_one_of_a_key_leaves_the_others_in_order(outbox, which):
    events = outbox.enqueue_many(3, key="k")
    outbox.discard(events.pop(which))

    assert drain(outbox) == events


def test_completed_and_deleted_head_lets_its_key_go_on(outbox):
    _, second = outbox.enqueue_many(2, key="k")
    outbox.complete(outbox.claim(), p_delete=True)

    assert outbox.claim().ids == [second]


def test_event_of_a_free_key_is_due_at_once(outbox):
    """Finished siblings are no siblings."""
    outbox.enqueue(key="k")
    drain(outbox)
    outbox.discard(outbox.enqueue(key="k"))
    event_id = outbox.enqueue(key="k")

    assert not outbox.row(event_id)["parked"]
    assert outbox.claim().ids == [event_id]


def test_deep_key_is_born_parked(outbox):
    """A million followers must not stand in the lane: claims would look at each of them."""
    events = outbox.enqueue_many(40, key="k")

    assert sum(outbox.row(event_id)["parked"] for event_id in events) >= 20
    assert drain(outbox) == events


# Transactions that overlap: commit order differs from seq order


@pytest.fixture
def late(outbox, session):
    """A lower seq that commits after a higher one has started to run: (late event, running claim)."""
    slow = session()
    with slow.conn.transaction():
        lower = slow.enqueue(key="k")
        higher = outbox.enqueue(key="k")
        running = outbox.claim()
        assert running.ids == [higher]
    return lower, running


def test_late_lower_seq_waits_for_the_one_that_runs(outbox, late):
    lower, running = late

    assert outbox.claim() == []
    outbox.complete(running)
    assert outbox.claim().ids == [lower]


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.parametrize("settle", ["fail", "snooze", "release", "lapse", "reap", "dead"])
def test_late_lower_seq_runs_when_the_other_comes_back(outbox, late, settle, looked):
    """Without any healing: the key must not stand still because its later event failed."""
    lower, running = late
    if looked:
        assert outbox.claim() == [], "a claim has found it waiting"
    if settle == "reap":
        outbox.keep_sweeping(40)
    elif settle == "dead":
        outbox.fail(running, terminal=True)
    else:
        getattr(outbox, settle)(running)
    outbox.forward(10)

    order = drain(outbox)
    assert order == ([lower] if settle == "dead" else [lower, *running.ids])


def test_late_event_born_parked_is_found(outbox, session):
    """Enqueue saw a sibling that ended before its commit: the next event of the key or a look at the keys finds it."""
    outbox.enqueue_many(30, key="k")
    slow = session()
    with slow.conn.transaction():
        stuck = slow.enqueue(key="k")
        assert slow.row(stuck)["parked"]
        assert len(drain(outbox)) == 30
    assert outbox.claim() == []

    assert outbox.heal()["healed"] == 1
    assert drain(outbox) == [stuck]


def test_late_event_born_parked_is_found_by_its_follower(outbox, session):
    outbox.enqueue_many(30, key="k")
    slow = session()
    with slow.conn.transaction():
        stuck = slow.enqueue(key="k")
        drain(outbox)
    next_one = outbox.enqueue(key="k")

    outbox.claim()
    assert drain(outbox) == [stuck, next_one]


def test_short_key_does_not_stall_on_overlapping_transactions(outbox, session):
    """Ordinary load: a transaction of milliseconds enqueues while the only sibling is completed."""
    outbox.enqueue(key="k")
    slow = session()
    with slow.conn.transaction():
        follower = slow.enqueue(key="k")
        assert len(drain(outbox)) == 1

    assert drain(outbox) == [follower], "without any healing"


def test_heal_goes_round_in_pages(outbox):
    for n in range(5):
        outbox.insert(ordering_key=f"k{n}", parked=n % 2 == 0)
    assert len(outbox.claim()) == 2

    assert outbox.heal(limit=2) == {"last_key": "k1", "healed": 1}
    assert outbox.heal("k1", limit=2) == {"last_key": "k3", "healed": 1}
    assert outbox.heal("k3", limit=2) == {"last_key": None, "healed": 1}
    assert len(outbox.claim()) == 3


def test_heal_leaves_what_waits_rightly(outbox):
    outbox.enqueue_many(20, key="k")
    held = outbox.enqueue(key="dead")
    outbox.enqueue_many(20, key="dead")
    claim = outbox.claim()
    outbox.fail(claim, terminal=True, delay=0)

    assert outbox.heal()["healed"] == 0
    assert outbox.claim() == []
    assert held in claim.ids


@pytest.mark.parametrize("limit", [100, 10, 1])
def test_locked_head_holds_up_no_other(outbox, session, limit):
    """A stranger's lock on the head of a key: its followers can't be parked, and must not fill every claim."""
    head = outbox.enqueue("other", key="k")
    for _ in range(120):
        outbox.insert(ordering_key="k")
    outbox.forward(1)
    free = outbox.enqueue_many(5)
    stranger = session()
    outbox.conn.execute("set lock_timeout = '2s'")
    with stranger.conn.transaction():
        stranger.conn.execute("select from pulse.outbox where event_id = %s for update", (head,))

        taken = [event_id for _ in range(8) for event_id in outbox.claim(limit=limit).ids]
        assert set(taken) == set(free)


def test_waiting_followers_use_up_no_room(outbox):
    """Unparked followers at the front of a lane: the same claim goes on to what is behind them."""
    outbox.enqueue("other", key="k")
    for _ in range(30):
        outbox.insert(ordering_key="k")
    outbox.forward(1)
    free = outbox.enqueue_many(5)

    assert set(outbox.claim(limit=20).ids) == set(free)


def test_table_refuses_two_running_of_one_key(outbox):
    """Whatever a claim believes."""
    outbox.enqueue_many(2, key="k")
    outbox.claim()

    with pytest.raises(psycopg.errors.UniqueViolation, match="outbox_one_running_per_key"):
        outbox.conn.execute(
            """update pulse.outbox
                  set status = 'RUNNING', parked = false,
                      lease_until = now(), locked_by = 'w', claim_token = %s, max_attempts = 1
                where status = 'PENDING'""",
            (uuid.uuid4(),),
        )


def test_two_claims_that_can_not_see_each_other(outbox, session):
    """Both believe in their head of the same key: one gets it, the other gets nothing or is told to claim again."""
    slow, rival = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with rival.conn.transaction():
            with slow.conn.transaction():
                lower = slow.enqueue(key="k")
                higher = outbox.enqueue(key="k")
                assert rival.claim().ids == [higher]
            second = pool.submit(outbox.claim)  # sees the lower one only
            with suppress(TimeoutError):
                second.result(timeout=0.2)
        with suppress(psycopg.errors.UniqueViolation):
            assert second.result(timeout=10) == []

    assert outbox.claim() == []
    assert outbox.statuses(lower, higher) == ["PENDING", "RUNNING"]


def test_keyed_rows_in_one_claim_over_two_lanes(outbox):
    """Head and follower are both unparked and due, in two topics of one claim."""
    head = outbox.insert(topic="a", ordering_key="k")
    follower = outbox.insert(topic="b", ordering_key="k")

    for _ in range(5):
        claim = outbox.claim(["a", "b"])
        assert claim.ids == [head]
        outbox.release(claim)
    assert outbox.status(follower) == "PENDING"
    assert ids(outbox.claim(["a", "b"])) == [head]
