"""Each role tries what it may do, and everything else."""

from __future__ import annotations

import uuid

import psycopg
import pytest
from psycopg import sql

from pulse_outbox import NewEvent, Outbox
from tests.sql.calls import Calls, seconds
from tests.sql.conftest import ROLES

# What each role may call. Everything else of the schema is for the owner.
MAY_CALL = {
    "pulse_producer": {"uuid7", "outbox_wake", "outbox_enqueue"},
    "pulse_dispatcher": {
        "uuid7", "outbox_wake", "outbox_enqueue", "outbox_lanes", "outbox_claim", "outbox_claim_lane",
        "outbox_flush", "outbox_heartbeat", "outbox_complete", "outbox_fail",
        "outbox_snooze", "outbox_release", "outbox_lapse", "outbox_reap", "outbox_heal", "outbox_prune",
        "outbox_next_alert", "outbox_pay_alert",
        "dispatcher_seen", "dispatcher_gone",
    },
    "pulse_operator": {
        "outbox_lanes", "outbox_replay", "outbox_discard", "outbox_pause", "outbox_resume", "outbox_prune",
        "outbox_replay_many", "outbox_discard_many", "count_topics", "blocked_keys", "running",
        "outbox_prune_handled", "outbox_free",
    },
}  # fmt: skip


def denied(calls: Calls, query: str, parameters: tuple[object, ...] = ()) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        calls.conn.execute(query, parameters)


def test_producer_enqueues(as_role, outbox):
    producer = as_role("pulse_producer")
    event_id = producer.enqueue(key="k", p_idempotency_key="once")
    producer.conn.execute(
        """insert into pulse.outbox (event_id, topic, payload, headers, source, target, idempotency_key, ordering_key,
                                     priority, generation, producer_max_attempts, next_run_at, holds_key, parked)
           values (%s, 'mail', '{}', '{}', null, null, 'k', 'k', 0, 0, null, now(), true, true)""",
        (uuid.uuid4(),),
    )
    producer.call("outbox_wake", ["mail"])

    assert producer.enqueue(p_idempotency_key="once") == event_id
    assert outbox.claim().ids == [event_id]


@pytest.mark.parametrize("role", ["pulse_producer", "pulse_dispatcher"])
def test_the_library_enqueues_under_the_role(as_role, outbox, role):
    """Web processes, and handlers that enqueue what follows."""
    library = Outbox()
    outbox.seen("w", sleeping=True)
    conn = as_role(role).conn
    with conn.transaction():
        ids = [library.enqueue(conn, "mail", {}), library.enqueue(conn, "mail", {}, idempotency_key="k")]
        ids += library.enqueue_many(conn, [NewEvent("mail", {}), NewEvent("mail", {})])

    assert set(outbox.statuses(*ids)) == {"PENDING"}


def test_producer_copies(as_role, outbox):
    producer = as_role("pulse_producer")
    event_id = uuid.uuid4()
    with (
        producer.conn.cursor() as cursor,
        cursor.copy("copy pulse.outbox (event_id, topic, payload, idempotency_key) from stdin") as copy,
    ):
        copy.write_row((event_id, "mail", "{}", str(event_id)))
    outbox.now = None

    assert outbox.claim().ids == [event_id]


@pytest.mark.parametrize(
    "column",
    [
        "status", "attempts", "lapses", "lease_seq", "claim_token", "max_attempts", "failure_history", "created_at",
        "seq", "alert_id", "last_error", "completed_at", "lease_until", "locked_by", "alone", "snoozes",
    ],
)  # fmt: skip
def test_producer_writes_no_state(as_role, column):
    query = sql.SQL(
        """insert into pulse.outbox (event_id, topic, payload, idempotency_key, {})
           values (gen_random_uuid(), 'mail', '{{}}', 'k', default)"""
    )
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        as_role("pulse_producer").conn.execute(query.format(sql.Identifier(column)))


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
def test_nobody_writes_past_the_functions(as_role, outbox, role):
    """Least of all payloads, and the tables that decide what runs."""
    event_id = outbox.dead()
    calls = as_role(role)
    denied(calls, "update pulse.outbox set payload = '{}' where event_id = %s", (event_id,))
    denied(calls, "update pulse.outbox set status = 'PENDING', completed_at = null")
    denied(calls, "delete from pulse.outbox")
    denied(calls, "truncate pulse.outbox")
    denied(calls, "select from pulse.outbox for update")
    denied(calls, "insert into pulse.pause (reason, paused_by) values ('x', 'y')")
    denied(calls, "delete from pulse.pause")
    denied(calls, "delete from pulse.sweep")
    denied(calls, "insert into pulse.sweep values (now(), 'infinity')")
    denied(calls, "insert into pulse.claim_try values (gen_random_uuid(), 99, now())")
    denied(calls, "update pulse.dispatcher set sleeping = true")
    denied(calls, "delete from pulse.event_handled")
    denied(calls, "update pulse.migration set oldest_code = '9'")
    denied(calls, "alter table pulse.outbox disable trigger all")
    denied(calls, "drop table pulse.outbox")
    denied(calls, "create function pulse.mine() returns void language sql as ''")
    denied(calls, "create table pulse.mine ()")
    denied(calls, "create or replace view pulse.dead_letter as select 1 as event_id")


