"""Leases that run out: who reaps them, when, and what it costs the job."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest

from tests.sql.calls import Calls, Row, ids
from tests.support.waiting import wait_until

WAITS = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"


@pytest.fixture
def swept(outbox):
    """A watchdog has been sweeping, and no hold is in force."""
    outbox.reap()
    for _ in range(4):
        outbox.forward(10)
        outbox.reap()
    return outbox


def age(calls: Calls, duration: float) -> None:
    """Time passes, with a sweep every ten seconds, as of a watchdog that lives."""
    while duration > 10:
        calls.forward(10)
        duration -= 10
        assert calls.reap() == []
    calls.forward(duration)


def test_lease_is_reaped_when_it_has_run_out(swept):
    event_id = swept.enqueue()
    claim = swept.claim(worker="w1")
    age(swept, 30)

    assert swept.reap() == [], "not a moment before"
    swept.forward(0.001)
    [reaped] = swept.reap()
    assert (reaped["event_id"], reaped["answer"], reaped["worker"], reaped["topic"]) == (
        event_id,
        "RETRYING",
        "w1",
        "mail",
    )
    row = swept.row(event_id)
    assert row["last_error"] == reaped["last_error"] == "worker lease expired"
    assert row["last_failure"]["error_class"] == "LeaseExpired"
    assert (row["claim_token"], row["lease_until"], row["locked_by"]) == (None, None, None)
    assert swept.claim().ids == claim.ids


def test_heartbeat_keeps_the_lease(swept):
    swept.enqueue()
    claim = swept.claim()
    for _ in range(10):
        age(swept, 10)
        assert swept.heartbeat(claim) == {}
        assert swept.reap() == []


def test_reaping_is_limited(swept):
    swept.enqueue_many(5)
    swept.claim()
    age(swept, 31)

    assert [len(swept.reap(p_limit=2)) for _ in range(4)] == [2, 2, 1, 0]


def test_short_sweep_starts_where_the_last_ended(swept, session):
    """It walks over nothing that vacuum could not remove below; what it left behind waits for a full one."""
    held, free = swept.enqueue_many(2)
    swept.claim()
    age(swept, 31)
    stranger = session()
    with stranger.conn.transaction():
        stranger.conn.execute("select from pulse.outbox where event_id = %s for update", (held,))
        assert ids(swept.reap(p_full=False)) == [free]
    swept.forward(1)

    assert swept.reap(p_full=False) == []
    assert ids(swept.reap()) == [held]


# Lapses


def test_lapse_in_company_gives_the_attempt_back(swept):
    event_id = swept.enqueue()
    swept.claim()
    age(swept, 31)
    [reaped] = swept.reap()

    assert (reaped["attempts"], reaped["lapses"]) == (0, 1)
    row = swept.row(event_id)
    assert (row["status"], row["next_run_at"]) == ("RETRYING", swept.now)


def test_third_start_is_alone_and_spends_the_budget(swept):
    """Two lapses in company, then alone; only deaths while alone spend the budget."""
    event_id = swept.enqueue(p_max_attempts=2)
    seen = []
    for _ in range(10):
        claim = swept.claim()
        if not claim:
            break
        seen.append((claim[0]["lapses"], claim[0]["alone"], claim[0]["attempts"]))
        swept.lapse(claim, "killed by signal 9")
        swept.forward(300)

    assert seen == [(0, False, 1), (1, False, 1), (2, True, 1), (3, True, 2)]
    row = swept.row(event_id)
    assert (row["status"], row["attempts"], row["lapses"]) == ("DEAD_LETTERED", 2, 4)
    assert row["last_error"] == "killed by signal 9"


def test_evidence_of_a_lapse_names_the_handler(outbox):
    """Whoever reports it may know the topic's handler; else an earlier failure of the cycle may."""
    ids = [outbox.enqueue(topic) for topic in ("child", "watchdog", "failed", "unknown")]
    outbox.fail(outbox.claim("failed"), failure={"handler": "shop.failed"}, delay=0)
    claim = outbox.claim("child")
    outbox.call("outbox_lapse", claim.ids, claim.tokens, "killed", '{"child": "shop.child"}')
    outbox.claim(["watchdog", "failed", "unknown"])
    outbox.keep_sweeping(25)
    outbox.forward(10)
    outbox.reap(p_handlers='{"watchdog": "shop.watchdog", "child": "shop.child"}')

    found = [outbox.row(event_id)["last_failure"] for event_id in ids]
    assert [failure.get("handler") for failure in found] == [
        "shop.child",
        "shop.watchdog",
        "shop.failed",
        None,
    ]
    assert [failure["rule"] for failure in found] == ["worker.died", *["lease.expired"] * 3]


