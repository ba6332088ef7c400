"""`outbox_enqueue`, called as producers in other languages call it."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.calls import seconds
from tests.support.waiting import wait_until


def test_topic_and_payload_are_enough(outbox):
    outbox.now = None
    [row] = outbox.conn.execute("select pulse.outbox_enqueue('mail', '{}') as id").fetchall()

    assert row["id"].version == 7
    assert outbox.claim().ids == [row["id"]]


def test_parameters_have_the_documented_names_in_the_documented_order(outbox):
    """Producers in other languages depend on them."""
    [row] = outbox.conn.execute(
        """select array_to_string(proargnames, ' ') as names, pronargs - pronargdefaults as needed
             from pg_proc
            where oid = 'pulse.outbox_enqueue'::regproc"""
    ).fetchall()

    assert row["names"].startswith(
        "p_topic p_payload p_idempotency_key p_ordering_key p_headers p_priority p_run_at p_max_attempts "
        "p_generation p_source p_target p_event_id p_dead_key"
    )
    assert row["needed"] == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"p_topic": None},
        {"p_topic": ""},
        {"p_topic": "x" * 201},
        {"p_payload": None},
        {"p_idempotency_key": ""},
        {"p_idempotency_key": "x" * 401},
        {"p_ordering_key": ""},
        {"p_ordering_key": "x" * 401},
        {"p_headers": Jsonb([])},
        {"p_headers": Jsonb("text")},
        {"p_priority": 10},
        {"p_priority": -10},
        {"p_max_attempts": 0},
        {"p_generation": -1},
        {"p_run_at": "infinity"},
        {"p_run_at": "-infinity"},
        {"p_run_at": "20000-01-01"},
        {"p_dead_key": "keep"},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(outbox, bad):
    with pytest.raises(psycopg.Error) as refused:
        outbox.call("outbox_enqueue", **{"p_topic": "mail", "p_payload": Jsonb({}), **bad})

    assert refused.value.sqlstate == "PO003"


@pytest.mark.parametrize("letter", ["x", "ß", "\N{PILE OF POO}"])
def test_longest_names_are_accepted(outbox, letter):
    """Four bytes a character, in every index that holds them."""
    topic, key = letter * 200, letter * 400
    event_id = outbox.enqueue(topic, key=key, p_idempotency_key=key)

    assert outbox.enqueue(topic, p_idempotency_key=key) == event_id
    outbox.fail(outbox.claim(topic), terminal=True)
    assert outbox.status(event_id) == "DEAD_LETTERED"


def test_time_in_the_past_is_now(outbox, t0):
    """A row behind the cursors of claims would wait for their next round."""
    assert outbox.row(outbox.enqueue(p_run_at=t0 - seconds(100)))["next_run_at"] == t0


def test_given_idempotency_key_exists_once_per_topic(outbox):
    first = outbox.enqueue("mail", p_idempotency_key="k")
    elsewhere = outbox.enqueue("fax", p_idempotency_key="k")

    assert outbox.enqueue("mail", p_idempotency_key="k", payload={"other": 1}) == first
    assert elsewhere != first
    outbox.complete(outbox.claim("mail"))
    assert outbox.enqueue("mail", p_idempotency_key="k") == first, "while the row exists"
    outbox.forward(1)
    outbox.call("outbox_prune", p_retention=seconds(0))
    assert outbox.enqueue("mail", p_idempotency_key="k") != first


def test_given_event_id_exists_once(outbox):
    event_id = uuid.uuid4()

    assert outbox.enqueue(p_event_id=event_id) == event_id
    assert outbox.enqueue(p_event_id=event_id) == event_id
    assert outbox.enqueue("fax", p_event_id=event_id, p_idempotency_key="k") == event_id
    assert outbox.row(event_id)["topic"] == "mail"


def test_both_given_and_both_taken(outbox):
    """The id wins: it is the producer's name for this very event."""
    by_key, by_id = outbox.enqueue(p_idempotency_key="k"), outbox.enqueue()

    assert outbox.enqueue(p_event_id=by_id, p_idempotency_key="k") == by_id
    assert outbox.enqueue(p_event_id=uuid.uuid4(), p_idempotency_key="k") == by_key


def test_given_key_that_is_an_event_id_is_still_one_event(outbox):
    """A consumer deduplicates on the key: two events with the same one would lose the second."""
    event_id = uuid.uuid4()
    outbox.enqueue(p_event_id=event_id, p_idempotency_key=str(event_id))

    assert outbox.enqueue(p_idempotency_key=str(event_id)) == event_id


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("given", ["p_idempotency_key", "p_event_id"])
def test_the_same_key_from_two_transactions_at_once(outbox, session, given, commits):
    """The second waits for the first: then it is the same event, or, after a rollback, its own."""
    value = "k" if given == "p_idempotency_key" else uuid.uuid4()
    first, second = session(), session()
    with ThreadPoolExecutor(1) as pool:
        with first.conn.transaction(force_rollback=not commits):
            one = first.enqueue(payload={"from": "first"}, **{given: value})
            waiting = pool.submit(second.enqueue, payload={"from": "second"}, **{given: value})
            query = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
            pid = second.conn.info.backend_pid
            wait_until(lambda: outbox.conn.execute(query, (pid,)).fetchall(), what="the second waits")
        other = waiting.result(timeout=10)

    assert (one == other) == (commits or given == "p_event_id")
    assert outbox.row(other)["payload"] == {"from": "first" if commits else "second"}


def test_rolled_back_event_never_runs(outbox, session):
    producer = session()
    with producer.conn.transaction(force_rollback=True):
        producer.enqueue()
        assert outbox.claim() == []

    assert outbox.claim() == []


def test_enqueue_in_repeatable_read(outbox, session):
    """A strict producer gets its event, or an error that says to try again; never a silent loss."""
    producer = session()
    producer.conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with producer.conn.transaction():
        producer.conn.execute("select from pulse.outbox")
        outbox.enqueue(p_idempotency_key="k")
        fine = producer.enqueue(p_idempotency_key="other")
    with producer.conn.transaction(force_rollback=True):
        producer.conn.execute("select from pulse.outbox")
        outbox.enqueue(p_idempotency_key="k2")
        with pytest.raises(psycopg.errors.SerializationFailure):
            producer.enqueue(p_idempotency_key="k2")

    assert outbox.status(fine) == "PENDING"


def test_ids_follow_time(outbox):
    """Time-ordered ids land on one side of the index."""
    events = outbox.enqueue_many(50)

    stamps = [event_id.int >> 80 for event_id in events]
    assert stamps == sorted(stamps)
    assert {(event_id.version, event_id.variant) for event_id in events} == {(7, uuid.RFC_4122)}
