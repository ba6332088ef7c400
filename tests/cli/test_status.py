"""`pulse-outbox status`: what somebody sees first who was woken by an alert."""

from __future__ import annotations

import psycopg
import pytest

from tests.cli.conftest import HOSTILE, bury
from tests.sql.calls import seconds

TOPIC_KEYS = [
    "topic", "due", "later", "running", "retrying", "parked", "dead", "oldest_wait_seconds", "longest_running_seconds",
    "rate", "paused", "served_by", "unserved",
]  # fmt: skip
DISPATCHER_KEYS = [
    "worker", "alive", "host", "pid", "version", "topics", "generations", "in_flight", "completed", "rate",
    "last_seen_seconds", "started_at",
]  # fmt: skip


@pytest.fixture
def busy(calls):
    """One topic with something in every state, served; another one that nobody serves."""
    bury(calls, "mail", "Boom", 2)
    calls.enqueue("mail", p_run_at=psycopg.TimestampFromTicks(4e9))
    calls.enqueue_many(20, "mail", key="k")
    calls.claim("mail")
    calls.enqueue("mail")
    calls.fail(calls.claim("mail", 1), delay=3600)
    calls.enqueue_many(3, "fax")
    calls.seen("w1", ["mail"])
    return calls


def test_every_state_is_counted_by_topic(command, busy):
    busy.conn.execute(
        "update pulse.outbox set claimed_at = claimed_at - interval '90 s' where status = 'RUNNING'"
    )
    busy.conn.execute(
        "update pulse.outbox set next_run_at = next_run_at - interval '300 s' where topic = 'fax'"
    )

    fax, mail = command("status", "--json").json["topics"]
    assert list(mail) == TOPIC_KEYS
    assert (mail["running"], mail["later"], mail["retrying"], mail["dead"]) == (1, 2, 1, 2)
    assert mail["due"] + mail["parked"] == 19
    assert 90 <= mail["longest_running_seconds"] < 100
    assert (fax["due"], fax["unserved"], fax["served_by"]) == (3, 3, [])
    assert 300 <= fax["oldest_wait_seconds"] < 310
    assert mail["served_by"] == ["w1"]


def test_completed_events_are_not_shown(command, calls):
    calls.enqueue("done")
    calls.complete(calls.claim("done"))

    assert command("status", "--json").json["topics"] == []
    assert command("status").out.startswith("no unfinished events")


def test_topics_that_nobody_serves_are_marked(command, busy):
    result = command("status")

    lines = {line.split()[0]: line for line in result.out.splitlines() if line}
    assert result.code == 0
    assert lines["fax"].endswith("NOBODY")
    assert lines["mail"].endswith("w1")
    assert command("status", "--json").json["unserved_topics"] == ["fax"]


def test_generation_that_nobody_serves_is_marked(command, calls):
    """The topic has a dispatcher, but not of the generation that these events ask for."""
    calls.call("dispatcher_seen", "w1", "host", 1, "0.1.0", ["mail"], [2], 0, False)
    calls.enqueue("mail", p_generation=1)
    calls.enqueue("mail", p_generation=2)
    calls.enqueue("mail")

    [mail] = command("status", "--json").json["topics"]
    assert (mail["due"], mail["unserved"]) == (3, 1)
    assert "1 OF A GENERATION THAT NOBODY SERVES" in command("status").out


def test_dispatcher_that_was_not_seen_serves_nothing(command, calls):
    calls.seen("w1", ["mail"], p_lease=seconds(30))
    calls.enqueue("mail")
    calls.conn.execute("update pulse.dispatcher set last_seen_at = last_seen_at - interval '31 s'")

    status = command("status", "--json").json
    assert (status["topics"][0]["served_by"], status["dispatchers"][0]["alive"]) == ([], False)
    assert "NO DISPATCHER IS ALIVE" in command("status").out


def test_long_lease_means_a_long_life(command, calls):
    """A dispatcher with a lease of five minutes says rarely that it lives: the control to the test above."""
    calls.seen("w1", ["mail"], p_lease=seconds(300))
    calls.conn.execute("update pulse.dispatcher set last_seen_at = last_seen_at - interval '31 s'")

    assert command("status", "--json").json["dispatchers"][0]["alive"]