def test_watchdog_and_child_count_lapses_alike(outbox):
    """Whoever notices a death, the watchdog or the parent of the child: one place decides."""
    for alone in (False, True):
        by_child, by_watchdog = outbox.enqueue("child"), outbox.enqueue("watchdog")
        outbox.lapse(outbox.claim("child", p_alone=alone))
        outbox.claim("watchdog", p_alone=alone)
        outbox.keep_sweeping(40)
        same = ("status", "attempts", "lapses", "max_attempts")
        one, other = outbox.row(by_child), outbox.row(by_watchdog)

        assert [one[name] for name in same] == [other[name] for name in same]
        assert one["attempts"] == int(alone)
        outbox.discard(by_child)
        outbox.discard(by_watchdog)


def test_job_that_killed_its_worker_alone_waits_longer_each_time(outbox):
    event_id = outbox.enqueue(p_max_attempts=20)
    waits = []
    for _ in range(12):
        outbox.lapse(outbox.claim(p_alone=True))
        waits.append((outbox.row(event_id)["next_run_at"] - outbox.now).total_seconds())
        outbox.now = outbox.row(event_id)["next_run_at"]

    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


@pytest.mark.parametrize("how", ["reap", "lapse"])
@pytest.mark.parametrize("whose", ["producer's", "policy's"])
def test_lapse_of_a_budget_of_one_dead_letters_at_once(outbox, how, whose):
    """A promise not to start twice after a crash."""
    event_id = outbox.enqueue(p_max_attempts=1 if whose == "producer's" else None)
    claim = outbox.claim(p_budgets=[1])
    if how == "lapse":
        assert outbox.lapse(claim) == {event_id: "DEAD_LETTERED"}
    else:
        assert [row["answer"] for row in outbox.keep_sweeping(40)] == ["DEAD_LETTERED"]

    row = outbox.row(event_id)
    assert (row["status"], row["attempts"], row["lapses"]) == ("DEAD_LETTERED", 1, 1)
    outbox.forward(10**6)
    assert outbox.claim() == []


def test_lapse_in_company_never_dead_letters(outbox):
    """Also when the policy's budget has shrunk below what the job has spent."""
    event_id = outbox.enqueue()
    for _ in range(3):
        outbox.fail(outbox.claim(p_budgets=[5]), delay=0)

    assert outbox.lapse(outbox.claim(p_budgets=[2])) == {event_id: "RETRYING"}
    assert outbox.row(event_id)["attempts"] == 3


def test_lapses_are_a_lane_of_their_own(outbox):
    """A dispatcher can take suspects apart from the others."""
    outbox.enqueue()
    outbox.lapse(outbox.claim())
    outbox.enqueue()

    assert [lane["lapses"] for lane in outbox.call("outbox_lanes", ["mail"])] == [0, 1]


# The hold


def lapsed_during_an_outage(calls: Calls):
    """A job whose lease ran out while nobody swept."""
    event_id = calls.enqueue()
    claim = calls.claim()
    calls.forward(60)
    return event_id, claim


def test_first_sweep_after_a_gap_only_holds(swept):
    """No mass reaping when the database comes back: the living report first."""
    event_id, claim = lapsed_during_an_outage(swept)

    assert swept.reap() == []
    age(swept, 29)
    assert swept.reap() == [], "the hold lasts for one lease"
    assert swept.complete(claim) == {}
    assert swept.status(event_id) == "COMPLETED"


def test_what_did_not_report_during_the_hold_is_reaped(swept):
    event_id, _ = lapsed_during_an_outage(swept)
    swept.reap()
    age(swept, 30)

    assert ids(swept.reap()) == [event_id]


def test_second_sweeper_respects_the_hold(swept, session):
    lapsed_during_an_outage(swept)
    swept.reap()
    other = session()
    for pause in (0, 5, 10, 10, 4):
        swept.forward(pause)
        other.now = swept.now
        assert other.reap() == []
    swept.forward(1)
    other.now = swept.now
    assert len(other.reap()) == 1


def test_first_sweep_of_all_holds(outbox):
    event_id = outbox.enqueue()
    outbox.claim()
    outbox.forward(31)

    assert outbox.reap() == []
    age(outbox, 30)
    assert ids(outbox.reap()) == [event_id]


