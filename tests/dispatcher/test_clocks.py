"""The database's clock rules: a worker whose own clock is wrong behaves like any other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from pulse_outbox import Event, Outbox, RetryLater
from tests.support.dispatching import Table, drain

FAKETIME = next(
    (path for path in Path("/usr/lib").glob("*/faketime/libfaketime.so.1")),
    None,
)
SCRIPT = """
import asyncio, sys
from datetime import datetime, timedelta, UTC
from pulse_outbox import Dispatcher, Outbox, RetryLater, RetryPolicy
outbox = Outbox()

@outbox.handler("job")
async def job(event): pass

@outbox.handler("fails", retry=RetryPolicy(max_attempts=2, base_delay=3, jitter="none"))
async def fails(event): raise ValueError

@outbox.handler("young")
async def young(event): raise RetryLater(60, max_age=300)

@outbox.handler("at")
async def at(event): raise RetryLater(event.created_at + timedelta(seconds=90))

print(datetime.now(UTC).isoformat())
Dispatcher(outbox, dsn=sys.argv[1], burst=True, lease=1.5, heartbeat=0.5, watchdog=0.5, poll=0.5).run()
"""


@pytest.mark.skipif(not FAKETIME, reason="no libfaketime here (Debian: apt-get install libfaketime)")
@pytest.mark.parametrize("offset", ["-10m", "+10m"])
def test_a_worker_whose_clock_is_ten_minutes_off(dsn, offset: str):
    """FAULTS 17: no effect on what is claimed, when it comes back, how old it is."""
    with psycopg.connect(dsn) as conn:
        for topic in ("job", "fails", "young", "at"):
            conn.execute("select pulse.outbox_enqueue(%s, '{}')", (topic,))
        conn.execute("select pulse.outbox_enqueue('job', '{}', p_run_at => now() + interval '5 minutes')")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, dsn],
        env={
            **os.environ,
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME": offset,
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        },
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with psycopg.connect(dsn) as conn:
        rows = conn.execute(
            "select topic, status::text, snoozes, extract(epoch from next_run_at - created_at)::float, "
            "extract(epoch from now() - %s::timestamptz)::float from pulse.outbox order by seq",
            (done.stdout.split()[0],),
        ).fetchall()

    assert abs(rows[0][4]) > 500, "control: the clock was off"
    by_topic = {row[0]: row for row in rows[:4]}
    assert rows[4][1] == "PENDING", "not due yet"
    assert by_topic["job"][1] == "COMPLETED"
    assert 3 <= by_topic["fails"][3] < 8
    assert by_topic["young"][1:3] == ("RETRYING", 1), "a young event, whatever the worker's clock says"
    assert 60 <= by_topic["young"][3] < 65
    assert by_topic["at"][1:3] == ("RETRYING", 1)
    assert 90 <= by_topic["at"][3] < 92


async def test_not_before_the_time_that_was_asked_for(dsn, outbox: Outbox, table: Table):
    """However long the claim took: what the process knows of the database's time is never ahead of it."""

    @outbox.handler("at")
    async def at(event: Event) -> None:
        raise RetryLater(event.created_at + timedelta(seconds=90))

    await table.execute(
        """
        create function public.slow() returns trigger language plpgsql as $$
        begin if new.status = 'RUNNING' then perform pg_sleep(0.5); end if; return new; end $$;
        create trigger slow before update on pulse.outbox for each row execute function public.slow();
        """
    )
    event_id = await table.enqueue(outbox, "at")
    await drain(outbox, dsn)
    row = await table.row(event_id)

    assert timedelta(seconds=90) <= row.next_run_at - row.created_at < timedelta(seconds=92)


def test_no_wall_clock_in_what_decides():
    """Whoever adds one has to say here why it decides nothing."""
    assert shutil.which("grep")
    found = subprocess.run(
        [
            "grep",
            "-rnE",
            r"datetime\.now|time\.time\(|utcnow",
            "pulse_outbox/dispatcher",
            "pulse_outbox/store.py",
        ],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()

    # care.py says in a log line from when on events were pruned.
    assert [line for line in found if "care.py" not in line] == []
