"""`pulse-outbox doctor`: each fault is made, found, named with its remedy, and gone when it is mended."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pulse_outbox import schema
from pulse_outbox.doctor import CHECKS, installation, server
from tests.cli.conftest import HOSTILE, bury
from tests.sql.calls import seconds

RUNBOOKS = {
    "a-job-died.md", "many-jobs-died.md", "a-poison-job.md", "the-backlog-grows.md", "a-worker-is-stuck.md",
    "upgrade-the-schema.md", "roll-out-a-generation.md", "database-failover.md", "restore-from-backup.md",
    "retention-and-bloat.md",
}  # fmt: skip


@pytest.fixture(autouse=True)
def sound(calls, monkeypatch):
    """A database that nothing is wrong with, but that the server of the tests runs without fsync."""
    calls.seen("w1", ["mail"], p_lease=seconds(3600))
    monkeypatch.setattr(
        server, "HARMFUL", {k: v for k, v in server.HARMFUL.items() if k not in ("fsync", "full_page_writes")}
    )


def findings(command, check: str, *options: object, wrong: bool = True) -> list[dict[str, str]]:
    """What one check says; the others may say what they like."""
    result = command("doctor", "--json", *options)
    found: list[dict[str, str]] = [one for one in result.json["findings"] if one["check"] == check]
    for one in found:
        assert list(one) == ["check", "severity", "what", "remedy", "runbook"]
        assert one["runbook"] in RUNBOOKS | {None}
    if wrong:
        assert result.code == 1
        assert result.json["healthy"] is False
    return found


def test_sound_database_is_well(command):
    result = command("doctor")

    assert result.code == 0, result.out
    assert f"nothing is wrong: {len(CHECKS)} checks of schema pulse" in result.out
    assert command("doctor", "--json").json["healthy"] is True


def test_every_runbook_that_is_named_is_one_of_ours():
    named = set()
    for path in (Path(server.__file__).parent).glob("*.py"):
        named |= {word.strip('",') for word in path.read_text().split() if word.strip('",').endswith(".md")}

    assert {name.removeprefix('runbook="') for name in named} <= RUNBOOKS


def test_expected_indexes_are_those_of_a_fresh_schema(calls):
    rows = calls.conn.execute(
        """select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid
            where c.relnamespace = 'pulse'::regnamespace"""
    ).fetchall()

    assert set(installation.expected_indexes()) == {row["relname"] for row in rows}


@pytest.mark.parametrize("name", installation.expected_indexes())
def test_missing_index_is_named_and_its_remedy_makes_it_again(command, calls, name):
    definition = "select pg_get_indexdef(to_regclass('pulse.' || %s)) as text"
    before = calls.conn.execute(definition, (name,)).fetchone()
    calls.conn.execute(
        f"alter table pulse.{name.removesuffix('_pkey')} drop constraint {name}"
        if name.endswith("_pkey")
        else f"drop index pulse.{name}"
    )
    [finding] = findings(command, "indexes")

    assert (finding["severity"], finding["runbook"]) == ("error", "upgrade-the-schema.md")
    assert name in finding["what"]
    calls.conn.execute(finding["remedy"])
    assert calls.conn.execute(definition, (name,)).fetchone() == before
    assert findings(command, "indexes", wrong=False) == []


def test_invalid_index_is_named(command, calls):
    calls.conn.execute(
        "update pg_index set indisvalid = false where indexrelid = 'pulse.outbox_due'::regclass"
    )
    [finding] = findings(command, "indexes")

    assert "outbox_due is invalid" in finding["what"]
    calls.conn.execute(finding["remedy"])
    assert findings(command, "indexes", wrong=False) == []


def test_schema_that_does_not_fit(command, empty_dsn, calls):
    [finding] = findings(command, "schema", "--dsn", empty_dsn)
    assert "run `pulse-outbox migrate`" in finding["what"]

    calls.conn.execute("update pulse.migration set checksum = repeat('0', 64)")
    [finding] = findings(command, "schema")
    assert "was changed after it had been applied" in finding["what"]


def test_no_dispatcher_and_one_that_was_not_seen(command, calls):
    calls.conn.execute(
        "update pulse.dispatcher set last_seen_at = last_seen_at - interval '2 hours', in_flight = 7"
    )
    gone, none = sorted(findings(command, "dispatchers"), key=lambda one: one["severity"], reverse=True)

    assert (
        "dispatcher w1 (host host, pid 1) has not been seen for 2 hours; it had 7 in flight" in gone["what"]
    )
    assert (none["severity"], none["what"]) == ("error", "no dispatcher is alive: nothing runs")


def test_unserved_topic_and_generation(command, calls):
    calls.enqueue_many(3, "fax")
    calls.call("dispatcher_seen", "w2", "host", 1, "0.1.0", ["sms"], [2], 0, False)
    calls.enqueue("sms", p_generation=1)
    topic, generation = findings(command, "unserved")

    assert "nobody serves topic fax, and 3 events wait" in topic["what"]
    assert "1 events of topic sms are of a generation that nobody serves" in generation["what"]
    assert generation["runbook"] == "roll-out-a-generation.md"
    sql = generation["remedy"].partition("which ones: ")[2]
    assert calls.conn.execute(sql).fetchall() == [{"generation": 1}]


def test_backlog(command, calls):
    calls.enqueue("mail")
    assert findings(command, "backlog", wrong=False) == []
    calls.conn.execute("update pulse.outbox set next_run_at = next_run_at - interval '20 minutes'")

    [finding] = findings(command, "backlog")
    assert finding["what"] == "topic mail: the oldest of 1 due waits for 20 minutes"


def test_paused_topic_with_work(command, calls):
    calls.pause("quiet")
    [quiet] = findings(command, "paused", wrong=False)
    assert quiet["severity"] == "info"

    calls.enqueue("mail")
    calls.pause(None)
    assert "topic mail is paused by operator: maintenance; 1 events wait" in [
        one["what"] for one in findings(command, "paused")
    ]


def test_dead_letters_by_kind(command, calls):
    bury(calls, "mail", "Boom", 12)
    bury(calls, "old", "Bang", 1)
    calls.conn.execute(
        "update pulse.outbox set completed_at = completed_at - interval '3 days' where topic = 'old'"
    )
    many, old = findings(command, "dead")

    assert (many["severity"], many["runbook"]) == ("warning", "many-jobs-died.md")
    assert many["what"].startswith("12 dead of topic mail by Boom, the last ")
    assert (old["severity"], old["runbook"]) == ("info", "a-job-died.md")


def test_key_that_a_dead_letter_holds(command, calls):
    event_id = calls.dead("mail", key="order:7")
    assert findings(command, "blocked_keys") == []
    calls.enqueue_many(2, "mail", key="order:7")

    [finding] = findings(command, "blocked_keys")
    assert f"ordering key order:7: 2 wait behind dead letter {event_id} of mail" in finding["what"]
    command("dead", "replay", event_id, "--generation", 0, "--yes")
    assert findings(command, "blocked_keys", wrong=False) == []


def test_key_whose_head_is_parked(command, calls):
    event_id = calls.insert(ordering_key="order:8", parked=True, next_run_at="now", created_at="now")

    [finding] = findings(command, "blocked_keys")
    assert f"its first event {event_id} is parked behind nothing" in finding["what"]


def test_lapsed_lease(command, calls):
    calls.enqueue("mail")
    calls.claim("mail", worker="dead-worker")
    assert findings(command, "leases", wrong=False) == []
    calls.conn.execute("update pulse.outbox set lease_until = lease_until - interval '10 minutes'")

    [finding] = findings(command, "leases")
    assert "1 leases of worker dead-worker lapsed 9 minutes ago" in finding["what"]


def test_alerts_owed(command, calls):
    bury(calls, "mail", "Boom", 2)
    [finding] = findings(command, "alerts")

    assert finding["what"].startswith("2 dead letters are not alerted yet, the oldest for ")
    calls.conn.execute("update pulse.outbox set alerted_at = clock_timestamp()")
    assert findings(command, "alerts") == []


def test_a_session_of_another_database_holds_nothing_back(command, dsn, calls, monkeypatch):
    """What dies here, vacuum removes all the same: nobody should be told to end that session."""
    monkeypatch.setattr(server, "LONG_TRANSACTION", timedelta(0))
    with psycopg.connect(make_conninfo(dsn, dbname="postgres")) as elsewhere:
        elsewhere.execute("set transaction isolation level repeatable read")
        elsewhere.execute("select pg_current_xact_id()")
        named = f"session {elsewhere.info.backend_pid} "

        assert not any(named in one["what"] for one in findings(command, "vacuum", "--dsn", dsn, wrong=False))


def test_session_that_holds_vacuum_back(command, dsn, calls, connect, monkeypatch):
    """With the right to see it, by name; without, that something can't be seen."""
    monkeypatch.setattr(server, "LONG_TRANSACTION", timedelta(0))
    monkeypatch.setattr(server, "LONG_SNAPSHOT", 2**31)
    holder = connect(application_name="report of last year")
    holder.execute("set transaction isolation level repeatable read")
    holder.execute("select count(*) from pulse.outbox")
    pid = holder.info.backend_pid

    named = [one for one in findings(command, "vacuum", "--dsn", dsn) if f"session {pid} " in one["what"]]
    hidden = findings(command, "vacuum", wrong=False)
    holder.rollback()

    assert [one["remedy"].partition(", or ")[2] for one in named] == [f"select pg_terminate_backend({pid});"]
    assert "report of last year" in named[0]["what"]
    assert any("hidden from this one" in one["what"] and one["severity"] == "info" for one in hidden)
    assert any("grant pg_read_all_stats to" in one["remedy"] for one in hidden)


