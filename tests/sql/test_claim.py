"""What a claim takes, in which order, how much of it, and that asking twice counts once."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.calls import seconds
from tests.support.waiting import wait_until


@pytest.mark.parametrize("limit", [0, 1, 7, 100])
def test_never_more_than_asked_for(outbox, limit):
    """Over several topics, priorities and generations, with the lanes found by the function."""
    for topic in ("a", "b", "c"):
        for priority in (-1, 0, 5):
            outbox.enqueue_many(3, topic, p_priority=priority, p_generation=abs(priority))

    claim = outbox.claim(["a", "b", "c"], limit)

    assert len(claim) == min(limit, 27)
    [counted] = outbox.conn.execute(
        "select count(*) filter (where status = 'RUNNING') as running from pulse.outbox"
    )
    assert counted["running"] == len(claim)


def test_never_more_than_asked_for_with_lanes(outbox):
    outbox.enqueue_many(5, "a")
    outbox.enqueue_many(5, "b")
    lanes = [{"topic": t, "generation": 0, "lapses": 0, "priority": 0, "quota": 4} for t in ("a", "b")]

    assert Counter(row["topic"] for row in outbox.claim(["a", "b"], 6, p_lanes=Jsonb(lanes))) == {
        "a": 4,
        "b": 2,
    }
    assert Counter(row["topic"] for row in outbox.claim(["a", "b"], 6, p_lanes=Jsonb(lanes))) == {
        "a": 1,
        "b": 3,
    }


def test_lanes_start_where_the_caller_was(outbox, t0):
    """A position skips what comes before it, which is how a claim passes what vacuum could not remove."""
    first = outbox.enqueue()
    outbox.forward(1)
    second = outbox.enqueue()
    lane = {"topic": "mail", "generation": 0, "lapses": 0, "priority": 0, "quota": 10}

    later = outbox.claim(p_lanes=Jsonb([{**lane, "next_run_at": (t0 + seconds(1)).isoformat()}]))
    rest = outbox.claim(p_lanes=Jsonb([lane]))

    assert (later.ids, rest.ids) == ([second], [first])


def test_lanes_are_listed_with_their_first_row(outbox, t0):
    outbox.enqueue("a", p_run_at=t0 + seconds(60))
    outbox.enqueue("a", p_run_at=t0 + seconds(90))
    outbox.enqueue("a", p_generation=3, p_priority=2)
    outbox.enqueue("b", p_generation=4)
    outbox.enqueue("c")
    outbox.pause("c")

    def lanes(topics, generations=None):
        rows = outbox.call("outbox_lanes", topics, generations)
        return [(r["topic"], r["generation"], r["priority"], r["next_run_at"] - t0) for r in rows]

    a0, a3, b4 = ("a", 0, 0, seconds(60)), ("a", 3, 2, seconds(0)), ("b", 4, 0, seconds(0))
    assert lanes(["a", "b", "c"]) == [a0, a3, b4]
    assert lanes(["b", "a"], [3]) == [a0, a3]
    assert lanes(["a", "b"], []) == [a0]
    assert lanes(["nobody"]) == []
    outbox.pause(None)
    assert lanes(["a", "b"]) == []


def test_order_within_a_topic(outbox, t0):
    """Priority, then due time, then insertion. One at a time shows the order, since a batch comes in none."""
    late = outbox.enqueue(p_run_at=t0 + seconds(5))
    soon = outbox.enqueue(p_run_at=t0 + seconds(4))
    urgent = outbox.enqueue(p_priority=9, p_run_at=t0 + seconds(9))
    again = outbox.enqueue(p_run_at=t0 + seconds(5))
    unhurried = outbox.enqueue(p_priority=-9)
    outbox.forward(10)

    assert [outbox.claim(limit=1).ids for _ in range(6)] == [
        [urgent],
        [soon],
        [late],
        [again],
        [unhurried],
        [],
    ]


def test_order_within_a_topic_does_not_ask_for_the_generation(outbox):
    """Events of another generation, and suspects, wait their turn and no longer."""
    suspect = outbox.enqueue()
    outbox.lapse(outbox.claim())
    outbox.forward(1)
    older = outbox.enqueue(p_generation=1)
    outbox.forward(1)
    outbox.enqueue_many(20)

    claim = outbox.claim(limit=10)

    assert {suspect, older} <= set(claim.ids)


def test_future_event_is_not_claimed_before_its_time(outbox, t0):
    event_id = outbox.enqueue(p_run_at=t0 + seconds(60))

    assert outbox.claim() == []
    outbox.forward(59.999)
    assert outbox.claim() == []
    outbox.forward(0.001)
    assert outbox.claim().ids == [event_id]


def test_topics_share_a_claim(outbox):
    """One hot topic beside a quiet one: the quiet one does not wait for the hot one's end."""
    outbox.enqueue_many(50, "hot")
    quiet = outbox.enqueue_many(2, "quiet")

    claim = outbox.claim(["hot", "quiet"], 10)

    assert len(claim) == 10
    assert set(quiet) <= set(claim.ids), "and what it leaves goes to the hot one"


