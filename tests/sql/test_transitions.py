"""Each arrow of the state machine, and what it leaves on the row."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.calls import LEASE, Calls, Claim, ids, seconds
from tests.support.waiting import wait_until


def test_enqueued_event_is_pending_and_due(outbox, t0):
    event_id = outbox.enqueue(
        payload={"order": 7}, p_headers=Jsonb({"trace": "x"}), p_source="shop", p_target="mailer"
    )

    row = outbox.row(event_id)
    assert (row["status"], row["attempts"], row["next_run_at"], row["created_at"]) == ("PENDING", 0, t0, t0)
    assert (row["payload"], row["headers"], row["source"], row["target"]) == (
        {"order": 7},
        {"trace": "x"},
        "shop",
        "mailer",
    )
    assert row["idempotency_key"] == str(event_id)
    assert (row["lease_until"], row["locked_by"], row["claim_token"]) == (None, None, None)


def test_claim_counts_the_attempt_and_takes_a_lease(outbox, t0):
    event_id = outbox.enqueue(payload={"order": 7})

    claim = outbox.claim(worker="w1")

    assert claim.ids == [event_id]
    assert claim[0]["payload"] == {"order": 7}
    row = outbox.row(event_id)
    assert (row["status"], row["attempts"], row["max_attempts"], row["lease_seq"]) == ("RUNNING", 1, 5, 1)
    assert (row["lease_until"], row["locked_by"], row["claim_token"]) == (t0 + LEASE, "w1", claim.token)
    assert outbox.claim() == []


def test_completed_event_keeps_its_token_and_loses_its_lease(outbox, t0):
    event_id = outbox.enqueue()
    claim = outbox.claim()
    outbox.forward(3)

    assert outbox.complete(claim) == {}
    row = outbox.row(event_id)
    assert (row["status"], row["completed_at"], row["claim_token"]) == (
        "COMPLETED",
        t0 + seconds(3),
        claim.token,
    )
    assert (row["lease_until"], row["locked_by"]) == (None, None)
    assert row["attempts"] == 1


def test_completed_event_is_deleted_where_its_topic_says_so(outbox):
    """But never one whose given key has to be remembered."""
    gone = outbox.enqueue()
    kept = outbox.enqueue(p_idempotency_key="invoice-7")
    claim = outbox.claim()

    assert outbox.complete(claim, p_delete=True) == {}
    assert outbox.complete(claim, p_delete=True) == {}, "the answer was lost: asking again is no failure"
    assert outbox.conn.execute("select event_id from pulse.outbox").fetchall() == [{"event_id": kept}]
    assert gone != kept


def test_failed_attempt_waits_for_its_delay(outbox, t0):
    event_id = outbox.enqueue()
    claim = outbox.claim()

    assert outbox.fail(claim, "boom", delay=4, failure={"error_class": "Boom"}) == {event_id: "RETRYING"}
    row = outbox.row(event_id)
    assert (row["status"], row["next_run_at"], row["first_failed_at"]) == ("RETRYING", t0 + seconds(4), t0)
    assert (row["last_error"], row["last_failure"]) == ("boom", {"error_class": "Boom"})
    assert (row["lease_until"], row["locked_by"], row["completed_at"]) == (None, None, None)
    outbox.forward(3.999)
    assert outbox.claim() == []
    outbox.forward(0.001)
    assert outbox.claim().ids == [event_id]


def test_first_failure_of_the_cycle_is_remembered(outbox, t0):
    event_id = outbox.enqueue()
    for _ in range(2):
        outbox.fail(outbox.claim(), delay=1)
        outbox.forward(1)

    assert outbox.row(event_id)["first_failed_at"] == t0


def test_spent_budget_dead_letters(outbox, t0):
    event_id = outbox.enqueue(p_max_attempts=3)
    answers = []
    for _ in range(3):
        answers += outbox.fail(outbox.claim(), delay=0).values()

    assert answers == ["RETRYING", "RETRYING", "DEAD_LETTERED"]
    row = outbox.row(event_id)
    assert (row["attempts"], row["completed_at"], row["alerted_at"]) == (3, t0, None)
    outbox.forward(10**6)
    assert outbox.claim() == [], "parked, for ever"


def test_terminal_failure_dead_letters_at_once(outbox):
    event_id = outbox.enqueue()

    assert outbox.fail(outbox.claim(), terminal=True) == {event_id: "DEAD_LETTERED"}
    assert outbox.row(event_id)["attempts"] == 1


def test_batch_of_failures_answers_row_by_row(outbox):
    """One terminal, one transient, one of somebody else: each gets its own answer, error and delay."""
    first, second, third = outbox.enqueue_many(3)
    mine = outbox.claim(limit=2)
    other = outbox.claim()
    order = [first, second, third]
    rows = outbox.call(
        "outbox_fail",
        order,
        [mine.token] * 3,
        ["a", "b", "c"],
        [Jsonb({})] * 3,
        [seconds(1), seconds(2), seconds(3)],
        [True, False, True],
    )

    assert {row["event_id"]: row["answer"] for row in rows} == {
        first: "DEAD_LETTERED",
        second: "RETRYING",
        third: "lost",
    }
    assert [outbox.row(e)["last_error"] for e in order] == ["a", "b", None]
    assert outbox.row(second)["next_run_at"] == outbox.now + seconds(2)
    assert outbox.complete(other) == {}


def test_error_is_capped(outbox):
    """Recording a failure never fails, however long its text and whatever its characters."""
    event_id = outbox.enqueue()
    outbox.fail(outbox.claim(), "\N{PILE OF POO}" * 3000)

    assert len(outbox.row(event_id)["last_error"].encode()) == 8192


def test_snooze_spends_no_attempt(outbox, t0):
    event_id = outbox.enqueue()
    claim = outbox.claim()

    assert outbox.snooze(claim, 60) == {}
    row = outbox.row(event_id)
    assert (row["status"], row["attempts"], row["snoozes"], row["next_run_at"]) == (
        "RETRYING",
        0,
        1,
        t0 + seconds(60),
    )
    assert (row["last_error"], row["first_failed_at"]) == (None, None)
    outbox.forward(60)
    assert outbox.claim().ids == [event_id]


def test_budget_of_one_survives_a_snooze(outbox):
    event_id = outbox.enqueue(p_max_attempts=1)
    outbox.snooze(outbox.claim(), 0)

    assert outbox.claim()[0]["attempts"] == 1
    assert outbox.row(event_id)["snoozes"] == 1


def test_release_gives_the_attempt_back(outbox, t0):
    event_id = outbox.enqueue()
    claim = outbox.claim()
    outbox.forward(5)

    assert outbox.release(claim) == {}
    row = outbox.row(event_id)
    assert (row["status"], row["attempts"], row["lease_seq"]) == ("PENDING", 0, 1)
    assert row["next_run_at"] == t0 + seconds(5)
    assert outbox.claim()[0]["lease_seq"] == 2, "the fencing number never goes back"


@pytest.mark.parametrize("before", ["fail", "snooze", "lapse"])
def test_release_goes_back_to_where_it_was(outbox, before):
    """What had failed, waited or lapsed before was RETRYING; what had not was PENDING."""
    event_id = outbox.enqueue()
    claim = outbox.claim()
    {"fail": outbox.fail, "snooze": outbox.snooze, "lapse": outbox.lapse}[before](claim)
    outbox.forward(10)
    known = {
        name: outbox.row(event_id)[name] for name in ("attempts", "status", "lapses", "snoozes", "last_error")
    }

    outbox.release(outbox.claim())

    assert {name: outbox.row(event_id)[name] for name in known} == known


def test_heartbeat_extends_the_lease(outbox, t0):
    event_id = outbox.enqueue()
    claim = outbox.claim()
    outbox.forward(10)

    assert outbox.heartbeat(claim) == {}
    assert outbox.row(event_id)["lease_until"] == t0 + seconds(40)
    assert outbox.heartbeat(claim, p_lease=seconds(90)) == {}
    assert outbox.row(event_id)["lease_until"] == t0 + seconds(100)


def test_heartbeat_revives_a_lapsed_lease_that_nobody_reaped(outbox):
    event_id = outbox.enqueue()
    claim = outbox.claim()
    outbox.forward(1000)

    assert outbox.heartbeat(claim) == {}
    assert outbox.keep_sweeping(25) == []
    assert outbox.complete(claim) == {}
    assert outbox.status(event_id) == "COMPLETED"


def test_row_that_becomes_claimable_gets_the_present_time(outbox, session):
    """Not its transaction's start: claims that go on from where they were must find it."""
    outbox.now = None
    event_id = outbox.enqueue()
    claim = outbox.claim()
    with outbox.conn.transaction():
        [started] = outbox.conn.execute("select now() as started").fetchall()
        outbox.conn.execute("select pg_sleep(0.01)")
        outbox.release(claim)

    assert outbox.row(event_id)["next_run_at"] > started["started"]