@pytest.mark.parametrize(("role", "reads"), [("pulse_producer", {"migration"}), ("nobody", set())])
def test_reading_is_for_those_who_need_it(as_role, outbox, role, reads):
    """Payloads may hold what a producer or a passer-by must not see."""
    calls = as_role(role)
    tables = {
        "migration",
        "outbox",
        "event_handled",
        "pause",
        "dispatcher",
        "sweep",
        "claim_try",
        "dead_letter",
        "dead_kind",
        "topic_status",
        "dispatcher_status",
        "blocked_key",
    }
    for table in tables - reads:
        denied(calls, f"select * from pulse.{table}")
    for table in reads:
        calls.conn.execute(f"select * from pulse.{table}")


@pytest.mark.parametrize("role", [*ROLES, "nobody"])
def test_every_function_is_granted_to_whom_it_belongs(as_role, outbox, role):
    """No function of the schema is left out of this list: a new one is nobody's until somebody decides."""
    name = outbox.conn.execute("select current_user as name").fetchone()["name"]
    assert name
    session_user = as_role(role).conn.execute("select session_user as name").fetchone()["name"]
    rows = outbox.conn.execute(
        """select proname from pg_proc
            where pronamespace = 'pulse'::regnamespace
              and has_function_privilege(%s, oid, 'execute')""",
        (session_user,),
    ).fetchall()

    allowed = MAY_CALL.get(role, set())
    assert {row["proname"] for row in rows} == allowed


def test_inside_functions_are_refused_when_called(as_role, outbox):
    event_id = outbox.enqueue()
    claim = outbox.claim()
    outbox.dead("other")
    calls = [
        ("select pulse.lock_claimed(%s, %s)", ([event_id], [claim.token])),
        ("select pulse.unpark('{k}', now())", ()),
        ("select * from pulse.unsettled(%s, %s, '{}')", ([event_id], [claim.token])),
        (
            "select * from pulse.record_failure('{\"(0,1)\"}', %s, '{x}', '{null}', '{0}', '{t}', false, false, now())",
            ([event_id],),
        ),
        ("select pulse.take('mail', 0, 0::smallint, 0::smallint, now(), 0, 1, 1, 5, now())", ()),
        ("select pulse.whose_turn('{}')", ()),
        ("select pulse.hold_event(%s, '{PENDING}', 'x')", (event_id,)),
        ("select pulse.paused_topics()", ()),
        ("select pulse.outbox_grant()", ()),
    ]
    for role in (*ROLES, "nobody"):
        session = as_role(role)
        for query, parameters in calls:
            try:
                denied(session, query, parameters)
            except psycopg.errors.UndefinedFunction:
                continue  # it has changed its arguments; the catalog test above covers it


def test_dispatcher_does_its_work(as_role, outbox):
    """The whole life of jobs under this role alone."""
    calls = as_role("pulse_dispatcher")
    calls.seen("w", sleeping=True)
    first, second = outbox.enqueue_many(2)
    calls.call("outbox_lanes", ["mail"])
    claim = calls.claim(limit=1)
    assert claim.ids == [first]
    assert calls.heartbeat(claim) == {}
    assert calls.release(claim) == {}
    claim = calls.claim()
    calls.snooze(claim, 0)
    calls.fail(calls.claim(), delay=0)
    calls.lapse(calls.claim())
    calls.complete(calls.claim())
    calls.enqueue("follow-up")
    calls.claim("follow-up")
    assert len(calls.keep_sweeping(40)) == 1
    calls.heal()
    calls.call("outbox_prune", p_retention=seconds(0))
    calls.call("dispatcher_gone", "w")
    calls.conn.execute("insert into pulse.event_handled (handler_name, idempotency_key) values ('h', 'k')")
    for table in ("migration", "pause", "dispatcher", "event_handled"):
        calls.conn.execute(sql.SQL("select * from pulse.{}").format(sql.Identifier(table)))

    assert second in claim.ids


def test_operator_does_his_work(as_role, outbox):
    calls = as_role("pulse_operator")
    first, second = outbox.dead(), outbox.dead("other")
    calls.replay(first)
    calls.discard(second)
    calls.pause()
    calls.resume()
    for name in (
        "outbox",
        "dead_letter",
        "dead_kind",
        "topic_status",
        "dispatcher_status",
        "blocked_key",
        "pause",
        "dispatcher",
        "migration",
        "event_handled",
    ):
        calls.conn.execute(sql.SQL("select * from pulse.{}").format(sql.Identifier(name)))

    assert outbox.statuses(first, second) == ["PENDING", "DISCARDED"]


def test_role_that_was_created_later_gets_its_rights(dsn, outbox):
    """An administrator creates the roles and calls outbox_grant again: nothing is lost and nothing is added."""
    query = "select relname, relacl::text from pg_class where relnamespace = 'pulse'::regnamespace order by 1"
    functions = "select oid, proacl::text from pg_proc where pronamespace = 'pulse'::regnamespace order by 1"
    before = outbox.conn.execute(query).fetchall(), outbox.conn.execute(functions).fetchall()

    outbox.conn.execute("select pulse.outbox_grant()")

    assert (outbox.conn.execute(query).fetchall(), outbox.conn.execute(functions).fetchall()) == before
