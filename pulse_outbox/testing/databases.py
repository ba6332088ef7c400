"""Databases for tests: one server for a whole run, a migrated template, and a copy of it for each test."""

from __future__ import annotations

import itertools
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pulse_outbox import embedded
from pulse_outbox import schema as migrations
from pulse_outbox.errors import SettingsError

_numbers = itertools.count(1)  # of this process, which may share a prefix with itself

Prepare = Callable[[str], None]
"""Gets the DSN of the template once in a run and puts the application's own tables into it."""


@contextmanager
def serving(dsn: str | None = None, *, schema: str = "pulse") -> Iterator[Databases]:
    """Databases on the server behind *dsn* or PULSE_OUTBOX_TEST_DSN, else on an embedded one until the context ends.

    The user of a given server must be allowed to create databases. Those made here are dropped at the end.
    """
    dsn = dsn or os.environ.get("PULSE_OUTBOX_TEST_DSN")
    if not dsn:
        with embedded.start() as server, serving(server.dsn, schema=schema) as databases:
            yield databases
        return
    databases = Databases(dsn, f"pulse_test_{secrets.token_hex(4)}", schema=schema)
    try:
        yield databases
    finally:
        databases.drop_all()


class Databases:
    """Makes databases on one server. Their names share a prefix, so that the end of the run finds them.

    Processes that are given the same *server_dsn* and *prefix* (xdist's workers) share the template.
    """

    __test__ = False  # not a test class, whatever name it is imported under

    def __init__(self, server_dsn: str, prefix: str, *, schema: str = "pulse") -> None:
        self.server_dsn = server_dsn
        self.prefix = prefix
        self.schema = schema
        self._ready: set[str] = set()

    def dsn_of(self, database: str) -> str:
        """A libpq URI, which SQLAlchemy, asyncpg and others read too."""
        return as_uri(make_conninfo(self.server_dsn, dbname=database))

    def django_settings(self) -> dict[str, str]:
        """The server as the settings of a Django database name it: HOST, PORT, USER, PASSWORD."""
        given = conninfo_to_dict(self.server_dsn)
        return {name.upper(): str(given.get(name) or "") for name in ("host", "port", "user", "password")}

    @contextmanager
    def database(self, *, migrated: bool = True, prepare: Prepare | None = None) -> Iterator[str]:
        """A database of its own; the DSN. Without *migrated* it is empty."""
        template = self.template(prepare) if migrated else "template1"
        name = f"{self.prefix}_{os.getpid()}_{next(_numbers)}"
        self.create(name, template)
        try:
            yield self.dsn_of(name)
        finally:
            self._drop(name)

    def template(self, prepare: Prepare | None = None) -> str:
        """The migrated database, with what *prepare* adds, that others are copies of; whoever comes first makes it."""
        name = f"{self.prefix}_template{_number_of(prepare)}"
        if name not in self._ready:
            with self._administration() as conn:
                conn.execute("select pg_advisory_lock(hashtextextended(%s, 0))", (name,))
                if not conn.execute("select from pg_database where datname = %s", (name,)).fetchall():
                    self._build(conn, name, prepare)
            self._ready.add(name)
        return name

    def _build(self, conn: psycopg.Connection[Any], name: str, prepare: Prepare | None) -> None:
        unfinished = f"{name}_unfinished"  # what has the template's name is complete
        self._drop(unfinished)
        self.create(unfinished)
        dsn = self.dsn_of(unfinished)
        migrations.migrate(dsn, schema=self.schema)
        if prepare is not None:
            prepare(dsn)
        # A connection that the application left open, in a pool for one, would be in the way of every copy.
        conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (unfinished,)
        )
        conn.execute(
            sql.SQL("alter database {} rename to {}").format(sql.Identifier(unfinished), sql.Identifier(name))
        )

    def create(self, name: str, template: str = "template1") -> None:
        """A database that stays until the end of the run."""
        with self._administration() as conn:
            command = sql.SQL("create database {} template {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
            if conn.info.server_version >= 150000:
                # Five times as fast here as the default, which writes every page to the log.
                command += sql.SQL(" strategy file_copy")
            try:
                conn.execute(command)
            except psycopg.errors.InsufficientPrivilege as error:
                raise SettingsError(
                    f"the user {conn.info.user!r} of this server may not create databases: `alter role … createdb`, "
                    "or let the fixture outbox_dsn return a database of your own"
                ) from error

    def drop_all(self) -> None:
        """Drops every database that has been made under this prefix."""
        with self._administration() as conn:
            names = conn.execute(
                "select datname from pg_database where starts_with(datname, %s)", (self.prefix,)
            ).fetchall()
        for (name,) in names:
            self._drop(name)

    def _drop(self, name: str) -> None:
        with self._administration() as conn:
            conn.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _administration(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.server_dsn, autocommit=True)


def _number_of(prepare: Prepare | None) -> str:
    """Tells the functions of several conftest.py apart, alike in every worker."""
    if prepare is None:
        return ""
    code = getattr(prepare, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code else f"{type(prepare)!r}"
    return f"_{zlib.crc32(place.encode()):08x}"


def as_uri(dsn: str) -> str:
    """The same connection as a URI, the form that other libraries read as well."""
    values: dict[str, Any] = conninfo_to_dict(dsn)
    user = quote(values.pop("user", ""), safe="")
    password = values.pop("password", None)
    database = quote(values.pop("dbname", ""), safe="")
    host, place = str(values.get("host", "")), ""
    if host and not host.startswith("/") and "," not in host:
        place = f"[{host}]" if ":" in host else host
        del values["host"]
        if "port" in values:
            place += f":{values.pop('port')}"
    who = user if password is None else f"{user}:{quote(password, safe='')}"
    query = urlencode(values, quote_via=quote, safe="/")
    return f"postgresql://{who}{'@' if who else ''}{place}/{database}{'?' if query else ''}{query}"
