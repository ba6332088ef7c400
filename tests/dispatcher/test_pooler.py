"""PgBouncer in transaction mode: no prepared statements, no session state, a direct connection to listen on."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pulse_outbox import Event, NewEvent, Outbox
from pulse_outbox.embedded import _free_port
from tests.support.dispatching import Table, dispatching
from tests.support.waiting import wait_until

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
needs_pgbouncer = pytest.mark.skipif(
    not PGBOUNCER, reason="no pgbouncer here (Debian: apt-get install pgbouncer)"
)


@pytest.fixture
def pooled_dsn(dsn: str, tmp_path: Path) -> Iterator[str]:
    """The test's database through a pool of four connections that any transaction may get."""
    assert PGBOUNCER
    target = conninfo_to_dict(dsn)
    port = _free_port()
    # Readable for the user that pgbouncer becomes: it refuses to run as root.
    directory = Path(
        subprocess.check_output(["mktemp", "-d", "/tmp/pulse-bouncer-XXXXXX"], text=True).strip()
    )
    directory.chmod(0o755)
    (directory / "users.txt").write_text('"postgres" ""\n')
    (directory / "pgbouncer.ini").write_text(
        f"""
[databases]
pooled = host={target["host"]} port={target["port"]} dbname={target["dbname"]} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
auth_file = {directory}/users.txt
pool_mode = transaction
default_pool_size = 4
ignore_startup_parameters = extra_float_digits
"""
    )
    as_user = ["-u", "postgres"] if os.geteuid() == 0 else []
    process = subprocess.Popen(
        [PGBOUNCER, *as_user, str(directory / "pgbouncer.ini")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pooled = f"host=127.0.0.1 port={port} dbname=pooled user=postgres"

    def answers() -> bool:
        try:
            with psycopg.connect(pooled):
                return True
        except psycopg.OperationalError:
            return False

    try:
        wait_until(answers)
        yield pooled
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(directory)


@needs_pgbouncer
@pytest.mark.parametrize("listening", ["directly", "not at all"])
async def test_behind_a_pooler(dsn, pooled_dsn: str, outbox: Outbox, table: Table, listening: str):
    """FAULTS 21: claims, results, heartbeats, transactional handlers; through connections that are nobody's own."""
    await table.execute("create table public.effect (event_id uuid)")

    @outbox.handler("job")
    async def job(event: Event) -> None:
        await asyncio.sleep(0.001)

    @outbox.handler("long")
    async def long(event: Event) -> None:
        await asyncio.sleep(2)

    @outbox.handler("transactional", transactional=True)
    async def transactional(event: Event) -> None:
        await event.connection.execute("insert into public.effect values (%s)", (event.id,))

    settings = {"listen_dsn": dsn} if listening == "directly" else {"notify": False}
    async with dispatching(outbox, pooled_dsn, **settings) as dispatcher:
        await table.enqueue(outbox, "long")
        await table.enqueue_many(
            outbox, [NewEvent(topic, {}) for topic in ("job", "transactional") for _ in range(200)]
        )
        await table.until("status = 'COMPLETED'", 401)
        assert dispatcher._is_ready() == []

    assert await table.count("attempts <> 1 or lapses <> 0") == 0
    assert (await table.execute("select count(*) from public.effect"))[0][0] == 200