# Lost answers


def test_repeated_settlements_are_silent(outbox):
    """The first call got through and its answer did not: the second finds its own result."""
    for settle in (outbox.complete, outbox.snooze, outbox.release):
        outbox.enqueue("one")
        claim = outbox.claim("one")
        assert settle(claim) == {}
        before = outbox.row(claim.ids[0])

        assert settle(claim) == {}
        assert outbox.row(claim.ids[0]) == before
        if before["status"] != "COMPLETED":
            outbox.discard(claim.ids[0])


@pytest.mark.parametrize("terminal", [False, True])
def test_repeated_failure_gets_the_same_answer(outbox, terminal):
    event_id = outbox.enqueue()
    claim = outbox.claim()
    answer = outbox.fail(claim, terminal=terminal)
    before = outbox.row(event_id)
    outbox.forward(1)

    assert outbox.fail(claim, terminal=terminal) == answer
    assert outbox.row(event_id) == before


def test_repeated_lapse_gets_the_same_answer(outbox):
    event_id = outbox.enqueue()
    claim = outbox.claim()
    assert outbox.lapse(claim) == {event_id: "RETRYING"}
    before = outbox.row(event_id)

    assert outbox.lapse(claim) == {event_id: "RETRYING"}
    assert outbox.row(event_id) == before


