"""`pulse-outbox bench` leaves numbers, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psycopg
import pytest

COMMAND = [sys.executable, "-m", "pulse_outbox.cli", "bench", "--events", "300"]


@pytest.fixture
def environment(empty_dsn):
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PULSE_OUTBOX_")}
    return mine | {"PULSE_OUTBOX_DSN": empty_dsn}


def left_behind(dsn, schema):
    """What there is of the schema and its roles: other tests of this server have roles of their own."""
    with psycopg.connect(dsn) as conn:
        return conn.execute(
            "select nspname from pg_namespace where nspname = %(schema)s "
            "union all select rolname from pg_roles where starts_with(rolname, %(schema)s)",
            {"schema": schema},
        ).fetchall()


def schema_in(line):
    return line.split("schema ")[1].split(",")[0]


def test_measures_and_leaves_nothing(environment, empty_dsn):
    done = subprocess.run(
        [*COMMAND, "--json"], env=environment, capture_output=True, text=True, timeout=50, check=False
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["events"] == 300
    rates = ("enqueue_rate", "bulk_rate", "drain_rate", "enqueue_p50_ms", "latency_p99_ms")
    assert all(found[name] > 0 for name in rates)
    assert not left_behind(empty_dsn, schema_in(done.stderr))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_it_cleans_up(environment, empty_dsn, number):
    """It runs on somebody's own database: what it made there must go, however it ends."""
    process = subprocess.Popen(
        COMMAND, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    with process, process.stderr as lines:
        schema = schema_in(lines.readline())
        before = left_behind(empty_dsn, schema)
        process.send_signal(number)
        rest = lines.read()

    assert before
    # Python itself ends by SIGINT when it was interrupted in the middle of an import; a shell calls both 130.
    assert process.returncode in (130, -signal.SIGINT), rest
    assert not left_behind(empty_dsn, schema)


def test_without_the_right_to_create_a_schema_it_says_so(environment, empty_dsn):
    """One line with the remedy, not a traceback."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("create role bench_nobody login")
        try:
            done = subprocess.run(
                [*COMMAND, "--dsn", psycopg.conninfo.make_conninfo(empty_dsn, user="bench_nobody")],
                env=environment,
                capture_output=True,
                text=True,
                timeout=50,
                check=False,
            )
        finally:
            conn.execute("drop role bench_nobody")

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "create" in done.stderr
