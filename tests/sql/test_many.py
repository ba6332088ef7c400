"""Replay and discard of many dead letters: the same rules as for one, and never more than asked for."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.sql.calls import Calls, seconds


def graves(
    outbox: Calls, number: int, topic: str = "mail", error_class: str = "Boom", **enqueue: Any
) -> list[uuid.UUID]:
    """Dead letters that died one second after the other."""
    ids = []
    for _ in range(number):
        ids.append(outbox.enqueue(topic, **enqueue))
        outbox.fail(outbox.claim(topic), terminal=True, failure={"error_class": error_class})
        outbox.forward(1)
    return ids


def replay_many(
    outbox: Calls, topic="mail", error_class=None, since=None, until=None, limit=100, **named
) -> int:
    return int(
        outbox.scalar("outbox_replay_many", topic, error_class, since, until, limit, 0, "ada", **named)
    )


def discard_many(
    outbox: Calls, topic="mail", error_class=None, since=None, until=None, limit=100, **named
) -> int:
    return int(
        outbox.scalar("outbox_discard_many", topic, error_class, since, until, limit, "why", "ada", **named)
    )


MANY = pytest.mark.parametrize(("many", "becomes"), [(replay_many, "PENDING"), (discard_many, "DISCARDED")])


@MANY
def test_no_more_than_asked_for_and_the_oldest_first(outbox, many, becomes):
    ids = graves(outbox, 5)

    assert many(outbox, limit=2) == 2
    assert outbox.statuses(*ids) == [becomes] * 2 + ["DEAD_LETTERED"] * 3
    assert many(outbox, limit=10) == 3
    assert many(outbox, limit=10) == 0


@MANY
def test_only_what_was_chosen(outbox, t0, many, becomes):
    """By topic, class and time of death; since counts, until does not."""
    mail = graves(outbox, 4)
    other_class = graves(outbox, 1, error_class="Bang")
    other_topic = graves(outbox, 1, "fax")

    assert many(outbox, "mail", "Boom", t0 + seconds(1), t0 + seconds(3)) == 2
    assert outbox.statuses(*mail) == ["DEAD_LETTERED", becomes, becomes, "DEAD_LETTERED"]
    assert outbox.statuses(*other_class, *other_topic) == ["DEAD_LETTERED"] * 2
    assert many(outbox, "mail", "bang") == 0


def test_audit_entry_is_that_of_one(outbox):
    one, other = graves(outbox, 2)
    outbox.call("outbox_replay", one, 3, "ada")
    outbox.call("outbox_replay_many", "mail", None, None, None, 10, 3, "ada")

    by_one, by_many = outbox.row(one), outbox.row(other)
    assert by_one["failure_history"][0].keys() == by_many["failure_history"][0].keys()
    own = {"event_id", "seq", "created_at", "idempotency_key", "failure_history", "next_run_at", "claimed_at"}
    assert {k: v for k, v in by_one.items() if k not in own} == {
        k: v for k, v in by_many.items() if k not in own
    }
    assert by_many["failure_history"][0]["replayed_by"] == "ada"


def test_discarded_keys_go_on(outbox):
    dead = outbox.dead(key="k")
    waiting = outbox.enqueue(key="k")
    assert outbox.claim() == []
    assert discard_many(outbox) == 1

    assert outbox.claim().ids == [waiting]
    assert outbox.row(dead)["failure_history"][0]["reason"] == "why"


@MANY
def test_locked_rows_are_passed_over(outbox, session, many, becomes):
    held, free = graves(outbox, 2)
    stranger = session()
    outbox.conn.execute("set lock_timeout = '2s'")
    with stranger.conn.transaction():
        stranger.conn.execute("select from pulse.outbox where event_id = %s for update", (held,))

        assert many(outbox) == 1
        assert outbox.statuses(held, free) == ["DEAD_LETTERED", becomes]
    assert many(outbox) == 1


def test_by_ids(outbox):
    first, second, third = graves(outbox, 3)
    waiting = outbox.enqueue("fax")
    chosen = [first, third, waiting, uuid.uuid4()]

    assert replay_many(outbox, None, p_event_ids=chosen) == 2
    assert outbox.statuses(first, second, third, waiting) == [
        "PENDING",
        "DEAD_LETTERED",
        "PENDING",
        "PENDING",
    ]
    assert outbox.row(waiting)["failure_history"] == []
    assert replay_many(outbox, "fax", p_event_ids=[second]) == 0


@MANY
def test_one_request_changes_an_event_once(outbox, many, becomes):
    """A replay that goes on in steps does not come back to what died again meanwhile."""
    graves(outbox, 1)
    request = uuid.uuid4()
    assert many(outbox, p_request=request) == 1
    if becomes == "PENDING":
        outbox.fail(outbox.claim(), terminal=True)

    assert many(outbox, p_request=request) == 0
    assert many(outbox, p_request=uuid.uuid4()) == (becomes == "PENDING")


def test_without_a_generation_each_keeps_its_own(outbox):
    kept = [graves(outbox, 1, p_generation=number)[0] for number in (0, 2, 3)]

    assert outbox.scalar("outbox_replay_many", "mail", None, None, None, 10, None, "ada") == 3
    assert [outbox.row(event_id)["generation"] for event_id in kept] == [0, 2, 3]
    with pytest.raises(psycopg.Error, match="generation"):  # one by one it is named, as SPEC has it
        outbox.call("outbox_replay", graves(outbox, 1)[0], None, "ada")


@pytest.mark.parametrize(
    "arguments",
    [
        (None, None, None, None, 10, 0, "ada"),  # a topic, please
        ("mail", None, None, None, None, 0, "ada"),
        ("mail", None, None, None, 0, 0, "ada"),
        ("mail", None, None, None, 10_001, 0, "ada"),
        ("mail", None, None, None, 10, -1, "ada"),
        ("mail", None, None, None, 10, 0, ""),
        ("mail", None, None, None, 10, 0, None),
    ],
)
def test_bad_arguments_are_refused(outbox, arguments):
    [event_id] = graves(outbox, 1)
    with pytest.raises(psycopg.Error) as refused:
        outbox.call("outbox_replay_many", *arguments)

    assert refused.value.sqlstate == "PO003"
    assert outbox.status(event_id) == "DEAD_LETTERED"


@pytest.mark.parametrize(("reason", "by"), [("", "ada"), (None, "ada"), ("why", ""), ("why", None)])
def test_discard_needs_who_and_why(outbox, reason, by):
    graves(outbox, 1)
    with pytest.raises(psycopg.Error) as refused:
        outbox.call("outbox_discard_many", "mail", None, None, None, 10, reason, by)

    assert refused.value.sqlstate == "PO003"


def test_ten_operators_at_once_replay_each_event_once(outbox, session):
    ids = graves(outbox, 60)
    together = threading.Barrier(10)

    def replay(calls: Calls) -> int:
        together.wait(20)
        return sum(replay_many(calls, limit=3) for _ in range(10))

    with ThreadPoolExecutor(10) as pool:
        counts = list(pool.map(replay, [session() for _ in range(10)], timeout=60))

    assert sum(counts) + replay_many(outbox) == 60
    assert {len(outbox.row(event_id)["failure_history"]) for event_id in ids} == {1}


def test_hostile_names_are_data(outbox):
    name = "'); drop schema pulse cascade; -- \"%s $1 \\"
    graves(outbox, 2, name, name)

    assert outbox.scalar("outbox_replay_many", name, name, None, None, 1, 0, name) == 1
    assert outbox.scalar("outbox_discard_many", name, name, None, None, 1, name, name) == 1