def test_where_dead_rows_pile_up_a_short_transaction_is_long(command, dsn, calls, connect, monkeypatch):
    """Who comes to see why the table grows wants to know whose fault it is now, not in five minutes."""
    monkeypatch.setattr(server, "BRIEF_TRANSACTION", timedelta(0))
    holder = connect()
    holder.execute("set transaction isolation level repeatable read")
    holder.execute("select count(*) from pulse.outbox")
    session = f"session {holder.info.backend_pid} "

    before = findings(command, "vacuum", "--dsn", dsn, wrong=False)
    monkeypatch.setattr(server, "VACUUM_LAG", -1)
    after = findings(command, "vacuum", "--dsn", dsn)
    holder.rollback()

    assert not any(session in one["what"] for one in before)
    assert any(session in one["what"] for one in after)


def test_old_snapshot_is_named_even_when_its_time_is_hidden(command, calls, connect, monkeypatch):
    monkeypatch.setattr(server, "LONG_SNAPSHOT", -1)
    holder = connect()
    holder.execute("set transaction isolation level repeatable read")
    holder.execute("select count(*) from pulse.outbox")
    found = findings(command, "vacuum")
    holder.rollback()

    assert any("state hidden) has held its transaction open for" in one["what"] for one in found)


@pytest.mark.parametrize(
    ("setting", "severity"),
    [("synchronous_commit = off", "warning"), ("default_transaction_isolation = serializable", "warning")],
)
def test_setting_that_hurts(command, calls, setting, severity):
    name = calls.conn.info.dbname
    calls.conn.execute(f'alter database "{name}" set {setting}')
    found = [one for one in findings(command, "settings") if one["what"].startswith(setting.split()[0])]

    assert [one["severity"] for one in found] == [severity]
    assert f"alter system set {setting.split()[0]} = " in found[0]["remedy"]


