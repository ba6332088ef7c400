"""A caller who prepares his session so that his own objects are found before ours."""

from __future__ import annotations

import uuid

import pytest
from psycopg import sql

from tests.sql.calls import Calls, seconds
from tests.sql.conftest import ROLES


@pytest.fixture
def dsn(testbed):
    """A database of the test's own: the traps stay in it."""
    with testbed.database() as dsn:
        yield dsn


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
