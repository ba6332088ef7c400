"""Replay, discard, pause, prune and what operators read."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.sql.calls import seconds
from tests.support.waiting import wait_until


def refusal(call, *arguments, **named) -> str | None:
    with pytest.raises(psycopg.Error) as refused:
        call(*arguments, **named)
    return refused.value.sqlstate


def event_in(outbox, state):
    """An event in the given state."""
    if state == "DEAD_LETTERED":
        return outbox.dead()
    event_id = outbox.enqueue()
    if state == "DISCARDED":
        outbox.discard(event_id)
    elif state != "PENDING":
        claim = outbox.claim()
        if state == "COMPLETED":
            outbox.complete(claim)
        elif state == "RETRYING":
            outbox.fail(claim)
    assert outbox.status(event_id) == state
    return event_id


def test_replay_starts_a_new_cycle_in_place(outbox, t0):
    event_id = outbox.enqueue(p_idempotency_key="invoice-7", p_generation=1, p_max_attempts=2)
    outbox.fail(outbox.claim(), "first", delay=5)
    outbox.forward(5)
    outbox.fail(outbox.claim(), "second", failure={"error_class": "Boom"})
    before = outbox.row(event_id)
    outbox.forward(60)

    outbox.replay(event_id, 2, "ada")

    row = outbox.row(event_id)
    [cycle] = row["failure_history"]
    assert (cycle["attempts"], cycle["last_error"], cycle["generation"]) == (2, "second", 1)
    assert (cycle["last_failure"], cycle["replayed_by"]) == ({"error_class": "Boom"}, "ada")
    assert [cycle[name][:19] for name in ("first_failed_at", "dead_lettered_at", "replayed_at")] == [
        "2030-01-01T12:00:00",
        "2030-01-01T12:00:05",
        "2030-01-01T12:01:05",
    ]
    assert (row["status"], row["generation"], row["next_run_at"]) == ("PENDING", 2, t0 + seconds(65))
    cleared = (
        "last_error",
        "last_failure",
        "first_failed_at",
        "completed_at",
        "claim_token",
        "alert_id",
        "alert_offered_at",
        "alerted_at",
    )
    assert [row[name] for name in cleared] == [None] * len(cleared)
    assert [row[name] for name in ("attempts", "lapses", "snoozes")] == [0, 0, 0]
    kept = ("event_id", "idempotency_key", "lease_seq", "seq", "payload", "created_at")
    assert [row[name] for name in kept] == [before[name] for name in kept]
    assert outbox.claim()[0]["lease_seq"] == 3


def test_every_cycle_is_kept(outbox):
    event_id = outbox.dead(error="one")
    outbox.replay(event_id)
    outbox.fail(outbox.claim(), "two", terminal=True)
    outbox.replay(event_id)

    assert [cycle["last_error"] for cycle in outbox.row(event_id)["failure_history"]] == ["one", "two"]


def test_replay_gives_suspects_a_new_start(outbox):
    event_id = outbox.enqueue(p_max_attempts=1)
    outbox.lapse(outbox.claim())
    outbox.replay(event_id)

    [row] = outbox.claim()
    assert (row["lapses"], row["alone"], row["attempts"], row["max_attempts"]) == (0, False, 1, 1)


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "RETRYING", "COMPLETED", "DISCARDED"])
def test_only_the_dead_are_replayed(outbox, state):
    event_id = event_in(outbox, state)
    before = outbox.row(event_id)

    assert refusal(outbox.replay, event_id) == "PO002"
    assert outbox.row(event_id) == before


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETED", "DISCARDED"])
def test_what_runs_or_has_ended_is_not_discarded(outbox, state):
    event_id = event_in(outbox, state)
    before = outbox.row(event_id)

    assert refusal(outbox.discard, event_id) == "PO002"
    assert outbox.row(event_id) == before


@pytest.mark.parametrize("state", ["PENDING", "RETRYING", "DEAD_LETTERED"])
def test_discarded_event_never_runs(outbox, t0, state):
    event_id = event_in(outbox, state)
    outbox.forward(100)

    outbox.discard(event_id, "customer left", "ada")

    row = outbox.row(event_id)
    [cycle] = row["failure_history"]
    assert (row["status"], row["completed_at"]) == ("DISCARDED", t0 + seconds(100))
    assert (cycle["discarded_by"], cycle["reason"], cycle["discarded_at"][:19]) == (
        "ada",
        "customer left",
        "2030-01-01T12:01:40",
    )
    assert (cycle["dead_lettered_at"] is not None) == (state == "DEAD_LETTERED")
    outbox.forward(10**6)
    assert outbox.claim() == []


def test_unknown_event(outbox):
    for event_id in (uuid.uuid4(), None):
        assert refusal(outbox.replay, event_id) == "PO001"
        assert refusal(outbox.discard, event_id) == "PO001"


def test_bad_arguments_are_named_before_the_event_is_looked_for(outbox):
    nobody = uuid.uuid4()

    assert refusal(outbox.replay, nobody, None) == "PO003"
    assert refusal(outbox.replay, nobody, -1) == "PO003"
    assert refusal(outbox.replay, nobody, 0, "") == "PO003"
    assert refusal(outbox.replay, nobody, 0, None) == "PO003"
    assert refusal(outbox.discard, nobody, "") == "PO003"
    assert refusal(outbox.discard, nobody, None) == "PO003"
    assert refusal(outbox.discard, nobody, "why", "") == "PO003"
    assert refusal(outbox.call, "outbox_pause", "", "why", "who") == "PO003"
    assert refusal(outbox.call, "outbox_pause", "x" * 201, "why", "who") == "PO003"
    assert refusal(outbox.call, "outbox_pause", "mail", None, "who") == "PO003"
    assert refusal(outbox.call, "outbox_pause", "mail", "why", "") == "PO003"
    assert refusal(outbox.call, "outbox_resume", "mail", "") == "PO003"
    assert refusal(outbox.call, "outbox_prune", p_retention=seconds(-1)) == "PO003"
    assert refusal(outbox.call, "outbox_prune", p_retention=None) == "PO003"


def test_twenty_replays_at_once_make_one_entry(outbox, session):
    event_id = outbox.dead()
    together = threading.Barrier(20)

    def replay(calls):
        together.wait(20)
        try:
            calls.replay(event_id, by=f"operator {calls.conn.info.backend_pid}")
        except psycopg.Error as error:
            return error.sqlstate
        return "replayed"

    with ThreadPoolExecutor(20) as pool:
        outcomes = list(pool.map(replay, [session() for _ in range(20)], timeout=30))

    assert sorted(outcomes) == ["PO002"] * 19 + ["replayed"]
    assert len(outbox.row(event_id)["failure_history"]) == 1


def test_repeated_request_changes_nothing(outbox):
    """The answer to a replay or discard was lost: sent again under the same id it is silent, under another refused."""
    event_id, request = outbox.dead(), uuid.uuid4()
    for _ in range(2):
        outbox.call("outbox_replay", event_id, 0, "ada", p_request=request)
        assert len(outbox.row(event_id)["failure_history"]) == 1
    assert refusal(outbox.call, "outbox_replay", event_id, 0, "ada", p_request=uuid.uuid4()) == "PO002"

    discarding = uuid.uuid4()
    for _ in range(2):
        outbox.call("outbox_discard", event_id, "why", "ada", p_request=discarding)
        assert len(outbox.row(event_id)["failure_history"]) == 2
    assert refusal(outbox.call, "outbox_discard", event_id, "why", "ada") == "PO002"


def test_request_that_comes_late_changes_nothing(outbox):
    """The network held it back until after its repetition, and after another request."""
    event_id, late = outbox.dead(), uuid.uuid4()
    for request in (late, uuid.uuid4()):
        outbox.call("outbox_replay", event_id, 0, "ada", p_request=request)
        outbox.fail(outbox.claim(), terminal=True)

    outbox.call("outbox_replay", event_id, 0, "ada", p_request=late)

    assert outbox.status(event_id) == "DEAD_LETTERED"
    assert len(outbox.row(event_id)["failure_history"]) == 2


def test_replay_killed_half_way_is_nothing(outbox, session):
    """The backend dies after the update and before the commit."""
    event_id = outbox.dead()
    before = outbox.row(event_id)
    victim = session()
    victim.conn.execute("begin")
    victim.replay(event_id)
    outbox.conn.execute("select pg_terminate_backend(%s, 5000)", (victim.conn.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        victim.conn.execute("commit")

    assert outbox.row(event_id) == before
    outbox.replay(event_id)
    assert len(outbox.row(event_id)["failure_history"]) == 1


def test_discard_waits_for_a_replay_and_then_decides(outbox, session):
    """Two operators with different minds: the second acts on what the first left."""
    event_id = outbox.dead()
    first, second = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with first.conn.transaction():
            first.replay(event_id)
            discarded = pool.submit(second.discard, event_id)
            waiting = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
            pid = second.conn.info.backend_pid
            wait_until(lambda: outbox.conn.execute(waiting, (pid,)).fetchall(), what="the discard waits")
        discarded.result(timeout=10)

    assert outbox.status(event_id) == "DISCARDED"
    assert ["replayed_by" in cycle for cycle in outbox.row(event_id)["failure_history"]] == [True, False]


def test_pausing_again_says_who_and_why_now(outbox, t0):
    outbox.call("outbox_pause", None, "first", "ada")
    outbox.forward(5)
    outbox.call("outbox_pause", None, "second", "bob")

    [pause] = outbox.conn.execute("select * from pulse.pause").fetchall()
    assert pause == {"topic": None, "reason": "second", "paused_by": "bob", "paused_at": t0 + seconds(5)}


def test_hostile_names_are_data(outbox):
    """Topics, workers' and operators' names are never SQL text."""
    name = "'); drop schema pulse cascade; -- \"%s $1 \\"
    event_id = outbox.enqueue(name, key=name, p_idempotency_key=name, p_source=name, p_target=name)
    outbox.pause(name)
    assert outbox.claim(name) == []
    outbox.resume(name)
    claim = outbox.claim(name, worker=name)
    assert claim.ids == [event_id]
    outbox.seen(name, [name], sleeping=True)
    outbox.fail(claim, name, terminal=True)
    outbox.replay(event_id, by=name)
    outbox.discard(event_id, name, name)

    assert outbox.row(event_id)["failure_history"][1]["discarded_by"] == name


# After a restore


def test_what_dead_workers_hold_is_freed_at_once(outbox):
    """Its attempt was none, nobody suspects it, and who held it gets it no more. What a living worker holds stays."""
    outbox.seen("alive")
    outbox.seen("silent")
    outbox.forward(31)
    outbox.seen("alive")
    tried = outbox.enqueue("tried")
    outbox.fail(outbox.claim("tried"), delay=0)
    ids = [tried, *(outbox.enqueue(topic) for topic in ("unknown", "silent", "alive"))]
    claims = [outbox.claim(topic, worker=topic) for topic in ("tried", "unknown", "silent", "alive")]
    outbox.forward(1)

    assert outbox.scalar("outbox_free", "ada") == 3
    assert outbox.statuses(*ids) == ["RETRYING", "PENDING", "PENDING", "RUNNING"]
    assert [outbox.row(event_id)["attempts"] for event_id in ids] == [1, 0, 0, 1]
    assert [outbox.row(event_id)["lapses"] for event_id in ids] == [0, 0, 0, 0]
    assert [outbox.row(event_id)["claim_token"] for event_id in ids[:3]] == [None] * 3
    assert [outbox.complete(claim) for claim in claims[:3]] == [{event_id: "lost"} for event_id in ids[:3]]
    assert outbox.complete(claims[3]) == {}
    assert outbox.scalar("outbox_free", "ada") == 0
    assert set(outbox.claim(["tried", "unknown", "silent"]).ids) == set(ids[:3])


def test_what_may_not_start_twice_is_not_freed_to_run(outbox):
    event_id = outbox.enqueue(p_max_attempts=1)
    outbox.claim(worker="gone")

    assert outbox.scalar("outbox_free", "ada") == 1
    row = outbox.row(event_id)
    assert (row["status"], row["attempts"], row["last_error"]) == ("DEAD_LETTERED", 1, "worker lease expired")
    assert (row["alerted_at"], row["claim_token"]) == (None, None)


def test_freed_events_keep_the_order_of_their_key(outbox):
    first, second = outbox.enqueue_many(2, key="k")
    outbox.claim(worker="gone")
    outbox.scalar("outbox_free", "ada")

    assert outbox.claim(limit=10).ids == [first]
    assert outbox.status(second) == "PENDING"


def test_free_goes_no_further_than_asked_and_says_who(outbox):
    outbox.enqueue_many(5)
    outbox.claim(worker="gone", limit=5)

    assert refusal(outbox.call, "outbox_free", "") == "PO003"
    assert [outbox.scalar("outbox_free", "ada", 2) for _ in range(4)] == [2, 2, 1, 0]


# Pruning


def test_prune_deletes_what_ended_long_ago(outbox):
    """Completed and discarded rows past their retention; nothing unfinished, nothing dead."""
    states = ("COMPLETED", "DISCARDED", "DEAD_LETTERED", "RUNNING", "RETRYING", "PENDING")
    old = {state: event_in(outbox, state) for state in states}
    outbox.forward(3600)
    young = outbox.enqueue("young")
    outbox.complete(outbox.claim("young"))
    outbox.forward(1)

    [pruned] = outbox.call("outbox_prune", p_retention=seconds(3600))

    assert pruned == {"pruned": 2, "next_page": None}
    left = {row["event_id"] for row in outbox.conn.execute("select event_id from pulse.outbox")}
    assert left == {young, *(old[state] for state in states[2:])}


def test_prune_takes_dead_letters_when_asked(outbox):
    event_id = outbox.dead()
    outbox.forward(10)

    assert outbox.call("outbox_prune", p_retention=seconds(10), p_dead=True)[0]["pruned"] == 0
    outbox.forward(1)
    assert outbox.call("outbox_prune", p_retention=seconds(10))[0]["pruned"] == 0
    assert outbox.call("outbox_prune", p_retention=seconds(10), p_dead=True)[0]["pruned"] == 1
    assert refusal(outbox.replay, event_id) == "PO001"


def test_prune_forgets_what_handlers_did_only_when_asked(outbox):
    outbox.conn.execute(
        "insert into pulse.event_handled select 'h', n::text, %s - n * interval '1 day' from generate_series(1, 500) n",
        (outbox.now,),
    )
    outbox.call("outbox_prune", p_retention=seconds(0))
    assert refusal(outbox.call, "outbox_prune_handled", None) == "PO003"
    assert refusal(outbox.call, "outbox_prune_handled", seconds(-1)) == "PO003"
    pruned: list[int] = []
    page: int | None = 0
    while page is not None:
        [step] = outbox.call("outbox_prune_handled", seconds(400 * 86400), page, 1)
        pruned.append(step["pruned"])
        page = step["next_page"]

    assert sum(pruned) == 100
    assert len(pruned) > 1
    [left] = outbox.conn.execute(
        "select min(handled_at) as oldest, count(*) from pulse.event_handled"
    ).fetchall()
    assert left == {"oldest": outbox.now - seconds(400 * 86400), "count": 400}


@pytest.mark.parametrize(
    "state", ["PENDING", "RETRYING", "RUNNING", "DEAD_LETTERED", "parked", "COMPLETED", "DISCARDED"]
)
def test_what_an_event_needs_that_may_still_run_is_never_forgotten(outbox, state):
    """Its handler would do its work a second time. Events that have ended are the control."""
    if state == "parked":
        head, _ = outbox.enqueue_many(2, key="k")
        outbox.claim()
        outbox.claim()
        outbox.conn.execute("delete from pulse.outbox where event_id = %s", (head,))
    else:
        event_in(outbox, state)
    outbox.forward(1)
    outbox.conn.execute("insert into pulse.event_handled values ('h', 'k', %s)", (outbox.now,))
    outbox.forward(1000 * 86400)

    [step] = outbox.call("outbox_prune_handled", seconds(86400))
    assert step["pruned"] == (1 if state in ("COMPLETED", "DISCARDED") else 0)


def test_prune_walks_along_the_table(outbox):
    """Page by page, so that each call is short."""
    outbox.conn.execute(
        """insert into pulse.outbox (event_id, topic, payload, idempotency_key, status, completed_at)
           select id, 'mail', '{}', id::text, 'COMPLETED', %s
             from (select gen_random_uuid() as id from generate_series(1, 500)) as new""",
        (outbox.now,),
    )
    outbox.forward(1)
    page: int | None = 0
    pruned = []
    while page is not None:
        [step] = outbox.call("outbox_prune", p_retention=seconds(0), p_page=page, p_pages=2)
        assert step["next_page"] is None or step["next_page"] == page + 2
        page = step["next_page"]
        pruned.append(step["pruned"])

    assert sum(pruned) == 500
    assert len(pruned) > 3
    assert max(pruned) < 200


def test_prune_goes_round_a_locked_row(outbox, session):
    held = event_in(outbox, "COMPLETED")
    event_in(outbox, "DISCARDED")
    outbox.forward(1)
    stranger = session()
    outbox.conn.execute("set lock_timeout = '2s'")
    with stranger.conn.transaction():
        stranger.conn.execute("select from pulse.outbox where event_id = %s for update", (held,))

        assert outbox.call("outbox_prune", p_retention=seconds(0))[0]["pruned"] == 1
    assert outbox.call("outbox_prune", p_retention=seconds(0))[0]["pruned"] == 1


# Reading


def test_dead_letters_are_read_without_payloads(outbox, t0):
    event_id = outbox.dead(payload={"secret": 1}, error="boom")

    [row] = outbox.conn.execute("select * from pulse.dead_letter").fetchall()
    assert (row["event_id"], row["dead_lettered_at"], row["error_class"]) == (event_id, t0, "Boom")
    assert not {"payload", "headers"} & set(row)
    assert row["earlier_cycles"] == 0


def test_topic_status_counts_what_is_unfinished(outbox):
    outbox.now = None
    outbox.dead("mail")
    outbox.enqueue("mail", p_run_at=psycopg.TimestampFromTicks(4e9))
    outbox.enqueue_many(30, "mail", key="k")
    outbox.claim("mail")
    outbox.seen("w1", ["mail"])
    outbox.pause("mail")

    [row] = outbox.conn.execute("select * from pulse.topic_status").fetchall()
    assert (row["topic"], row["running"], row["later"], row["dead"]) == ("mail", 1, 1, 1)
    assert row["due"] + row["parked"] == 29
    assert (row["paused"], row["served_by"]) == ("maintenance", ["w1"])
