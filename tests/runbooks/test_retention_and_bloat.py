from __future__ import annotations

import psycopg
from psycopg.conninfo import make_conninfo

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night


def old_and_new(night: Night) -> None:
    for days in (100, 10, 1):
        night.ago(days=days)
        night.enqueue_many(4, "mail.send")
        night.work("mail.send")
        night.die("invoice.send", 2)
    night.ago()


@follows("retention-and-bloat", "size", "ages", "prune", "outcome")
def test_prune_what_is_done(shift: Shift, night: Night):
    old_and_new(night)
    shift.run("size")
    assert "COMPLETED" in shift.run("ages")

    assert "pruned 8 events" in shift.run("prune")
    assert night.count(status="COMPLETED") == 4
    assert night.count(status="DEAD_LETTERED") == 6
    shift.run("outcome")


@follows("retention-and-bloat", "prune-sh")
def test_prune_in_a_shell(shift: Shift, night: Night):
    old_and_new(night)
    shift.run("prune-sh")

    assert night.count(status="COMPLETED") == 4
    assert night.count(status="DEAD_LETTERED") == 6


@follows("retention-and-bloat", "count-dead", "prune-dead")
def test_prune_dead_letters_when_asked(shift: Shift, night: Night):
    old_and_new(night)

    assert " 2\n" in shift.run("count-dead")
    shift.run("prune-dead")
    assert night.count(status="DEAD_LETTERED") == 4


@follows("retention-and-bloat", "holders", "vacuum", "reindex", "invalid")
def test_clean_up(shift: Shift, night: Night, logins: dict[str, str]):
    old_and_new(night)
    before = night.one("select pg_relation_filenode('pulse.outbox_due')")
    with psycopg.connect(make_conninfo(logins["operator"], application_name="report")) as conn:
        conn.execute("set transaction isolation level repeatable read")
        conn.execute("select 1 from pulse.outbox")
        assert str(conn.info.backend_pid) in shift.run("holders")

    shift.run("vacuum", "reindex")
    assert night.one("select pg_relation_filenode('pulse.outbox_due')") != before
    assert "(0 rows)" in shift.run("invalid")
    assert (
        night.one("select vacuum_count from pg_stat_all_tables where relid = 'pulse.outbox'::regclass") == 1
    )


@follows("retention-and-bloat", "count-handled", "prune-handled", "prune-handled-sh")
def test_forget_what_handlers_did(shift: Shift, night: Night):
    """What an event needs that may still run is kept, whatever its age."""
    night.conn.execute(
        """insert into pulse.event_handled
           select 'handler', n::text, clock_timestamp() - n * interval '1 day' from generate_series(110, 510, 50) n"""
    )
    night.ago(days=470)
    [dead] = night.die("mail.send")
    night.ago()
    left = "select count(*) from pulse.event_handled"

    assert " 3\n" in shift.run("count-handled")
    assert "pruned 1 records" in shift.run("prune-handled")
    assert night.one(left) == 8
    night.discard(dead)
    shift.run("prune-handled-sh")
    assert night.one(left) == 6
