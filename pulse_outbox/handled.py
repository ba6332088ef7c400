"""Once only: a handler records in its own transaction that it has done its work for a key.

The record commits together with the work. A second run, after a crash between the two commits of handler and
dispatcher, finds it and leaves the work alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from pulse_outbox.errors import UNMIGRATED_SQLSTATES, SchemaError, SettingsError, TransactionNeeded
from pulse_outbox.events import check_text

MAX_NAME_CHARACTERS = 200


def first_time(connection: psycopg.Connection[Any], schema: str, name: str, key: str) -> bool:
    """Records the pair; False when it is there already.

    Waits for another transaction that has recorded the same and not ended: its rollback makes this the first.
    """
    _check_kind(connection, psycopg.Connection)
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        with connection.pipeline():
            pass  # leaving the inner one waits for what was sent: until then the connection looks busy
    _check_state(connection)
    _check_name(name)
    with _database_errors(schema):
        cursor = psycopg.Cursor(connection, row_factory=tuple_row)
        return cursor.execute(_statement(schema), (name, key)).fetchone() is not None


async def first_time_async(
    connection: psycopg.AsyncConnection[Any], schema: str, name: str, key: str
) -> bool:
    """The same on an asynchronous connection."""
    _check_kind(connection, psycopg.AsyncConnection)
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        async with connection.pipeline():
            pass
    _check_state(connection)
    _check_name(name)
    with _database_errors(schema):
        cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
        await cursor.execute(_statement(schema), (name, key))
        return await cursor.fetchone() is not None


@lru_cache(maxsize=16)
def _statement(schema: str) -> sql.Composed:
    return sql.SQL(
        "insert into {} (handler_name, idempotency_key) values (%s::text, %s::text) "
        "on conflict do nothing returning 1"
    ).format(sql.Identifier(schema, "event_handled"))


Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


def _check_kind(connection: object, wanted: type[Connection]) -> None:
    if isinstance(connection, wanted):
        return
    if isinstance(connection, psycopg.AsyncConnection):
        raise TransactionNeeded("this is an asynchronous connection: await first_time_async")
    if isinstance(connection, psycopg.Connection):
        raise TransactionNeeded("this is a synchronous connection: call first_time")
    raise TransactionNeeded(
        f"a psycopg {wanted.__name__} is needed, not {type(connection).__module__}."
        f"{type(connection).__qualname__}: pass the connection whose transaction does the work"
    )


def _check_state(connection: Connection) -> None:
    """Refuses a connection on which the record could not commit together with the work."""
    status = connection.info.transaction_status
    if connection.closed or status == TransactionStatus.UNKNOWN:
        raise TransactionNeeded("the connection is closed: ask inside the transaction that does the work")
    if status == TransactionStatus.INERROR:
        raise TransactionNeeded("the connection's transaction has failed: roll back and start again")
    if status == TransactionStatus.ACTIVE:
        raise TransactionNeeded(
            "the connection is in the middle of a COPY or another statement: finish that first"
        )
    if status == TransactionStatus.IDLE and connection.autocommit:
        raise TransactionNeeded(
            "the connection is in autocommit and no transaction is open, so the record would not commit together "
            "with your work: use `with conn.transaction():` around both"
        )


def _check_name(name: str) -> None:
    # Together with the longest key this is still an index entry that PostgreSQL takes.
    check_text("name", name, MAX_NAME_CHARACTERS, SettingsError)


@contextmanager
def _database_errors(schema: str) -> Iterator[None]:
    """Explains the errors that have to do with us; any other error reaches the caller as it is."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate in UNMIGRATED_SQLSTATES:
            raise SchemaError(
                f"this database has no {schema}.event_handled: run `pulse-outbox migrate`"
            ) from error
        if error.sqlstate == "42501":
            raise TransactionNeeded(
                f"this database user may not record what it has handled: `grant usage on schema {schema} to …; "
                f"grant insert on {schema}.event_handled to …` lets it"
            ) from error
        raise
