"""Each role tries what it may do, and everything else."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from tests.sql.calls import Calls, seconds
from tests.support.testbed import Testbed

ROLES = ("pulse_producer", "pulse_dispatcher", "pulse_operator")

# What each role may call. Everything else of the schema is for the owner.
MAY_CALL = {
    "pulse_producer": {"uuid7", "outbox_wake", "outbox_enqueue"},
    "pulse_dispatcher": {
        "uuid7", "outbox_wake", "outbox_enqueue", "outbox_lanes", "outbox_claim", "outbox_heartbeat", "outbox_complete",
        "outbox_fail", "outbox_snooze", "outbox_release", "outbox_lapse", "outbox_reap", "outbox_heal", "outbox_prune",
        "dispatcher_seen", "dispatcher_gone",
    },
    "pulse_operator": {
        "outbox_lanes", "outbox_replay", "outbox_discard", "outbox_pause", "outbox_resume", "outbox_prune",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def logins(testbed: Testbed) -> Iterator[dict[str, str]]:
    """For each role, and for nobody, a login that has it and nothing else."""
    names = {role: f"login_{role}_{secrets.token_hex(4)}" for role in (*ROLES, "nobody")}
    with psycopg.connect(testbed.server_dsn, autocommit=True) as conn:
        for role, name in names.items():
            conn.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
            if role != "nobody":
                conn.execute(sql.SQL("grant {} to {}").format(sql.Identifier(role), sql.Identifier(name)))
        yield names
        for name in names.values():
            conn.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def as_role(dsn, logins, t0):
    """A session of a login that has the role: `as_role("pulse_producer")`."""
    opened = []

    def log_in(role: str) -> Calls:
        conn = psycopg.connect(make_conninfo(dsn, user=logins[role]), autocommit=True, row_factory=dict_row)
        opened.append(conn)
        return Calls(conn, t0)

    yield log_in
    for conn in opened:
        conn.close()


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
        "dead_letter",
        "topic_status",
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
        "topic_status",
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


# A caller who prepares his session to be found first

TRAPS = """
create schema trap;
create table public.caught (what text);
grant all on public.caught to public;
grant usage, create on schema trap, public to public;
create function trap.spring(what text) returns text language plpgsql as $$
  begin insert into public.caught values (what); return what; end $$;
