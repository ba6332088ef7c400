"""The server under test: one fresh, durable PostgreSQL, and a new database for each run."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.machine import cpu_seconds
from pulse_outbox import embedded

SETTINGS = {
    # A server's, not a laptop's: neither memory nor checkpoints are what is measured here.
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    # See `_fill_log`.
    "min_wal_size": "4GB",
    "max_connections": "200",
    # Beside a run nothing of an earlier one is to be written.
    "checkpoint_timeout": "30min",
}
LOG_MEGABYTES = 2000
STATED = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "autovacuum", *SETTINGS)


@dataclass(slots=True)
class Series:
    """What an observer saw of a database over time: seconds, dead rows, bytes of tables and indexes."""

    times: list[float] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, list[float] | list[int]]:
        return {"times": self.times, "dead": self.dead, "size": self.size}


class Postgres:
    """A started server."""

    def __init__(self, extra: dict[str, str] | None = None, *, durable: bool = True) -> None:
        self._server = embedded.start(durable=durable, settings=SETTINGS | (extra or {}))
        self._numbers = itertools.count(1)
        self.dsn = self._server.dsn
        self._fill_log()

    def close(self) -> None:
        self._server.stop()

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the server: backends, writers, vacuum, the ended ones included."""
        return cpu_seconds(self._server.pid)

    def _fill_log(self) -> None:
        """Makes the files of the write-ahead log, which a server that has been up for a while uses again and again.

        A new one writes zeros to each of them and flushes them, 16 MB at a time, while everybody waits. That is no
        property of a queue, and it would cost the fastest most.
        """
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            for _ in range(LOG_MEGABYTES // 100):
                conn.execute(
                    "select pg_logical_emit_message(false, 'bench', repeat('x', 1000000)) from generate_series(1, 100)"
                )
            conn.execute("checkpoint")

    def settings(self) -> dict[str, str]:
        with psycopg.connect(self.dsn) as conn:
            return {
                name: conn.execute("select current_setting(%s)", [name]).fetchall()[0][0] for name in STATED
            }

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """A new database, dropped at the end. What was written before is on disk when it is given out."""
        name = f"bench_{next(self._numbers)}"
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            yield self._server.dsn_of(name)
        finally:
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def settle(self, dsn: str) -> None:
        """Leaves nothing to be done in the background: statistics are there and what was loaded is written."""
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("vacuum analyze")
            conn.execute("checkpoint")


@contextlib.contextmanager
def observed(dsn: str, every: float = 0.5) -> Iterator[Series]:
    """Looks at the database's tables from time to time."""
    series = Series()
    over = threading.Event()
    began = time.monotonic()

    def look() -> None:
        with psycopg.connect(dsn, autocommit=True, application_name="bench observer") as conn:
            while not over.is_set():
                [(dead, size)] = conn.execute(
                    "select coalesce(sum(n_dead_tup), 0)::bigint, "
                    "coalesce(sum(pg_total_relation_size(relid)), 0)::bigint from pg_stat_user_tables"
                ).fetchall()
                series.times.append(round(time.monotonic() - began, 3))
                series.dead.append(dead)
                series.size.append(size)
                over.wait(every)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield series
    finally:
        over.set()
        thread.join(10)


@contextlib.contextmanager
def vacuum_held_back(dsn: str) -> Iterator[None]:
    """Another session with an open transaction and a snapshot: nothing that dies from now on can be removed."""
    with psycopg.connect(dsn, application_name="bench holder") as conn:
        conn.execute("set transaction isolation level repeatable read")
        conn.execute("select count(*) from pg_class")
        yield
        conn.rollback()


def rows(dsn: str, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """One query on a connection of its own, committed."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        cursor = conn.execute(query, values or None)
        return list(cursor.fetchall()) if cursor.description else []


def wal_position(dsn: str) -> int:
    """How many bytes of write-ahead log this server has written."""
    [(position,)] = rows(dsn, "select (pg_current_wal_insert_lsn() - '0/0')::bigint")
    return int(position)