def test_regular_sweeps_set_no_hold(swept):
    """The control: with a watchdog every ten seconds a lapsed lease is reaped at the next tick."""
    swept.enqueue()
    swept.claim()
    age(swept, 40)

    assert len(swept.reap()) == 1


def test_stuck_sweeper_blocks_nobody(swept, session):
    """A sweeper hangs in its transaction, with rows reaped and not committed: the others go on without it."""
    first = swept.enqueue()
    swept.claim()
    age(swept, 31)
    stuck, other = session(), session()
    stuck.now = other.now = swept.now
    other.conn.execute("set lock_timeout = '2s'")
    with stuck.conn.transaction(force_rollback=True):
        assert ids(stuck.reap()) == [first]

        second = other.enqueue()
        other.claim()
        for _ in range(4):
            other.forward(10)
            reaped = other.reap()
        assert ids(reaped) == [second]
    assert ids(other.reap()) == [first]


def test_stuck_first_sweeper_does_not_hide_the_hold(outbox, session):
    """Nobody has swept yet and the first hangs: the second sets the hold itself."""
    outbox.enqueue()
    outbox.claim()
    outbox.forward(31)
    stuck = session()
    stuck.now = outbox.now
    with stuck.conn.transaction(force_rollback=True):
        stuck.reap()
        assert outbox.reap() == []
        age(outbox, 30)
        assert len(outbox.reap()) == 1


def test_sweeps_leave_a_handful_of_rows(outbox):
    for _ in range(50):
        outbox.forward(1)
        outbox.reap()

    [counted] = outbox.conn.execute("select count(*) as rows from pulse.sweep").fetchall()
    assert counted["rows"] <= 2


def test_clock_that_goes_back_does_not_stop_the_watchdog(swept, t0: datetime):
    """After a failover to a machine whose clock is behind: a sweep of the future must not hold the present."""
    swept.forward(3600)
    swept.reap()
    swept.now = t0
    event_id = swept.enqueue()
    swept.claim()

    assert ids(swept.keep_sweeping(100)) == [event_id]


def test_first_sweep_after_a_hold_is_a_full_one(outbox: Calls):
    """What lapsed before the hold stands below the last sweep: starting there would leave it for a minute."""
    event_id = outbox.enqueue()
    outbox.claim()
    outbox.forward(70)
    held = []
    for _ in range(3):
        held += outbox.reap(p_full=False)
        outbox.forward(10.5)

    assert held == []
    assert ids(outbox.reap(p_full=False)) == [event_id]


def test_a_sweep_that_waited_for_the_table_reaps_nothing(outbox, session):
    """Heartbeats and results had to wait too, behind the same lock: the living report first."""
    watchdog, migration = session(), session()
    outbox.now = watchdog.now = None
    lease = timedelta(seconds=0.6)
    released = threading.Event()

    def sweep_again_and_again() -> list[Row]:
        found = []
        while not released.is_set():
            found += watchdog.reap(p_lease=lease)
        return found

    event_id = outbox.enqueue()
    claim = outbox.claim(p_lease=lease)
    with ThreadPoolExecutor(1) as pool:
        with migration.conn.transaction():
            migration.conn.execute("lock table pulse.outbox in access exclusive mode")
            sweeps = pool.submit(sweep_again_and_again)
            time.sleep(lease.total_seconds() * 3)  # the first sweep's hold is over, and so is the lease
            released.set()
        assert sweeps.result(timeout=10) == []

    assert outbox.row(event_id)["status"] == "RUNNING"
    assert outbox.complete(claim) == {}


def test_a_lease_begins_when_the_claim_gets_at_the_table(outbox, session):
    """Else what it took would have lapsed before anybody knew of it."""
    dispatcher, migration = session(), session()
    outbox.now = dispatcher.now = None
    event_id = outbox.enqueue()
    with ThreadPoolExecutor(1) as pool:
        with migration.conn.transaction():
            migration.conn.execute("lock table pulse.outbox in share mode")  # as `create index` does
            claim = pool.submit(dispatcher.claim, p_lease=timedelta(seconds=20))
            wait_until(
                lambda: outbox.conn.execute(WAITS, (dispatcher.conn.info.backend_pid,)).fetchall(),
                what="the claim waits",
            )
            time.sleep(0.5)
            [over] = outbox.conn.execute("select clock_timestamp() as at").fetchall()
        assert claim.result(timeout=10).ids == [event_id]

    assert outbox.row(event_id)["lease_until"] >= over["at"] + timedelta(seconds=20)
