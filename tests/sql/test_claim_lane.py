"""The claim of one lane: it takes what outbox_claim would take, whether the short way is enough or not."""

from __future__ import annotations

import contextlib
import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.calls import Claim, seconds
from tests.support.waiting import wait_until

LANE = {"topic": "mail", "generation": 0, "lapses": 0, "priority": 0}


def as_outbox_claim(outbox, limit: int = 10, slots: int | None = None):
    """What the long way takes of the same lane, undone again; without what all of a lane have in common."""
    with outbox.conn.transaction(force_rollback=True):
        lanes = Jsonb([{**LANE, "quota": limit}])
        claim = outbox.claim(limit=limit, p_lanes=lanes, p_slots=limit if slots is None else slots)
        rows = [outbox.row(event_id) for event_id in claim.ids]
        assert all(row.items() >= LANE.items() for row in claim)
        return Claim(claim.token, without({*LANE, "alone"}, [*claim, *claim.left_behind])), rows


def without(what: set[str], rows):
    return [{name: value for name, value in row.items() if name not in what} for row in rows]


def test_both_ways_take_and_write_the_same(outbox):
    """Every column of the answer and of the row, but the token."""
    outbox.enqueue_many(3, p_headers=Jsonb({"a": 1}), p_source="shop", p_target="bank")
    outbox.enqueue_many(2, p_max_attempts=7)
    expected, expected_rows = as_outbox_claim(outbox)

    claim = outbox.claim_lane()

    assert len(claim) == 5
    assert list(claim) == list(expected)
    rows = [outbox.row(event_id) for event_id in claim.ids]
    assert without({"claim_token"}, rows) == without({"claim_token"}, expected_rows)
    assert {row["claim_token"] for row in rows} == {claim.token}


@pytest.mark.parametrize("limit", [0, 1, 3, 100])
def test_never_more_than_asked_for(outbox, limit):
    outbox.enqueue_many(7)

    assert len(outbox.claim_lane(limit=limit)) == min(limit, 7)


def test_in_order(outbox, t0):
    late = outbox.enqueue(p_run_at=t0 + seconds(5))
    soon = outbox.enqueue(p_run_at=t0 + seconds(4))
    again = outbox.enqueue(p_run_at=t0 + seconds(5))
    outbox.enqueue(p_run_at=t0 + seconds(11))
    outbox.forward(10)

    assert [outbox.claim_lane(limit=1).ids for _ in range(4)] == [[soon], [late], [again], []]


def test_other_lanes_are_left_alone(outbox):
    outbox.enqueue("fax")
    outbox.enqueue(p_priority=1)
    outbox.enqueue(p_generation=1)
    outbox.lapse(outbox.claim("fax"))

    assert outbox.claim_lane() == []
    assert len(outbox.claim_lane(p_priority=1)) == 1
    assert len(outbox.claim_lane(p_generation=1)) == 1
    assert len(outbox.claim_lane("fax", p_lapses=1)) == 1


def test_starts_where_the_caller_was_and_looks_back_a_tenth_of_a_second(outbox, t0):
    """As outbox_claim: dead rows before a position are not walked over, late commits just before now are not missed."""
    first = outbox.enqueue()
    outbox.forward(1)
    second = outbox.enqueue()
    outbox.forward(0.02)
    third, fourth = outbox.enqueue_many(2)
    place = {"p_next_run_at": t0 + seconds(1.02), "p_seq": outbox.row(fourth)["seq"]}

    outbox.forward(0.05)
    with outbox.conn.transaction(force_rollback=True):
        assert set(outbox.claim_lane(**place).ids) == {second, third, fourth}, "all just now"
    outbox.forward(1)
    assert outbox.claim_lane(**place).ids == [fourth]
    assert set(outbox.claim_lane().ids) == {first, second, third}


@pytest.mark.parametrize("paused", ["mail", None])
def test_pause_stops_it(outbox, paused):
    event_id = outbox.enqueue()
    outbox.pause(paused)

    assert outbox.claim_lane() == []
    outbox.resume(paused)
    assert outbox.claim_lane().ids == [event_id]


def test_pause_of_another_topic_does_not(outbox):
    outbox.enqueue()
    outbox.pause("fax")

    assert len(outbox.claim_lane()) == 1


def test_ordering_keys_are_kept(outbox):
    """Among plain events too: of a key only the head, and the next one when that is done."""
    plain = outbox.enqueue()
    head, second = (outbox.enqueue(key="k") for _ in range(2))
    outbox.insert(ordering_key="k")
    expected, _ = as_outbox_claim(outbox)

    claim = outbox.claim_lane()

    assert set(claim.ids) == set(expected.ids) == {plain, head}
    assert outbox.claim_lane() == []
    outbox.complete(claim)
    assert outbox.claim_lane().ids == [second]