def test_dispatchers_are_shown_with_their_rate(command, calls):
    calls.seen("w1", ["fax", "mail"], p_completed=401, p_rates="{0.5,20}")
    calls.conn.execute("update pulse.dispatcher set generations = '{1, 2}', in_flight = 3")

    [one] = command("status", "--json").json["dispatchers"]
    assert list(one) == DISPATCHER_KEYS
    assert (one["version"], one["generations"], one["in_flight"], one["completed"]) == (
        "0.1.0",
        [1, 2],
        3,
        401,
    )
    assert one["rate"] == 20.5
    assert " 20  " in next(line for line in command("status").out.splitlines() if line.startswith("w1"))


def test_rate_of_a_topic_is_the_sum_of_its_living_dispatchers(command, calls):
    """A topic that stands still beside a busy one is seen, though one dispatcher serves both."""
    calls.seen("gone", ["mail"], p_rates="{1000}")
    calls.conn.execute("update pulse.dispatcher set last_seen_at = last_seen_at - interval '31 s'")
    calls.seen("w1", ["fax", "mail"], p_rates="{0,20}")
    calls.seen("w2", ["mail", "new"], p_rates="{2.5,1}")
    calls.seen("just-started", ["mail", "quiet"])

    found = {topic["topic"]: topic["rate"] for topic in command("status", "--json").json["topics"]}
    assert found == {"fax": 0, "mail": 22.5, "new": 1, "quiet": None}
    lines = {line.split()[0]: line for line in command("status").out.splitlines() if line}
    assert " 22  " in lines["mail"]
    assert " 0.0  " in lines["fax"]


def test_pause_of_all_can_not_be_overlooked(command, calls):
    calls.seen("w1", ["mail"])
    command("pause", "--all", "--reason", "moving house", "--by", "ada")

    out = command("status").out
    assert out.startswith("ALL TOPICS ARE PAUSED")
    assert "PAUSED" in next(line for line in out.splitlines() if line.startswith("mail"))
    assert "by ada: moving house" in out


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_the_terminal(command, busy, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    busy.enqueue("a.very.long.topic." * 8)
    busy.seen("a-very-long-host-name-4711-0a1b2c3d", ["mail", "fax", "a.very.long.topic." * 8])

    lines = command("status").out.splitlines()
    assert max(map(len, lines)) <= width
    assert any("…" in line for line in lines)


def test_pipe_gets_whole_names(command, calls):
    """Cutting is for terminals: grep and awk want the name."""
    calls.enqueue("a.very.long.topic." * 8)

    assert "a.very.long.topic." * 8 in command("status").out


def test_hostile_names_command_nothing(command, calls):
    calls.enqueue(HOSTILE)
    calls.seen(HOSTILE, [HOSTILE])
    command("pause", HOSTILE, "--reason", HOSTILE, "--by", HOSTILE)

    result = command("status")
    assert result.code == 0
    assert not {"\x1b", "\u202e"} & set(result.out)
    [topic] = command("status", "--json").json["topics"]
    assert (topic["topic"], topic["paused"], topic["served_by"]) == (HOSTILE, HOSTILE, [HOSTILE])


def test_errors_are_one_line_with_the_remedy(command, dsn, empty_dsn, calls):
    calls.conn.execute("create role stranger login")
    calls.conn.execute("grant usage on schema pulse to stranger")
    try:
        stranger = command("status", "--dsn", psycopg.conninfo.make_conninfo(dsn, user="stranger"))
    finally:
        calls.conn.execute("drop owned by stranger; drop role stranger")

    for result, remedy in (
        (stranger, "grant pulse_operator to stranger"),
        (command("status", "--dsn", empty_dsn), "run `pulse-outbox migrate`"),
        (command("status", "--dsn", "host=127.0.0.1 port=1 dbname=x"), "check --dsn"),
    ):
        assert result.code == 1
        assert result.err.count("\n") == 1
        assert remedy in result.err
    assert command("status", "--schema", "pg_nope").code == 2
