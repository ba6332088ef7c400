"""One PostgreSQL server for a whole test run, and databases cloned from a migrated template."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pulse_outbox import embedded, schema

# How pytest's controller tells xdist's workers.
SERVER = "PULSE_OUTBOX_TESTBED_SERVER"
PREFIX = "PULSE_OUTBOX_TESTBED_PREFIX"
BINARIES = "PULSE_OUTBOX_POSTGRES_BIN"


@contextmanager
def running() -> Iterator[Testbed]:
    """The run's server: the one of PULSE_OUTBOX_DSN, else an embedded one. Workers join their controller's."""
    if SERVER in os.environ:
        yield Testbed(os.environ[SERVER], os.environ[PREFIX])
        return
    given = os.environ.get("PULSE_OUTBOX_DSN")
    # What the developer's shell says must not change what is tested.
    for name in [name for name in os.environ if name.startswith("PULSE_OUTBOX_") and name != BINARIES]:
        del os.environ[name]
    if given:
        with _prepared(given) as testbed:
            yield testbed
        return
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]
    with embedded.start() as server, _prepared(server.dsn) as testbed:
        yield testbed


@contextmanager
def _prepared(server_dsn: str) -> Iterator[Testbed]:
    testbed = Testbed(server_dsn, f"pulse_test_{secrets.token_hex(4)}")
    os.environ[SERVER], os.environ[PREFIX] = testbed.server_dsn, testbed.prefix
    try:
        testbed.create(testbed.template)
        schema.migrate(testbed.dsn_of(testbed.template))
        yield testbed
    finally:
        del os.environ[SERVER], os.environ[PREFIX]
        testbed.drop_all()


class Testbed:
    """Makes databases on the run's server. Their names share a prefix, so that the end of the run finds them."""

    __test__ = False  # not a test class, whatever its name says to pytest

    def __init__(self, server_dsn: str, prefix: str) -> None:
        self.server_dsn = server_dsn
        self.prefix = prefix
        self.template = f"{prefix}_template"
        self._numbers = itertools.count(1)

    def dsn_of(self, database: str) -> str:
        return make_conninfo(self.server_dsn, dbname=database)

    @contextmanager
    def database(self, *, migrated: bool = True) -> Iterator[str]:
        """A database of its own; the DSN."""
        name = f"{self.prefix}_{os.getpid()}_{next(self._numbers)}"
        self.create(name, self.template if migrated else "template1")
        try:
            yield self.dsn_of(name)
        finally:
            self._drop(name)

    def create(self, name: str, template: str = "template1") -> None:
        with self._administration() as conn:
            command = sql.SQL("create database {} template {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
            if conn.info.server_version >= 150000:
                # Five times as fast here as the default, which writes every page to the log.
                command += sql.SQL(" strategy file_copy")
            conn.execute(command)

    def drop_all(self) -> None:
        with self._administration() as conn:
            names = conn.execute(
                "select datname from pg_database where starts_with(datname, %s)", (self.prefix,)
            ).fetchall()
        for (name,) in names:
            self._drop(name)

    def _drop(self, name: str) -> None:
        with self._administration() as conn:
            conn.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _administration(self) -> psycopg.Connection[tuple[str]]:
        return psycopg.connect(self.server_dsn, autocommit=True)


def die_with_parent() -> None:
    """End this process soon after the one that started it: nobody reads a worker's results then."""
    parent = os.getppid()

    def watch() -> None:
        while not over.wait(0.5):
            if os.getppid() != parent:
                os._exit(1)

    over = threading.Event()
    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()