def test_another_result_for_a_settled_claim_is_lost(outbox):
    """The wanted state decides: a completed job can't fail afterwards, nor a failed one be released as if new."""
    done, failed = outbox.enqueue("done"), outbox.enqueue("failed", p_max_attempts=1)
    first, second = outbox.claim("done"), outbox.claim("failed")
    outbox.complete(first)
    outbox.fail(second)

    assert outbox.fail(first) == {done: "lost"}
    assert outbox.release(first) == {done: "lost"}
    assert outbox.heartbeat(first) == {done: "lost"}
    assert outbox.complete(second) == {failed: "lost"}
    assert outbox.snooze(second) == {failed: "lost"}
    assert outbox.statuses(done, failed) == ["COMPLETED", "DEAD_LETTERED"]


# The fence

SETTLE = ["heartbeat", "complete", "fail", "snooze", "release", "lapse"]


@pytest.mark.parametrize("verb", SETTLE)
def test_reaped_claim_of_the_same_worker_matches_nothing(outbox, verb):
    """A worker whose lease was reaped and who claims the same job again: its old run is nobody's."""
    event_id = outbox.enqueue()
    old = outbox.claim(worker="same")
    assert ids(outbox.keep_sweeping(40)) == [event_id]

    assert getattr(outbox, verb)(old) == {event_id: "lost"}, "between the reaping and the next claim"
    outbox.forward(1)
    new = outbox.claim(worker="same")
    assert new.ids == [event_id]
    before = outbox.row(event_id)

    assert getattr(outbox, verb)(old) == {event_id: "lost"}
    assert outbox.row(event_id) == before
    assert outbox.complete(new) == {}


@pytest.mark.parametrize("verb", SETTLE)
def test_claim_from_before_a_replay_matches_nothing(outbox, verb):
    """Attempts start again at 0, so the old run and the new one agree in them: only the token tells them apart."""
    event_id = outbox.enqueue(p_max_attempts=1)
    old = outbox.claim()
    outbox.fail(old)
    outbox.replay(event_id)

    if verb != "release":
        assert getattr(outbox, verb)(old) == {event_id: "lost"}
    new = outbox.claim()
    assert new[0]["attempts"] == old[0]["attempts"] == 1
    before = outbox.row(event_id)
    assert getattr(outbox, verb)(old) == {event_id: "lost"}
    assert outbox.row(event_id) == before


@pytest.mark.parametrize("verb", SETTLE)
def test_foreign_token_and_unknown_event_are_lost(outbox, verb):
    event_id = outbox.enqueue()
    outbox.claim()
    before = outbox.row(event_id)
    stranger = Claim(uuid.uuid4(), [{"event_id": event_id}, {"event_id": uuid.uuid4()}])

    assert getattr(outbox, verb)(stranger) == dict.fromkeys(stranger.ids, "lost")
    assert outbox.row(event_id) == before


