from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from pulse_outbox import embedded, schema
from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night
from tests.support.command import running
from tests.support.waiting import wait_until

QUICK = ("--lease", "3", "--heartbeat", "1", "--watchdog", "1", "--poll", "1")
APPLICATION = """
from pulse_outbox import Event, Outbox
outbox = Outbox()

@outbox.handler("mail.send")
async def send(event: Event[dict]) -> None: ...
"""


@pytest.fixture
def primary() -> Iterator[embedded.Server]:
    with embedded.start() as server:
        schema.migrate(server.dsn)
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute("create role ada login in role pulse_operator")
        yield server


@pytest.fixture
def standby(primary: embedded.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[embedded.Server]:
    """A synchronous standby, made from a base backup: a commit is answered when it is on both servers."""
    directory = primary.socket_directory.parent / "standby"
    subprocess.run(
        [
            primary.bin_directory / "pg_basebackup",
            "-R",
            "-c",
            "fast",
            "-D",
            directory / "data",
            "-d",
            primary.dsn,
        ],
        check=True,
        capture_output=True,
    )
    owner = primary.data_directory.stat()
    for path in (directory, *directory.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    with (
        embedded.start(directory=directory) as server,
        psycopg.connect(primary.dsn, autocommit=True) as conn,
    ):
        conn.execute("alter system set synchronous_standby_names = '*'")
        conn.execute("select pg_reload_conf()")
        wait_until(
            lambda: conn.execute("select sync_state from pg_stat_replication").fetchall() == [("sync",)]
        )
        yield server


@pytest.fixture
def logins(primary: embedded.Server) -> dict[str, str]:
    return logins_of(primary)


def logins_of(server: embedded.Server) -> dict[str, str]:
    return {"operator": make_conninfo(server.dsn, user="ada"), "superuser": server.dsn}


def produce(dsn: str, acknowledged: list[uuid.UUID]) -> None:
    """One event after the other until the server is gone; those that it has answered for are noted."""
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn, autocommit=True) as conn:
        while True:
            acknowledged += conn.execute("select pulse.outbox_enqueue('mail.send', '{}')").fetchone() or ()


@follows("database-failover", "role", "promote", "pause-all", "resume-all", "outcome")
def test_promote_the_standby(
    shift: Shift, night: Night, primary: embedded.Server, standby: embedded.Server, tmp_path: Path
):
    """A dispatcher whose DSN names both servers goes on with the new primary, and nothing is lost.

    That is: every event whose enqueue was answered is there and runs, although the primary was killed in mid stream.
    """
    (tmp_path / "shop.py").write_text(APPLICATION)
    both = make_conninfo(
        primary.dsn,
        host=f"{primary.socket_directory},{standby.socket_directory}",
        port="5432,5432",
        target_session_attrs="read-write",
    )
    with running(tmp_path, "shop:outbox", *QUICK, dsn=both):
        before = night.enqueue("mail.send")
        wait_until(lambda: night.status(before) == "COMPLETED", within=30)
        assert " f " in shift.run("role")
        acknowledged: list[uuid.UUID] = []
        producers = [
            threading.Thread(target=produce, args=(primary.dsn, acknowledged), daemon=True) for _ in range(3)
        ]
        for producer in producers:
            producer.start()
        wait_until(lambda: len(acknowledged) > 300, what="300 events enqueued")
        primary.crash()
        for producer in producers:
            producer.join(10)
        shift.moves_to(**logins_of(standby))
        assert " t " in shift.run("role")

        shift.run("promote")
        assert " f " in shift.run("role")
        with psycopg.connect(standby.dsn, autocommit=True, row_factory=dict_row) as conn:
            after = Night(conn, None)
            assert after.status(before) == "COMPLETED"
            there = {row["event_id"] for row in after.ask("select event_id from pulse.outbox")}
            assert set(acknowledged) <= there, "all of them, the last one too"
            wait_until(lambda: after.count(status="COMPLETED") == len(there), within=30)
            shift.run("pause-all")
            event_id = after.enqueue("mail.send")
            wait_until(
                lambda: after.one(
                    """select count(*) from pulse.dispatcher d join pulse.outbox o on d.last_seen_at > o.created_at
                        where o.event_id = %s""",
                    event_id,
                ),
                within=30,
            )
            assert after.one("select paused_by from pulse.pause") == "ada"
            assert after.status(event_id) == "PENDING"
            shift.run("resume-all")
            wait_until(lambda: after.status(event_id) == "COMPLETED", within=30)
            shown = shift.run("outcome")

    assert shown.split("\n")[2].split("|")[1].strip() == "1"
