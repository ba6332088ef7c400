"""What somebody with nothing but psql sees: topics, dispatchers, kinds of death, blocked keys."""

from __future__ import annotations

import json

import psycopg
import pytest

from tests.sql.calls import Calls, seconds


@pytest.fixture
def real(outbox: Calls) -> Calls:
    """The views go by the database's clock."""
    outbox.now = None
    return outbox


def rows(calls: Calls, query: str) -> list[dict]:
    return calls.conn.execute(query).fetchall()


def test_topic_status_knows_served_and_paused_topics_without_work(real):
    real.seen("w1", ["idle"])
    real.pause("quiet")

    found = {row["topic"]: row for row in rows(real, "select * from pulse.topic_status")}
    assert sorted(found) == ["idle", "quiet"]
    assert (found["idle"]["due"], found["idle"]["served_by"]) == (0, ["w1"])
    assert (found["quiet"]["paused"], found["quiet"]["served_by"]) == ("maintenance", [])


def test_claimed_at_is_the_newest_claim(outbox, t0):
    event_id = outbox.enqueue()
    assert outbox.row(event_id)["claimed_at"] is None
    outbox.forward(5)
    outbox.fail(outbox.claim(), delay=5)
    outbox.forward(5)
    claim = outbox.claim()
    assert outbox.row(event_id)["claimed_at"] == t0 + seconds(10)
    outbox.forward(7)
    outbox.heartbeat(claim)
    outbox.complete(claim)

    assert outbox.row(event_id)["claimed_at"] == t0 + seconds(10)


def test_longest_running_is_the_oldest_claim(real):
    real.enqueue_many(2)
    real.claim(limit=1)
    real.conn.execute(
        "update pulse.outbox set claimed_at = claimed_at - interval '1 minute' where status = 'RUNNING'"
    )
    real.claim(limit=1)

    [row] = rows(real, "select longest_running > '1 minute' as old, running from pulse.topic_status")
    assert row == {"old": True, "running": 2}


def test_dispatcher_is_alive_for_its_lease(real):
    real.seen("short", p_lease=seconds(10))
    real.seen("long", p_lease=seconds(600))
    real.conn.execute("update pulse.dispatcher set last_seen_at = last_seen_at - interval '1 minute'")

    alive = {row["worker"]: row["alive"] for row in rows(real, "select * from pulse.dispatcher_status")}
    assert alive == {"short": False, "long": True}


def test_dead_kind_is_one_topic_and_one_class(outbox, t0):
    first = outbox.dead(error="one")
    outbox.forward(10)
    outbox.dead(error="two", p_generation=2)
    outbox.dead("fax", error="three")
    outbox.replay(first)
    outbox.forward(10)
    outbox.fail(outbox.claim(), "one more", terminal=True)

    fax, mail = rows(outbox, "select * from pulse.dead_kind order by topic")
    assert (mail["dead"], mail["died_before"], mail["generations"]) == (2, 1, [0, 2])
    assert (mail["error_class"], mail["last_error"], mail["alerts_owed"]) == ("Boom", "one more", 2)
    assert (mail["first_died_at"], mail["last_died_at"]) == (t0 + seconds(10), t0 + seconds(20))
    assert (fax["dead"], fax["died_before"]) == (1, 0)


def test_death_without_a_class_is_a_kind_too(outbox):
    outbox.enqueue()
    claim = outbox.claim()
    outbox.conn.execute(
        "select pulse.outbox_fail(%s, %s, '{boom}', '{null}', '{0}', '{t}')", (claim.ids, claim.tokens)
    )

    assert rows(outbox, "select error_class, dead from pulse.dead_kind") == [{"error_class": "", "dead": 1}]
    assert outbox.scalar("outbox_replay_many", "mail", "", None, None, 10, 0, "ada") == 1


def test_dead_letter_blocks_its_key_when_somebody_waits(outbox):
    blocker = outbox.dead(key="a")
    outbox.dead("other", key="b", p_dead_key="skip")
    outbox.enqueue("other", key="b")
    outbox.dead("alone", key="c")
    assert rows(outbox, "select * from pulse.blocked_key") == []
    outbox.enqueue_many(3, key="a")

    [row] = rows(outbox, "select * from pulse.blocked_key")
    assert (row["ordering_key"], row["event_id"], row["why"], row["waiting"]) == (
        "a",
        blocker,
        "dead letter",
        3,
    )


def test_parked_head_is_blocked(outbox):
    head = outbox.insert(ordering_key="a", parked=True)
    outbox.insert(ordering_key="a", parked=True)
    outbox.insert(ordering_key="b", parked=False)

    [row] = rows(outbox, "select * from pulse.blocked_key")
    assert (row["event_id"], row["why"], row["waiting"]) == (head, "parked head", 1)


def test_hot_key_is_not_counted_to_its_end(outbox):
    outbox.dead(key="hot")
    outbox.conn.execute(
        """insert into pulse.outbox (event_id, topic, payload, idempotency_key, ordering_key, parked)
           select id, 'mail', '{}', id::text, 'hot', true
             from (select gen_random_uuid() as id from generate_series(1, 3000)) as new"""
    )

    assert [row["waiting"] for row in rows(outbox, "select * from pulse.blocked_key")] == [1000]


@pytest.mark.parametrize("analyzed", [False, True])
def test_status_does_not_look_at_completed_rows(outbox, analyzed):
    """The same work, beside nothing and beside 50,000 completed events, costs the same."""

    def cost() -> int:
        [row] = rows(outbox, "explain (analyze, buffers, format json) select * from pulse.topic_status")
        plan = row["QUERY PLAN"]
        found = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
        return int(found["Shared Hit Blocks"] + found["Shared Read Blocks"])

    outbox.now = None
    outbox.enqueue_many(50)
    outbox.claim(limit=5)
    cost()
    alone = cost()
    outbox.conn.execute(
        """insert into pulse.outbox (event_id, topic, payload, idempotency_key, status, indexed_as, known_as,
                                     completed_at)
           select id, 'mail', '{}', id::text, 'COMPLETED', 'RUNNING', 'COMPLETED', now()
             from (select gen_random_uuid() as id from generate_series(1, 50000)) as new"""
    )
    if analyzed:
        outbox.conn.execute("analyze pulse.outbox")
    cost()

    [table] = rows(outbox, "select pg_relation_size('pulse.outbox') / 8192 as pages")
    assert cost() < alone + 200 < table["pages"]


@pytest.mark.parametrize(
    "view", ["dead_letter", "dead_kind", "topic_status", "dispatcher_status", "blocked_key"]
)
def test_no_view_has_payloads(outbox, view):
    cursor = outbox.conn.execute(
        psycopg.sql.SQL("select * from pulse.{}").format(psycopg.sql.Identifier(view))
    )
    assert cursor.description is not None

    assert not {"payload", "headers"} & {column.name for column in cursor.description}


def test_no_column_of_a_view_is_a_domain(outbox):
    """Drivers do not know the array that array_agg makes of one."""
    of_domains = rows(
        outbox,
        """
        select c.relname, a.attname
          from pg_class c
          join pg_attribute a on a.attrelid = c.oid
          join pg_type t on t.oid = a.atttypid
          left join pg_type e on e.oid = t.typelem
         where c.relnamespace = 'pulse'::regnamespace and c.relkind = 'v' and 'd' in (t.typtype, e.typtype)
        """,
    )

    assert of_domains == []