def test_old_and_new_run_in_one_batch_of_failures(outbox):
    """The old run of a reaped job fails in the same batch as the new one: what it says must not touch the new run."""
    event_id = outbox.enqueue()
    old = outbox.claim()
    outbox.keep_sweeping(40)
    new = outbox.claim()
    tokens, delays = [old.token, new.token], [seconds(1), seconds(100)]

    rows = outbox.call(
        "outbox_fail", [event_id] * 2, tokens, ["old", "new"], [Jsonb({})] * 2, delays, [True, False]
    )

    assert sorted(row["answer"] for row in rows) == ["RETRYING", "lost"]
    row = outbox.row(event_id)
    assert (row["status"], row["last_error"], row["next_run_at"]) == (
        "RETRYING",
        "new",
        outbox.now + seconds(100),
    )


def test_old_and_new_run_in_one_batch_of_snoozes(outbox):
    event_id = outbox.enqueue()
    old = outbox.claim()
    outbox.keep_sweeping(40)
    new = outbox.claim()

    rows = outbox.call("outbox_snooze", [event_id] * 2, [old.token, new.token], [seconds(1), seconds(100)])

    assert [row["answer"] for row in rows] == ["lost"]
    assert outbox.row(event_id)["next_run_at"] == outbox.now + seconds(100)


def test_same_claim_twice_in_one_batch_settles_once(outbox):
    event_id = outbox.enqueue(p_max_attempts=4)
    claim = outbox.claim()
    twice = [event_id] * 2, [claim.token] * 2

    outbox.call("outbox_snooze", *twice, [seconds(1)] * 2)

    assert (outbox.row(event_id)["attempts"], outbox.row(event_id)["snoozes"]) == (0, 1)


@pytest.mark.parametrize("verb", ["heartbeat", "complete", "release"])
def test_uneven_arrays_are_refused(outbox, verb):
    with pytest.raises(psycopg.Error, match="same length") as refused:
        outbox.call(f"outbox_{verb}", [uuid.uuid4()], [])

    assert refused.value.sqlstate == "PO003"


@pytest.mark.parametrize("verb", SETTLE)
def test_empty_batch_is_nothing(outbox, verb):
    assert getattr(outbox, verb)(Claim(uuid.uuid4(), [])) == {}


# A row locked by a stranger


@pytest.mark.parametrize(
    ("verb", "after"),
    [
        ("complete", "COMPLETED"),
        ("fail", "RETRYING"),
        ("snooze", "RETRYING"),
        ("release", "PENDING"),
        ("lapse", "RETRYING"),
    ],
)
def test_batch_settles_without_the_locked_row(outbox, session, verb, after):
    """An operator's open transaction holds one row: the others settle, that one answers 'locked' and settles later."""
    held, *free = outbox.enqueue_many(3)
    claim = outbox.claim()
    stranger = session()
    outbox.conn.execute("set lock_timeout = '2s'")
    with stranger.conn.transaction():
        stranger.conn.execute("select from pulse.outbox where event_id = %s for update", (held,))

        assert getattr(outbox, verb)(claim)[held] == "locked"
        assert outbox.statuses(held, *free) == ["RUNNING", after, after]
    answers = getattr(outbox, verb)(claim)

    assert answers in ({}, dict.fromkeys(claim.ids, after))
    assert outbox.statuses(held, *free) == [after] * 3
    assert {outbox.row(e)["attempts"] for e in claim.ids} in ({0}, {1}), (
        "the repetition counted nothing twice"
    )


def statuses_or_gone(outbox: Calls, *event_ids: uuid.UUID) -> list[str | None]:
    query = "select event_id, status::text from pulse.outbox where event_id = any (%s)"
    found = {row["event_id"]: row["status"] for row in outbox.conn.execute(query, [list(event_ids)])}
    return [found.get(event_id) for event_id in event_ids]


@pytest.mark.parametrize("delete", [False, True], ids=["kept", "deleted"])
@pytest.mark.parametrize("lock", ["update", "key share"])
def test_completion_of_a_row_whose_lock_is_over(outbox, session, lock, delete):
    """What a lock leaves on the row looks like a lock. Beside it: a row that was extended, an untouched, a lost one."""
    marked, extended, untouched, lost = outbox.enqueue_many(4)
    claim = outbox.claim()
    with session().conn.transaction() as stranger:
        stranger.connection.execute(f"select from pulse.outbox where event_id = %s for {lock}", (marked,))
    outbox.call("outbox_heartbeat", [extended], [claim.token])
    tokens = [uuid.uuid4() if event_id == lost else claim.token for event_id in claim.ids]

    answers = outbox.call("outbox_complete", claim.ids, tokens, p_delete=delete)

    assert answers == [{"event_id": lost, "answer": "lost"}]
    after = None if delete else "COMPLETED"
    assert statuses_or_gone(outbox, marked, extended, untouched, lost) == [after, after, after, "RUNNING"]


