from __future__ import annotations

from pathlib import Path

import psycopg

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night
from tests.support.command import running
from tests.support.waiting import wait_until

LOOK = ("dispatchers", "running", "watchdog", "sessions")
QUICK = ("--lease", "3", "--heartbeat", "1", "--watchdog", "1", "--grace", "1")


def write_application(directory: Path) -> None:
    (directory / "stuck.py").write_text(
        """
import time
from pathlib import Path
from pulse_outbox import Event, Outbox
outbox = Outbox()

@outbox.handler("report.render")
def render(event: Event[dict]) -> None:
    if not Path("fixed").exists():
        time.sleep(600)
"""
    )


@follows("a-worker-is-stuck", *LOOK, "terminate", "kill", "outcome")
def test_a_handler_that_hangs(shift: Shift, night: Night, logins: dict[str, str], tmp_path: Path):
    """A real dispatcher, found by what the runbook shows, ended, and its job run by another."""
    write_application(tmp_path)
    event_id = night.enqueue("report.render")
    with running(tmp_path, "stuck:outbox", "--worker", "hangs", *QUICK, dsn=logins["superuser"]) as stuck:
        wait_until(lambda: night.status(event_id) == "RUNNING")
        wait_until(lambda: night.ask("select * from pulse.sweep"))
        assert "hangs" in shift.run("dispatchers")
        assert str(event_id) in shift.run("running")
        assert "(1 row)" in shift.run("watchdog")
        shift.run("sessions")
        pid = night.one("select pid from pulse.dispatcher_status where worker = 'hangs'")
        assert pid == stuck.process.pid
        shift.knows(pid=pid)
        shift.run("terminate")
        stuck.wait_for("outbox.stopping")
        shift.run("kill")
        stuck.ended()

    (tmp_path / "fixed").touch()
    with running(tmp_path, "stuck:outbox", *QUICK, dsn=logins["superuser"]):
        wait_until(lambda: night.status(event_id) == "COMPLETED", within=30)
        shown = shift.run("outcome")

    assert shown.split("\n")[2].split("|")[0].strip() == "0"


@follows("a-worker-is-stuck", "sessions", "terminate-session", "outcome")
def test_a_session_in_the_way(shift: Shift, night: Night, logins: dict[str, str]):
    """Somebody has locked a row by hand and gone to lunch."""
    event_id = night.enqueue("mail.send")
    with (
        psycopg.connect(logins["superuser"], application_name="lunch") as lunch,
        psycopg.connect(logins["operator"], application_name="waiter") as waiter,
    ):
        lunch.execute("select 1 from pulse.outbox where event_id = %s for update", (event_id,))
        waiting = waiter.pgconn
        waiting.send_query(f"select pulse.outbox_discard('{event_id}', 'why', 'ada')".encode())
        wait_until(lambda: night.one("select count(*) from pg_locks where not granted") > 0)
        assert str(lunch.info.backend_pid) in shift.run("sessions")
        shift.knows(pid=lunch.info.backend_pid)
        shift.run("terminate-session")
        waiting.get_result()
        waiter.pgconn.finish()
        shift.run("outcome")

        assert night.one("select count(*) from pg_stat_activity where application_name = 'lunch'") == 0
        lunch.close()