def test_more_topics_than_room_take_turns(outbox):
    """With one place for ten topics every topic is served sooner or later, whatever its name."""
    topics = [f"topic-{n}" for n in range(10)]
    for topic in topics:
        outbox.enqueue_many(30, topic)

    served = Counter(outbox.claim(topics, 1)[0]["topic"] for _ in range(100))

    assert set(served) == set(topics)


def test_only_topics_that_are_served(outbox):
    """An event without a handler is not claimed and burns nothing."""
    new = outbox.enqueue("new.topic")
    old = outbox.enqueue("old.topic")

    assert outbox.claim(["old.topic", "none"]).ids == [old]
    assert outbox.claim([]) == []
    assert (outbox.status(new), outbox.row(new)["attempts"]) == ("PENDING", 0)


def test_generations(outbox):
    """With generations: those and 0. Without: all."""
    event = {generation: outbox.enqueue(p_generation=generation) for generation in (0, 1, 2, 3)}

    assert set(outbox.claim(p_generations=[1, 3]).ids) == {event[0], event[1], event[3]}
    assert outbox.claim(p_generations=[]) == []
    assert outbox.claim().ids == [event[2]]


def test_budget_is_stamped_at_each_claim(outbox):
    """The producer's when it gave one, else the policy's of the day, else 5."""
    own = outbox.enqueue("own", p_max_attempts=7)
    policy = outbox.enqueue("policy")
    default = outbox.enqueue("default")
    topics = ["own", "policy", "default"]

    def stamped(budgets):
        claim = outbox.claim(topics, p_budgets=budgets)
        found = {row["event_id"]: row["max_attempts"] for row in claim}
        outbox.release(claim)
        return [found[own], found[policy], found[default]]

    assert stamped([3, 3, None]) == [7, 3, 5]
    assert stamped([9, 9]) == [7, 9, 5]
    assert stamped(None) == [7, 5, 5]


def test_budget_of_one_is_not_claimed_ahead(outbox):
    """It must not wait in the memory of a process that may die: no more than can start at once."""
    outbox.enqueue_many(5, "once", p_max_attempts=1)
    outbox.enqueue_many(5, "often")

    claim = outbox.claim(["once", "often"], 10, p_slots=2)
    taken = Counter(row["topic"] for row in claim)

    assert taken["once"] <= 2
    assert taken["often"] == 5
    outbox.release(claim)
    assert len(outbox.claim("once", 10, p_slots=2)) == 2
    assert outbox.claim("once", 10, p_slots=0) == []
    assert len(outbox.claim("once", 10)) == 3, "without p_slots everything starts at once"


def test_policy_of_one_is_a_budget_of_one(outbox):
    outbox.enqueue_many(5)

    assert len(outbox.claim(p_budgets=[1], p_slots=3)) == 3
    assert len(outbox.claim(p_budgets=[2], p_slots=0)) == 2


def test_slots_are_for_budgets_of_one_only(outbox):
    """Others need none: who claims puts them behind, so they take none away."""
    outbox.enqueue_many(5, "a")
    once = outbox.enqueue("b", p_max_attempts=1)

    lanes = [{"topic": topic, "generation": 0, "lapses": 0, "priority": 0, "quota": 5} for topic in "ab"]
    claim = outbox.claim(["a", "b"], 10, p_slots=1, p_lanes=Jsonb(lanes))

    assert once in claim.ids
    assert len(claim) == 6
    assert claim.left_behind == []


@pytest.mark.parametrize(("given", "policy"), [({}, 1), ({"p_max_attempts": 1}, 5)])
@pytest.mark.parametrize("slots", [0, 2])
def test_a_claim_says_where_it_left_a_budget_of_one_behind(outbox, given, policy: int, slots: int):
    """Else nobody would keep a slot free for it."""
    events = outbox.enqueue_many(5, p_priority=3, **given)
    outbox.forward(1)

    claim = outbox.claim(limit=10, p_slots=slots, p_budgets=[policy])

    first = outbox.row(sorted(events, key=lambda event_id: outbox.row(event_id)["seq"])[slots])
    assert len(claim) == slots
    place = itemgetter("topic", "generation", "lapses", "priority", "next_run_at", "seq")
    assert {place(behind) for behind in claim.left_behind} == {place(first)}
    assert outbox.claim(limit=10, p_slots=10, p_budgets=[policy]).left_behind == []