@pytest.mark.parametrize("slots", [0, 2])
def test_budgets_of_one_are_not_claimed_ahead(outbox, slots):
    """And the answer says where one was left behind."""
    outbox.enqueue_many(4, p_max_attempts=1)
    outbox.enqueue_many(2)
    expected, _ = as_outbox_claim(outbox, slots=slots)

    claim = outbox.claim_lane(p_slots=slots)

    assert sorted(claim.ids) == sorted(expected.ids)
    assert len(claim) == 2 + slots
    assert claim.left_behind == expected.left_behind != []


def test_policy_of_one_is_a_budget_of_one(outbox):
    outbox.enqueue_many(5)

    assert len(outbox.claim_lane(p_budget=1, p_slots=3)) == 3


def test_suspects_of_several_lapses_run_alone(outbox):
    outbox.enqueue()
    for _ in range(2):
        outbox.lapse(outbox.claim())
        outbox.forward(60)

    [row] = outbox.claim_lane(p_lapses=2)

    assert outbox.row(row["event_id"])["alone"]


@pytest.mark.parametrize("missing", ["worker", "lease", "budget"])
def test_needs_its_arguments(outbox, missing):
    outbox.enqueue()

    with pytest.raises(psycopg.Error):
        outbox.claim_lane(**{f"p_{missing}": None})


def test_a_limit_that_is_missing_is_not_the_whole_table(outbox):
    outbox.enqueue()

    assert outbox.claim_lane(p_limit=None) == []


@pytest.mark.parametrize("why", ["locked", "paused", "nothing"])
def test_what_the_long_way_would_not_find_either_is_not_looked_for_again(outbox, session, why):
    """With many dispatchers each notification has one who is first, and many who come for nothing."""
    if why != "nothing":
        outbox.enqueue()
    if why == "paused":
        outbox.pause()
    somebody = session()
    with without_the_long_way(outbox):
        with somebody.conn.transaction():
            somebody.conn.execute("select from pulse.outbox for update")

            assert outbox.claim_lane() == []

        outbox.resume()
        outbox.enqueue(key="k")
        with pytest.raises(psycopg.errors.UndefinedFunction):
            outbox.claim_lane()  # the control: there is a reason


@contextlib.contextmanager
def without_the_long_way(outbox):
    outbox.conn.execute("alter function pulse.outbox_claim rename to outbox_claim_elsewhere")
    try:
        yield
    finally:
        outbox.conn.execute("alter function pulse.outbox_claim_elsewhere rename to outbox_claim")


def test_repeated_as_outbox_claim_it_returns_the_same_rows(outbox):
    """The answer was lost, and the next try goes the long way."""
    outbox.enqueue_many(5)
    first = outbox.claim_lane(limit=3)

    again = outbox.claim(limit=3, token=first.token, p_try=2)

    assert sorted(again.ids) == sorted(first.ids)
    assert {(row["attempts"], row["lease_seq"]) for row in again} == {(1, 1)}


def test_repeated_call_waits_for_the_first(outbox, session):
    """Whichever of them is the first."""
    outbox.enqueue_many(6)
    token = uuid.uuid4()
    first, second = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with first.conn.transaction():
            taken = first.claim_lane(limit=3, token=token)
            repeated = pool.submit(second.claim, limit=3, token=token, p_try=2)
            wait_until(lambda: waits(outbox, second), what="the second call waits")
        assert sorted(repeated.result(timeout=10).ids) == sorted(taken.ids)

        token = uuid.uuid4()
        with first.conn.transaction():
            assert len(first.claim(limit=1, token=token, p_try=2)) == 1
            late = pool.submit(second.claim_lane, limit=3, token=token)
            wait_until(lambda: waits(outbox, second), what="the late call waits")
        assert late.result(timeout=10) == [], "nobody would run what it took"

    [counted] = outbox.conn.execute("select sum(attempts) as started from pulse.outbox").fetchall()
    assert counted["started"] == 4


def waits(outbox, other) -> bool:
    waiting = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    return bool(outbox.conn.execute(waiting, (other.conn.info.backend_pid,)).fetchall())


def test_lease_begins_when_the_table_is_at_hand(outbox, session):
    """Whoever waited for an operator's lock must not get leases that are half over."""
    outbox.enqueue(p_now=None)
    operator, dispatcher = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with operator.conn.transaction():
            operator.conn.execute("lock table pulse.outbox in share mode")
            asked = pool.submit(dispatcher.claim_lane, p_now=None)
            wait_until(lambda: waits(outbox, dispatcher), what="the claim waits for the table")
            [[until]] = [
                row.values() for row in operator.conn.execute("select clock_timestamp() + interval '30 s'")
            ]
        claim = asked.result(timeout=10)

    assert outbox.row(claim.ids[0])["lease_until"] >= until
