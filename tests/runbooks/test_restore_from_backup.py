from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night
from tests.support.testbed import Testbed

BEFORE = ("pause-all", "find-t", "may-run-twice", "free", "export", "discard-done", "lost")


@follows("restore-from-backup", *BEFORE, "pause-topic", "resume-all", "resume-topic", "outcome")
def test_back_to_an_earlier_time(
    shift: Shift, night: Night, logins: dict[str, str], testbed: Testbed, psql: Path, tmp_path: Path
):
    """With pg_dump and pg_restore: what was done since runs no second time, what came since is listed."""
    if not (psql.parent / "pg_dump").exists():
        pytest.skip("there is no pg_dump beside psql")
    done_before = night.enqueue("mail.send")
    night.work("mail.send")
    night.ago(minutes=2)
    running_at_t = night.enqueue("letter.print")
    night.claim("letter.print")
    night.ago()
    done_later = night.enqueue("mail.send")
    never_done = night.enqueue("invoice.send")
    [dead] = night.die("report.render")
    dump = tmp_path / "dump"
    subprocess.run([psql.parent / "pg_dump", "-Fc", "-f", dump, logins["superuser"]], check=True)
    t = datetime.now(UTC)

    # Life went on after the backup.
    night.work("mail.send")
    night.conn.execute(
        "update pulse.outbox set lease_until = clock_timestamp() + interval '1 day' where lease_until is not null"
    )
    [holder] = night.ask("select claim_token from pulse.outbox where event_id = %s", running_at_t)
    night.call("outbox_complete", [running_at_t], [holder["claim_token"]])
    lost = night.enqueue("mail.send")
    night.work("mail.send")

    old_dsn = logins["operator"]
    restored = str(conninfo_to_dict(logins["superuser"])["dbname"]) + "_restored"
    testbed.create(restored)
    owner = str(conninfo_to_dict(logins["owner"])["user"])
    night.conn.execute(
        sql.SQL("alter database {} owner to {}").format(sql.Identifier(restored), sql.Identifier(owner))
    )
    subprocess.run([psql.parent / "pg_restore", "-d", testbed.dsn_of(restored), dump], check=True)
    shift.moves_to(**{login: make_conninfo(dsn, dbname=restored) for login, dsn in logins.items()})
    shift.knows(t=t.isoformat(), old_dsn=old_dsn)

    with psycopg.connect(testbed.dsn_of(restored), autocommit=True, row_factory=dict_row) as conn:
        there = Night(conn, None)
        assert there.statuses(done_before, done_later, running_at_t) == ["COMPLETED", "PENDING", "RUNNING"]

        shift.run("pause-all")
        assert there.claim(["mail.send", "invoice.send"]) == [], "nobody gets anything"
        assert "RUNNING" not in shift.run("find-t")
        assert "letter.print" in shift.run("may-run-twice")
        assert " 1\n" in shift.run("free")
        assert there.status(running_at_t) == "PENDING"
        shift.run("export")
        assert " 2\n" in shift.run("discard-done")
        assert there.statuses(done_later, running_at_t) == ["DISCARDED", "DISCARDED"]
        assert there.last_cycle(done_later)["discarded_by"] == "ada"
        missing = shift.run("lost")
        assert "mail.send" in missing
        assert "(1 row)" in missing
        assert night.status(lost) == "COMPLETED"

        shift.knows(topic="invoice.send", reason="asking accounting")
        shift.run("pause-topic", "resume-all")
        assert there.claim(["mail.send", "invoice.send", "letter.print"]) == [], "all that is left is paused"
        shift.run("resume-topic")
        assert there.work("invoice.send") == [never_done]
        assert there.status(dead) == "DEAD_LETTERED"
        assert "letter.print" in shift.run("outcome")