def test_a_claim_that_is_full_left_nothing_behind(outbox):
    """Whoever counts all that comes gets no more than was asked for, unless there are fewer slots than that."""
    outbox.enqueue_many(2, p_ordering_key="k")
    outbox.forward(1)
    outbox.enqueue_many(5, p_max_attempts=1)
    outbox.claim(limit=1)

    claim = outbox.claim(limit=1)

    assert [row["max_attempts"] for row in claim] == [1], "control: the next one of the key had to wait"
    assert claim.left_behind == []


@pytest.mark.parametrize(("given", "policy"), [({}, 1), ({"max_attempts": 1}, 5)])
def test_a_budget_of_one_is_seen_behind_those_that_wait_for_their_key(outbox, given, policy: int):
    """One call parks them, and goes on: else each would hide the rest until the next listing."""
    outbox.enqueue("other", key="k")
    producers = {"producer_" + name: value for name, value in given.items()}
    for _ in range(20):
        outbox.insert(ordering_key="k", **producers)
    outbox.forward(1)
    free = outbox.enqueue(**{"p_" + name: value for name, value in given.items()})
    outbox.forward(1)

    claim = outbox.claim(limit=10, p_slots=0, p_budgets=[policy])

    assert claim == []
    assert [behind["seq"] for behind in claim.left_behind] == [outbox.row(free)["seq"]]


def test_who_has_another_budget_in_a_topic_of_budgets_of_one_needs_no_slot(outbox):
    """Whatever the handler's policy says, the producer said otherwise."""
    outbox.enqueue()
    outbox.forward(1)
    often = outbox.enqueue_many(3, p_max_attempts=3)

    claim = outbox.claim(limit=10, p_slots=1, p_budgets=[1])

    assert len(claim) == 4
    assert set(often) <= set(claim.ids)


def test_budget_of_one_does_not_stand_in_the_way(outbox):
    """Rows that can't be taken ahead leave their room to those behind them."""
    outbox.enqueue_many(20, p_max_attempts=1)
    outbox.forward(1)
    behind = outbox.enqueue_many(5)

    assert set(outbox.claim(limit=10, p_slots=0).ids) == set(behind)


@pytest.mark.parametrize(("given", "policy", "most"), [({}, 1, 3), ({"p_max_attempts": 1}, 5, 600)])
def test_budgets_of_one_that_cannot_start_are_left_alone(outbox, connect, given, policy: int, most: int):
    """A backlog of them must not be locked, thousands of rows, by every claim of a busy dispatcher."""
    outbox.enqueue_many(2_000, **given)
    for slots in (3, 0):
        with outbox.conn.transaction():
            claim = outbox.claim(limit=100, p_slots=slots, p_budgets=[policy])
            free = "select event_id from pulse.outbox where status = 'PENDING' for update skip locked"
            left = len(connect(autocommit=True).execute(free).fetchall())

        assert len(claim) == slots
        assert 2_000 - left <= 3 + most


def test_pause_stops_claims_of_its_topic(outbox):
    mail, fax = outbox.enqueue("mail"), outbox.enqueue("fax")
    outbox.pause("mail")

    assert outbox.claim(["mail", "fax"]).ids == [fax]
    lane = {"topic": "mail", "generation": 0, "lapses": 0, "priority": 0, "quota": 5}
    assert outbox.claim(p_lanes=Jsonb([lane])) == [], "also where the caller still believes in the lane"
    assert outbox.resume("mail")
    assert outbox.claim(["mail", "fax"]).ids == [mail]


def test_pause_of_all(outbox):
    """Two different pauses: ending one does not end the other."""
    event_id = outbox.enqueue()
    outbox.pause(None)
    outbox.pause("mail")

    assert outbox.claim() == []
    assert outbox.resume("mail")
    assert outbox.claim() == []
    assert not outbox.resume("mail")
    assert outbox.resume(None)
    assert outbox.claim().ids == [event_id]


def test_running_jobs_finish_during_a_pause(outbox):
    outbox.enqueue()
    claim = outbox.claim()
    outbox.pause()

    assert outbox.heartbeat(claim) == {}
    assert outbox.complete(claim) == {}


@pytest.mark.parametrize("missing", ["token", "worker", "topics", "limit", "lease"])
def test_claim_needs_its_arguments(outbox, missing):
    arguments = {
        "p_token": uuid.uuid4(),
        "p_worker": "w",
        "p_topics": ["mail"],
        "p_limit": 1,
        "p_lease": seconds(30),
    }
    arguments[f"p_{missing}"] = None

    with pytest.raises(psycopg.Error) as refused:
        outbox.call("outbox_claim", **arguments)

    assert refused.value.sqlstate == "PO003"