def test_autovacuum_switched_off_for_the_table(command, calls):
    calls.conn.execute("alter table pulse.outbox set (autovacuum_enabled = false)")
    found = [one for one in findings(command, "settings") if one["severity"] == "error"]

    assert [one["remedy"] for one in found] == ["alter table pulse.outbox reset (autovacuum_enabled);"]
    calls.conn.execute(found[0]["remedy"])
    assert [one for one in findings(command, "settings", wrong=False) if one["severity"] == "error"] == []


def test_dead_rows_that_autovacuum_has_not_removed(command, calls, monkeypatch):
    monkeypatch.setattr(server, "VACUUM_LAG", 0)
    bury(calls, "mail", "Boom", 100)
    calls.conn.execute("update pulse.outbox set priority = 1")
    if calls.conn.info.server_version >= 150000:
        calls.conn.execute("select pg_stat_force_next_flush()")
        calls.conn.execute("select 1")

        [finding] = findings(command, "autovacuum")
        assert "100 dead rows beside 100 living ones; last vacuumed never" in finding["what"]


def test_roles_that_are_missing(command, calls, monkeypatch):
    monkeypatch.setattr(schema, "ROLES", ("producer", "dispatcher", "operator", "auditor"))
    [finding] = findings(command, "roles")

    assert finding["remedy"] == "create role pulse_auditor nologin; select pulse.outbox_grant();"


def test_clock_of_this_machine(command, monkeypatch):
    """Only to be told: jobs run by the database's clock."""
    monkeypatch.setattr(server, "CLOCK_TOLERANCE", timedelta(seconds=-1))
    [finding] = findings(command, "clock", wrong=False)

    assert finding["severity"] == "info"
    assert command("doctor").code == 0


def test_hostile_names_command_nothing(command, calls):
    bury(calls, HOSTILE, HOSTILE.replace("\n", ""), 1)
    calls.enqueue_many(2, HOSTILE, key=HOSTILE)
    calls.seen(HOSTILE, [], p_lease=seconds(0))
    calls.call("outbox_pause", HOSTILE, HOSTILE, HOSTILE)
    result = command("doctor")

    assert result.code == 1
    assert not {"\x1b", "\u202e"} & set(result.out)
    assert len(command("doctor", "--json").json["findings"]) > 3


def test_missing_right_is_said_and_not_fatal(command, dsn, calls, operator):
    """Whoever may use the schema and read only a part of it still gets the rest."""
    calls.conn.execute("create role watcher login")
    calls.conn.execute(
        "grant usage on schema pulse to watcher; grant select on pulse.migration, pulse.dispatcher to watcher"
    )
    try:
        result = command("doctor", "--json", "--dsn", make_conninfo(dsn, user="watcher"))
    finally:
        calls.conn.execute("drop owned by watcher; drop role watcher")

    unseen = [
        one["check"] for one in result.json["findings"] if one["what"].startswith("could not be checked")
    ]
    assert {"topics", "dead", "leases", "alerts"} <= set(unseen)
    assert all("pulse_operator" in one["remedy"] for one in result.json["findings"] if one["check"] in unseen)
    assert "Traceback" not in result.err


def test_output_fits_the_terminal(command, calls, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    bury(calls, "mail", "Boom", 12)
    calls.enqueue_many(3, "fax")

    lines = command("doctor").out.splitlines()
    assert max(map(len, lines)) <= 80


def test_unreachable_database_is_one_line(command):
    result = command("doctor", "--dsn", "host=127.0.0.1 port=1 dbname=x")

    assert (result.code, result.err.count("\n")) == (1, 1)
    with pytest.raises(psycopg.OperationalError):  # the control: there is none
        psycopg.connect("host=127.0.0.1 port=1 dbname=x")
