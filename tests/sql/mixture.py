"""A table as it looks after a while: much that nobody may claim now, and a little that is due."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

# Where the due rows are; everything else is only in the way.
TOPIC = "work"
# (what, share of the whole, columns)
IN_THE_WAY = [
    (
        "completed",
        0.50,
        "'work', 'COMPLETED', null, false, 0, 0, now() - interval '1 day', now() - interval '1 hour'",
    ),
    ("due, of another topic", 0.13, "'other', 'PENDING', null, false, 0, 0, now() - interval '1 day', null"),
    (
        "in the future, more urgent",
        0.13,
        "'work', 'RETRYING', null, false, 5, 0, now() + interval '1 day', null",
    ),
    ("of another generation", 0.08, "'work', 'PENDING', null, false, 0, 7, now() - interval '1 day', null"),
    ("of a paused topic", 0.06, "'paused', 'PENDING', null, false, 9, 0, now() - interval '1 day', null"),
    ("waiting for one key", 0.10, "'work', 'PENDING', 'hot', i > 1, 0, 0, now() - interval '1 minute', null"),
]
DUE = 1_000  # and half as many in keys of their own


def fill(conn: psycopg.Connection[Any], rows: int, due: int = DUE) -> None:
    """Write about *rows* rows that are in the way; none of them when it is 0."""
    conn.execute("alter table pulse.outbox set (autovacuum_enabled = false)")
    conn.execute("select pulse.outbox_pause('paused', 'busy', 'test')")
    add_in_the_way(conn, rows)
    _insert(conn, due, "'work', 'PENDING', null, false, 0, 0, now() - interval '2 minutes', null")
    _insert(
        conn, due // 2, "'keyed', 'PENDING', 'key ' || i, false, 0, 0, now() - interval '2 minutes', null"
    )


def add_in_the_way(conn: psycopg.Connection[Any], rows: int) -> None:
    for _, share, columns in IN_THE_WAY:
        _insert(conn, round(rows * share), columns)


def _insert(conn: psycopg.Connection[Any], count: int, columns: str) -> None:
    conn.execute(
        f"""insert into pulse.outbox (event_id, idempotency_key, payload, topic, status, ordering_key, parked, priority,
                                      generation, next_run_at, completed_at, indexed_as, known_as, indexed_at)
            select id, id::text, '{{"order": 7}}', topic, status, key, parked, priority, generation, due, ended,
                   least(status, 'RUNNING'), status, case when status = 'DEAD_LETTERED' then ended end
              from (select i, pulse.uuid7() as id from generate_series(1, {count}) as i) as new
             cross join lateral (select {columns}) as c (topic, name, key, parked, priority, generation, due, ended_at)
             cross join lateral (select name::pulse.status as status, ended_at::timestamptz as ended) as t"""
    )


FAIL = """
select * from pulse.outbox_fail(%s, %s, array_fill('x'::text, '{{100}}'), array_fill('{{}}'::jsonb, '{{100}}'),
                                array_fill(interval '1s', '{{100}}'), array_fill({}, '{{100}}'))"""


class Meter:
    """Calls functions on one session and counts the shared buffers that they touch. Every call is rolled back."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        assert not conn.autocommit
        self.conn = conn

    def buffers(self, query: str, *parameters: object) -> int:
        [(report,)] = self.conn.execute(
            f"explain (analyze, buffers, format json) {query}", parameters
        ).fetchall()
        plan = report[0]["Plan"]
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])

    @contextmanager
    def undone(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.conn.rollback()

    def claimed(self, topic: str = TOPIC, limit: int = 100) -> tuple[list[Any], list[Any]]:
        """The ids and tokens of a claim."""
        token = uuid.uuid4()
        rows = self.conn.execute(
            "select event_id from pulse.outbox_claim(%s, 'w', %s, %s, p_fresh => true, p_generations => '{1}')",
            (token, [topic], limit),
        ).fetchall()
        return [row[0] for row in rows], [token] * len(rows)

    def costs_of_what_is_lost(self, ids: list[uuid.UUID]) -> dict[str, int]:
        """What a write after a claim costs when there is no such claim."""
        one = "'{x}', '{null}', '{0}', '{f}'"
        costs = {}
        for name, more in {
            "heartbeat": "",
            "complete": "",
            "complete and delete": ", p_delete => true",
            "fail": f", {one}",
            "snooze": ", '{0}'",
            "release": "",
            "lapse": ", 'killed'",
        }.items():
            with self.undone():
                function = name.split()[0]
                costs[name] = self.buffers(f"select * from pulse.outbox_{function}(%s, %s{more})", ids, ids)
        return costs

    def costs(self) -> dict[str, int]:
        """What each call costs, for a hundred rows where it takes many."""
        costs = {}
        claim = "select * from pulse.outbox_claim(gen_random_uuid(), 'w', %s, 100"
        claim += ", p_generations => '{1}', p_fresh => true"
        with self.undone():
            costs["claim"] = self.buffers(f"{claim})", [TOPIC, "paused"])
        with self.undone():
            lane = {"topic": TOPIC, "generation": 0, "lapses": 0, "priority": 0, "quota": 100}
            costs["claim from a lane"] = self.buffers(f"{claim}, p_lanes => %s)", [TOPIC], Jsonb([lane]))
        one_lane = (
            "select * from pulse.outbox_claim_lane(gen_random_uuid(), 'w', %s, 0, 0::smallint, 0::smallint, "
        )
        one_lane += "'2000-01-01', 0, 100, '30 s', 5, 100, 1)"
        with self.undone():
            costs["claim of one lane"] = self.buffers(one_lane, TOPIC)
        with self.undone():
            costs["claim of one lane, keyed"] = self.buffers(one_lane, "keyed")
        with self.undone():
            costs["claim keyed"] = self.buffers(f"{claim})", ["keyed"])
        with self.undone():
            costs["lanes"] = self.buffers(
                "select * from pulse.outbox_lanes(%s, '{1}')", [TOPIC, "paused", "keyed"]
            )
        for name, query in {
            "heartbeat": "select * from pulse.outbox_heartbeat(%s, %s)",
            "complete": "select * from pulse.outbox_complete(%s, %s)",
            "complete and delete": "select * from pulse.outbox_complete(%s, %s, true)",
            "fail": FAIL.format("false"),
            "dead-letter": FAIL.format("true"),
            "snooze": "select * from pulse.outbox_snooze(%s, %s, array_fill(interval '1s', '{100}'))",
            "release": "select * from pulse.outbox_release(%s, %s)",
            "lapse": "select * from pulse.outbox_lapse(%s, %s, 'killed')",
        }.items():
            for topic in (TOPIC, "keyed"):
                with self.undone():
                    ids, tokens = self.claimed(topic)
                    assert len(ids) == 100
                    costs[name if topic == TOPIC else f"{name} keyed"] = self.buffers(query, ids, tokens)
        with self.undone():
            ids, tokens = self.claimed()
            self.conn.execute("select * from pulse.outbox_complete(%s, %s)", (ids, tokens))
            costs["complete again"] = self.buffers("select * from pulse.outbox_complete(%s, %s)", ids, tokens)
        for full in (True, False):
            with self.undone():
                self.claimed()
                self.conn.execute(
                    "insert into pulse.sweep values (clock_timestamp() + interval '25 seconds', now())"
                )
                later = "p_now => clock_timestamp() + interval '31 seconds'"
                costs["reap" if full else "reap on"] = self.buffers(
                    f"select * from pulse.outbox_reap(100, p_full => {full}, {later})"
                )
        with self.undone():
            costs["enqueue"] = self.buffers("select pulse.outbox_enqueue(%s, '{}')", TOPIC)
        with self.undone():
            costs["enqueue once"] = self.buffers("select pulse.outbox_enqueue(%s, '{}', 'a key')", TOPIC)
        with self.undone():
            costs["enqueue keyed"] = self.buffers(
                "select pulse.outbox_enqueue(%s, '{}', p_ordering_key => 'new')", TOPIC
            )
        with self.undone():
            costs["enqueue hot key"] = self.buffers(
                "select pulse.outbox_enqueue(%s, '{}', p_ordering_key => 'hot')", TOPIC
            )
        with self.undone():
            ids, tokens = self.claimed(limit=1)
            self.conn.execute(
                "select * from pulse.outbox_fail(%s, %s, '{x}', '{null}', '{0}', '{t}')", (ids, tokens)
            )
            costs["replay"] = self.buffers("select pulse.outbox_replay(%s, 0, 'me')", ids[0])
        with self.undone():
            ids, tokens = self.claimed("keyed", limit=1)
            self.conn.execute("select * from pulse.outbox_release(%s, %s)", (ids, tokens))
            costs["discard"] = self.buffers("select pulse.outbox_discard(%s, 'why', 'me')", ids[0])
        with self.undone():
            costs["heal"] = self.buffers("select * from pulse.outbox_heal(null, 100)")
        return costs
