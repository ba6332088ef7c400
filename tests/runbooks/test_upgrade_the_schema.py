from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pulse_outbox
from pulse_outbox import Event, Outbox, schema
from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night
from tests.support.command import running
from tests.support.dispatching import Table, dispatching
from tests.support.waiting import wait_until


@pytest.fixture
def behind(night: Night) -> Night:
    """The newest migration is missing: with one in all, that is a database without the schema."""
    night.conn.execute("drop schema pulse cascade")
    return night


@follows("upgrade-the-schema", "plan", "migrate", "check", "installed", "alive")
def test_apply_what_is_missing(shift: Shift, behind: Night):
    planned = shift.run("plan")
    assert "to be applied" in planned
    assert "Locks:" in planned

    shift.run("migrate")

    assert "current" in shift.run("check")
    assert "outbox" in shift.run("installed")
    behind.alive("shop-1", "mail.send")
    assert "0.1.0" in shift.run("alive")


@follows("upgrade-the-schema", "in-the-way", "plan")
def test_who_would_be_waited_for(shift: Shift, night: Night, logins: dict[str, str]):
    with (
        psycopg.connect(make_conninfo(logins["operator"], application_name="long report")) as conn,
        psycopg.connect(logins["owner"]) as other,
    ):
        conn.execute("select count(*) from pulse.outbox")
        other.execute("select count(*) from pulse.outbox")
        assert "long report" not in shift.run("in-the-way"), "it is not old"
        assert "to be applied" not in shift.run("plan")
        wait_until(lambda: "long report" in shift.run("in-the-way"), within=30)
        shown = shift.run("in-the-way")
        assert str(other.info.backend_pid) in shown, (
            "of another login the age is hidden, but not that it is there"
        )


NEWER = {
    "0002_note.sql": """\
-- A remark for whoever looks at an event.
--
-- Locks:    pulse.outbox, for a moment.
-- Deploy:   before the code.

alter table pulse.outbox add column note text;
comment on table pulse.outbox is 'One row is one job, with a note.';
insert into pulse.migration (version, name, oldest_code) values (2, 'note', '0.1.0');
""",
    "0003_find_notes.sql": """\
-- Finds events by their note.
--
-- Locks:    nothing that an event needs.
-- Deploy:   before or after the code.
-- transaction: none

drop index concurrently if exists pulse.outbox_note;
create index concurrently outbox_note on pulse.outbox (note) where note is not null;
insert into pulse.migration (version, name, oldest_code) values (3, 'find_notes', '0.1.0');
""",
}


@pytest.fixture
def newer_release(tmp_path: Path) -> Path:
    """This package as a later release would be: two more migrations, and nothing else changed."""
    root = Path(pulse_outbox.__file__).parent
    release = tmp_path / "newer"
    shutil.copytree(root, release / "pulse_outbox", ignore=shutil.ignore_patterns("__pycache__"))
    migrations = release / "pulse_outbox/migrations"
    if not migrations.exists():
        shutil.copytree(root.parent / "migrations", migrations)
    for name, text in NEWER.items():
        (migrations / name).write_text(text)
    (release / "jobs.py").write_text(
        "from pulse_outbox import Event, Outbox\n"
        "outbox = Outbox()\n"
        "@outbox.handler('mail.send')\n"
        "async def send(event: Event) -> None: ...\n"
    )
    return release


@follows("upgrade-the-schema", "installed", "plan", "in-the-way", "migrate", "check", "alive")
async def test_upgrade_while_dispatchers_work(
    shift: Shift, night: Night, logins: dict[str, str], newer_release: Path, monkeypatch: pytest.MonkeyPatch
):
    """The previous release goes on working before, during and after; the new one starts afterwards, and not before."""
    outbox = Outbox()

    @outbox.handler("mail.send")
    async def send(event: Event) -> None: ...

    # From here on the operator has the new release installed; this process is the previous one.
    monkeypatch.setenv("PYTHONPATH", str(newer_release))
    with running(newer_release, "jobs:outbox", "--burst", dsn=logins["dispatcher"]) as too_early:
        assert too_early.ended() == 1
    assert "schema pulse is at 1 and pulse-outbox 0.1.0 needs 3: run `pulse-outbox migrate`" in too_early.text

    table, done = Table(logins["superuser"]), asyncio.Event()

    async def one_more() -> None:
        event_id = await table.enqueue(outbox, "mail.send")
        await table.until(f"event_id = '{event_id}' and status = 'COMPLETED'", 1)

    async def produce() -> int:
        """One event after the other, each seen to its end, while the operator works."""
        number = 0
        while not done.is_set():
            await one_more()
            number += 1
        return number

    async with dispatching(outbox, logins["dispatcher"]):
        producing = asyncio.create_task(produce())
        planned = await asyncio.to_thread(shift.run, "installed", "plan")
        assert "0002_note  pending" in planned
        assert "0003_find_notes  pending" in planned
        assert "for a moment" in planned
        await asyncio.to_thread(shift.run, "in-the-way")
        before = await table.count("status = 'COMPLETED'")
        applied = await asyncio.to_thread(shift.run, "migrate")
        assert "0003_find_notes  applied" in applied
        assert "is at 3: current" in await asyncio.to_thread(shift.run, "check")
        assert "0.1.0" in await asyncio.to_thread(shift.run, "alive")
        await one_more()
        done.set()

        assert await producing > before
    schema.check(logins["operator"]).require_supported()  # the previous release's judgement
    await table.execute("select pulse.outbox_enqueue('mail.send', '{}')")
    with running(newer_release, "jobs:outbox", "--burst", dsn=logins["dispatcher"]) as upgraded:
        assert upgraded.ended() == 0, upgraded.text
    assert await table.count("status <> 'COMPLETED'") == 0
    [(valid,)] = await table.execute(
        "select indisvalid from pg_index where indexrelid = 'pulse.outbox_note'::regclass"
    )
    assert valid
    await table.close()