"""
NAMES = [
    "create temp table outbox (event_id uuid, topic text, status text)",
    "create temp table pause (topic text)",
    "create temp table dispatcher (worker text, sleeping boolean, topics text[])",
    "create temp table sweep (swept_at timestamptz, hold_until timestamptz)",
    "insert into pause values (null)",
    "insert into sweep values ('infinity', 'infinity')",
]
FUNCTIONS = [
    ("clock_timestamp()", "timestamptz", "'1999-01-01'"),
    ("now()", "timestamptz", "'1999-01-01'"),
    ("gen_random_uuid()", "uuid", "'00000000-0000-0000-0000-000000000000'"),
    ("pg_notify(text, text)", "void", "null"),
    ("hashtextextended(text, bigint)", "bigint", "0"),
    ("cardinality(anyarray)", "integer", "0"),
    ("array_position(anyarray, anyelement)", "integer", "1"),
    ("jsonb_build_object(text, text)", "jsonb", "'{}'"),
    ("char_length(text)", "integer", "7"),
    ("paused_topics()", "text[]", "'{}'"),
    ("unpark(text[], timestamptz)", "integer", "0"),
]
OPERATORS = ["uuid", "text", "timestamptz", "bigint", "smallint", "integer", "tid"]


def prepare_traps(calls: Calls, schema: str) -> None:
    calls.conn.execute(f"set search_path = {schema}, trap, public, pg_catalog, pulse")
    for signature, returns, value in FUNCTIONS:
        name = signature.split("(")[0]
        answer = "" if returns == "void" else value
        calls.conn.execute(
            f"""create or replace function {schema}.{signature} returns {returns} language plpgsql as
                $$ begin perform trap.spring('{name}'); return {answer}; end $$"""
        )
    for name in OPERATORS:
        calls.conn.execute(
            f"""create or replace function {schema}.same(a {name}, b {name}) returns boolean language plpgsql as
                $$ begin perform trap.spring('operator on {name}'); return true; end $$"""
        )
        for operator in ("=", "<>", "<", ">=", "<=", ">"):
            calls.conn.execute(
                f"create operator {schema}.{operator} (leftarg = {name}, rightarg = {name}, function = {schema}.same)"
            )


@pytest.mark.parametrize("where", ["public", "pg_temp"])
def test_hostile_search_path_changes_nothing(as_role, outbox, t0, where):
    """Own tables, functions and operators in front of everything: no function of ours looks at them."""
    outbox.conn.execute(TRAPS)
    sessions = {role: as_role(role) for role in ROLES}
    outbox.conn.execute(
        sql.SQL("grant create, temporary on database {} to public").format(
            sql.Identifier(outbox.conn.info.dbname)
        )
    )
    if where == "public":
        prepare_traps(outbox, "public")
        outbox.conn.execute("reset search_path")
    for calls in sessions.values():
        for command in NAMES:
            calls.conn.execute(command)
        if where == "pg_temp":
            prepare_traps(calls, "pg_temp")
        calls.conn.execute("set search_path = pg_temp, public, trap, pg_catalog, pulse")
    producer, dispatcher, operator = (sessions[role] for role in ROLES)

    one, two = (producer.enqueue(key="k", p_idempotency_key=f"i{n}") for n in range(2))
    dispatcher.seen("w", sleeping=True)
    claim = dispatcher.claim()
    assert claim.ids == [one]
    assert dispatcher.heartbeat(claim) == {}
    assert dispatcher.fail(claim, terminal=True) == {one: "DEAD_LETTERED"}
    operator.replay(one)
    operator.pause()
    assert dispatcher.claim() == []
    operator.resume()
    dispatcher.lapse(dispatcher.claim())
    dispatcher.snooze(dispatcher.claim(), 0)
    dispatcher.release(dispatcher.claim())
    assert len(dispatcher.claim()) == 1
    assert len(dispatcher.keep_sweeping(40)) == 1
    claim = dispatcher.claim()
    assert dispatcher.complete(claim) == {}
    operator.discard(two)
    dispatcher.forward(1)
    dispatcher.heal()
    assert dispatcher.call("outbox_prune", p_retention=seconds(0))[0]["pruned"] >= 1

    assert outbox.conn.execute("select * from public.caught").fetchall() == []


def test_the_traps_work(as_role, outbox):
    """The control: a function without a search_path of its own falls into them."""
    outbox.conn.execute(TRAPS)
    prepare_traps(outbox, "public")
    outbox.conn.execute("set search_path = public, pg_catalog")
    outbox.conn.execute("select clock_timestamp(), 'a'::text = 'b'::text")

    caught = {row["what"] for row in outbox.conn.execute("table public.caught").fetchall()}
    assert {"clock_timestamp", "operator on text"} <= caught


def test_functions_with_rights_of_their_owner_pin_their_search_path(outbox):
    """Every function of the schema, with pg_temp last."""
    rows = outbox.conn.execute(
        """select proname, proconfig
             from pg_proc
            where pronamespace = 'pulse'::regnamespace"""
    ).fetchall()

    unpinned = [
        row["proname"] for row in rows if "search_path=pg_catalog, pg_temp" not in (row["proconfig"] or [])
    ]
    assert unpinned == []


def test_settings_of_the_session_change_nothing(outbox):
    """What a database or a role may have set for good reasons of its own."""
    for setting in (
        "datestyle = 'ISO, DMY'", "timezone = 'Asia/Kathmandu'", "intervalstyle = 'sql_standard'",
        "bytea_output = 'escape'", "extra_float_digits = -5", "plpgsql.extra_errors = 'all'", "array_nulls = off",
        "transform_null_equals = on", "enable_tidscan = off",
        "enable_indexscan = off", "enable_nestloop = off", "plan_cache_mode = force_custom_plan",
    ):  # fmt: skip
        outbox.conn.execute(f"set {setting}")
    first, second = outbox.enqueue_many(2, key="k")
    free = outbox.enqueue(p_event_id=uuid.uuid4())
    claim = outbox.claim()
    assert set(claim.ids) == {first, free}
    assert outbox.heartbeat(claim) == {}
    assert outbox.complete(claim) == {}
    assert outbox.claim().ids == [second]
    assert [row["event_id"] for row in outbox.keep_sweeping(40)] == [second]
    outbox.fail(outbox.claim(), terminal=True)
    outbox.replay(second)
    outbox.discard(second)
    assert outbox.heal()["healed"] == 0
    outbox.forward(1)
    assert outbox.call("outbox_prune", p_retention=seconds(0))[0]["pruned"] == 3