# The same token twice


def test_repeated_claim_returns_the_same_rows(outbox):
    """The answer was lost: the retry gets it and counts nothing twice."""
    outbox.enqueue_many(5)
    first = outbox.claim(limit=3)
    outbox.forward(1)

    again = outbox.claim(limit=3, token=first.token)

    assert sorted(again.ids) == sorted(first.ids)
    assert {(row["attempts"], row["lease_seq"]) for row in again} == {(1, 1)}
    assert len(outbox.claim()) == 2, "the others are free"


def test_repeated_claim_with_another_limit_takes_no_others(outbox):
    outbox.enqueue_many(5)
    first = outbox.claim(limit=1)

    assert outbox.claim(limit=5, token=first.token).ids == first.ids


def test_repeated_claim_is_answered_during_a_pause(outbox):
    """The rows are RUNNING under this token: only their holder can release them."""
    outbox.enqueue()
    first = outbox.claim()
    outbox.pause()

    assert outbox.claim(token=first.token).ids == first.ids


def test_repeated_claim_waits_for_the_first(outbox, session):
    """The first call is still running on the server when the second arrives: it must not pass it."""
    outbox.enqueue_many(6)
    token = uuid.uuid4()
    first, second = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with first.conn.transaction():
            taken = first.claim(limit=3, token=token)
            repeated = pool.submit(second.claim, limit=3, token=token)
            waiting = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
            wait_until(
                lambda: outbox.conn.execute(waiting, (second.conn.info.backend_pid,)).fetchall(),
                what="the second call waits",
            )
        again = repeated.result(timeout=10)

    assert sorted(again.ids) == sorted(taken.ids)
    assert {row["attempts"] for row in again} == {1}
    [counted] = outbox.conn.execute("select sum(attempts) as started from pulse.outbox").fetchall()
    assert counted["started"] == 3


def test_repeated_claim_after_the_first_was_rolled_back_claims(outbox, session):
    outbox.enqueue()
    token = uuid.uuid4()
    first = session()
    with first.conn.transaction(force_rollback=True):
        first.claim(token=token)

    assert outbox.claim(token=token)[0]["attempts"] == 1


def test_try_that_comes_late_takes_nothing(outbox):
    """A stalled session gets to the first try when its repetition has been answered: nobody would run what it took."""
    outbox.enqueue_many(4)
    token = uuid.uuid4()
    again = outbox.claim(limit=2, token=token, p_try=2)
    assert len(again) == 2
    for _ in ("while it runs", "when it is settled"):
        assert outbox.claim(limit=2, token=token, p_try=1, p_fresh=True) == []
        outbox.complete(again)

    assert outbox.claim(limit=2, token=token, p_try=1) == []
    assert len(outbox.claim(limit=9, p_try=1, p_fresh=True)) == 2, "others are not concerned"


def test_tries_are_forgotten_after_a_day(outbox):
    outbox.claim(p_try=2)
    outbox.forward(100_000)
    token = uuid.uuid4()

    outbox.claim(token=token, p_try=2)

    tries = outbox.conn.execute("select token from pulse.claim_try").fetchall()
    assert [row["token"] for row in tries] == [token]


def test_different_tokens_never_share_a_row(outbox, session):
    """Eight claims at the same instant: every row once."""
    outbox.enqueue_many(100)
    sessions = [session() for _ in range(8)]
    together = threading.Barrier(8)

    def claim(calls):
        together.wait(10)
        return [event_id for _ in range(4) for event_id in calls.claim(limit=4).ids]

    with ThreadPoolExecutor(8) as pool:
        taken = [event_id for found in pool.map(claim, sessions, timeout=30) for event_id in found]

    assert max(Counter(taken).values()) == 1
    [counted] = outbox.conn.execute("select sum(attempts) as started from pulse.outbox").fetchall()
    assert counted["started"] == len(taken)


def test_claim_in_repeatable_read_corrupts_nothing(outbox, session):
    """The functions want read committed, where each statement sees what is committed. Elsewhere they fail, safely."""
    outbox.enqueue_many(4)
    token = uuid.uuid4()
    first, second = session(), session()
    second.conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with second.conn.transaction():
        second.conn.execute("select from pulse.outbox")  # its snapshot
        first.claim(limit=2, token=token)
        with pytest.raises(psycopg.errors.SerializationFailure):
            second.claim(limit=2, token=token)

    [counted] = outbox.conn.execute("select sum(attempts) as started from pulse.outbox").fetchall()
    assert counted["started"] == 2