@pytest.mark.parametrize("delete", [False, True], ids=["kept", "deleted"])
def test_completion_of_a_row_that_its_own_transaction_locked(outbox, delete):
    """As a handler may have done before its event is completed with its writes, in a savepoint or not."""
    mine, others = outbox.enqueue_many(2)
    claim = outbox.claim()

    with outbox.conn.transaction():
        outbox.conn.execute("select from pulse.outbox where event_id = %s for update", (mine,))
        with outbox.conn.transaction():
            assert outbox.complete(claim, p_delete=delete) == {}

    assert statuses_or_gone(outbox, mine, others) == [None if delete else "COMPLETED"] * 2


def test_completion_of_a_row_that_is_deleted_or_locked(outbox, session):
    held, free = outbox.enqueue_many(2)
    claim = outbox.claim()
    outbox.conn.execute("set lock_timeout = '2s'")
    with session().conn.transaction() as stranger:
        stranger.connection.execute("select from pulse.outbox where event_id = %s for update", (held,))
        assert outbox.complete(claim, p_delete=True) == {held: "locked"}
        assert statuses_or_gone(outbox, held, free) == ["RUNNING", None]

    assert outbox.complete(claim, p_delete=True) == {}
    assert statuses_or_gone(outbox, held, free) == [None, None]


def test_row_that_is_extended_meanwhile_is_deleted_all_the_same(outbox, session):
    """Passed over while a heartbeat writes it, it must not be found free by the statement after that and be kept."""
    extended, other = outbox.enqueue_many(2)
    claim = outbox.claim()
    heart, gate = session(), session()
    outbox.conn.execute(
        f"""create function public.wait() returns trigger language plpgsql as $$
              begin perform pg_advisory_lock(7), pg_advisory_unlock(7); return old; end $$;
            create trigger wait before delete on pulse.outbox for each row
              when (old.event_id = '{other}') execute function public.wait()"""
    )
    gate.conn.execute("select pg_advisory_lock(7)")
    with ThreadPoolExecutor(1) as thread:
        with heart.conn.transaction():
            heart.call("outbox_heartbeat", [extended], [claim.token])
            completion = thread.submit(outbox.complete, claim, p_delete=True)
            wait_until(lambda: gate.conn.execute(WAITS_FOR_ADVISORY_LOCK).fetchall())
        gate.conn.execute("select pg_advisory_unlock(7)")
        assert completion.result(10) == {}

    assert statuses_or_gone(outbox, extended, other) == [None, None]


WAITS_FOR_ADVISORY_LOCK = "select pid from pg_locks where locktype = 'advisory' and not granted and objid = 7"


def test_heartbeat_goes_round_the_locked_row(outbox, session, t0):
    held, free = outbox.enqueue_many(2)
    claim = outbox.claim()
    stranger = session()
    outbox.conn.execute("set lock_timeout = '2s'")
    outbox.forward(10)
    with stranger.conn.transaction():
        stranger.conn.execute("select from pulse.outbox where event_id = %s for update", (held,))

        assert outbox.heartbeat(claim) == {held: "locked"}
        assert outbox.row(held)["lease_until"] == t0 + LEASE
        assert outbox.row(free)["lease_until"] == t0 + seconds(40)
    assert outbox.heartbeat(claim) == {}
    assert outbox.row(held)["lease_until"] == t0 + seconds(40)


def test_claim_and_watchdog_go_round_the_locked_row(outbox, session):
    held, free = outbox.enqueue_many(2)
    stranger = session()
    outbox.conn.execute("set lock_timeout = '2s'")
    with stranger.conn.transaction():
        stranger.conn.execute("select from pulse.outbox where event_id = %s for update", (held,))
        assert outbox.claim().ids == [free]
    assert outbox.claim().ids == [held]

    with stranger.conn.transaction():
        stranger.conn.execute("select from pulse.outbox where event_id = %s for update", (held,))
        assert ids(outbox.keep_sweeping(40)) == [free]
    assert ids(outbox.reap()) == [held]
