"""Enqueue: writes events on the application's own psycopg connection, inside its own transaction.

Nothing here commits, rolls back or opens a transaction. The first half knows the SQL and its values; the second half
knows psycopg. Another driver needs a second half of its own and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row
from psycopg.types.json import Jsonb

from pulse_outbox.errors import UNMIGRATED_SQLSTATES, EnqueueError, from_database_error
from pulse_outbox.events import NewEvent, as_timedelta, encode_headers, encode_payload, uuid7
from pulse_outbox.trace import add_trace, current_trace_headers

if TYPE_CHECKING:
    from collections.abc import Iterator


# What is written


class EncodedEvent(NamedTuple):
    """A new event that has been found fit to be written: the values of `enqueue_statement`, in its order.

    A tuple because bulk enqueue makes a hundred thousand of them a second.
    """

    topic: str
    payload: str
    idempotency_key: str | None
    ordering_key: str | None
    headers: str
    priority: int
    run_at: datetime | None
    delay: timedelta | None
    max_attempts: int | None
    generation: int
    source: str | None
    target: str | None
    event_id: UUID
    dead_key: str


def encode_event(
    event: NewEvent,
    max_payload_bytes: int,
    make_id: Callable[[], UUID] = uuid7,
    trace: Mapping[str, str] | None = None,
) -> EncodedEvent:
    """Encodes one event; raises EnqueueError without having touched the database.

    *trace*: the headers of the active span, where the caller has asked already.
    """
    headers = encode_headers(event.headers, max_payload_bytes)
    return EncodedEvent(
        event.topic,
        encode_payload(event.payload, max_payload_bytes),
        event.idempotency_key,
        event.ordering_key,
        add_trace(event.headers, headers, current_trace_headers() if trace is None else trace),
        event.priority,
        event.run_at,
        None if event.delay is None else as_timedelta("delay", event.delay),
        event.max_attempts,
        event.generation,
        event.source,
        event.target,
        event.event_id or make_id(),
        event.dead_key,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Many encoded events, and whether COPY can write them."""

    events: Sequence[EncodedEvent]
    may_exist: bool
    """A key or id was given: some may be there already, which COPY can't find out."""


def encode_events(events: Iterable[NewEvent], max_payload_bytes: int) -> Batch:
    """Encodes all or, if one of them is bad, none; the complaint says which."""
    encoded = []
    may_exist = False
    trace = current_trace_headers()
    for index, event in enumerate(events):
        if not isinstance(event, NewEvent):
            raise EnqueueError(f"events[{index}]: a NewEvent is needed, not {type(event).__qualname__}")
        try:
            encoded.append(encode_event(event, max_payload_bytes, trace=trace))
        except EnqueueError as error:
            raise EnqueueError(f"events[{index}]: {error}") from error
        may_exist = may_exist or event.idempotency_key is not None or event.event_id is not None
    return Batch(events=encoded, may_exist=may_exist)


@lru_cache(maxsize=16)
def enqueue_statement(schema: str) -> sql.Composed:
    """Calls `outbox_enqueue` once; its values are an EncodedEvent."""
    return sql.SQL(
        "select {}.outbox_enqueue("
        "%s::text, %s::jsonb, %s::text, %s::text, %s::jsonb, %s::smallint, "
        # A delay counts on the database's clock, not on the producer's.
        "coalesce(%s::timestamptz, clock_timestamp() + %s::interval), "
        "%s::integer, %s::bigint, %s::text, %s::text, %s::uuid, %s::text)"
    ).format(sql.Identifier(schema))


@lru_cache(maxsize=16)
def enqueue_many_statement(schema: str) -> sql.Composed:
    """Calls `outbox_enqueue` for each element of the arrays that `enqueue_many_values` makes, in their order."""
    return sql.SQL(
        "select {}.outbox_enqueue("
        "e.topic, e.payload::jsonb, e.idempotency_key, e.ordering_key, e.headers::jsonb, e.priority, "
        "coalesce(e.run_at, clock_timestamp() + e.delay), "
        "e.max_attempts, e.generation, e.source, e.target, e.event_id, e.dead_key) "
        "from unnest("
        "%s::text[], %s::text[], %s::text[], %s::text[], %s::text[], %s::smallint[], "
        "%s::timestamptz[], %s::interval[], "
        "%s::integer[], %s::bigint[], %s::text[], %s::text[], %s::uuid[], %s::text[]) "
        "with ordinality as e (topic, payload, idempotency_key, ordering_key, headers, priority, run_at, delay, "
        "max_attempts, generation, source, target, event_id, dead_key, place) "
        "order by e.place"
    ).format(sql.Identifier(schema))


def enqueue_many_values(events: Sequence[EncodedEvent]) -> list[list[object]]:
    """The values of `enqueue_many_statement`: an array for each parameter."""
    return [list(column) for column in zip(*events, strict=True)]


# Exactly the columns that a producer may insert into. next_run_at stands last because it may be left out.
_COPY_COLUMNS = (
    ("event_id", "uuid"),
    ("topic", "text"),
    ("payload", "jsonb"),
    ("headers", "jsonb"),
    ("source", "text"),
    ("target", "text"),
    ("idempotency_key", "text"),
    ("ordering_key", "text"),
    ("priority", "int2"),
    ("generation", "int8"),
    ("producer_max_attempts", "int4"),
    ("holds_key", "bool"),
    ("parked", "bool"),
    ("next_run_at", "timestamptz"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """A COPY of many events; `timed` ones need the database's time for their next_run_at."""

    events: Sequence[EncodedEvent]
    timed: bool

    @property
    def types(self) -> list[str]:
        return [kind for _, kind in self._columns]

    @property
    def _columns(self) -> Sequence[tuple[str, str]]:
        # Left out, the column's default says now; COPY can't say that for some rows only.
        return _COPY_COLUMNS if self.timed else _COPY_COLUMNS[:-1]

    def statement(self, schema: str) -> sql.Composed:
        return sql.SQL("copy {}.outbox ({}) from stdin (format binary)").format(
            sql.Identifier(schema), sql.SQL(", ").join(sql.Identifier(name) for name, _ in self._columns)
        )

    def rows(self, now: datetime | None) -> Iterator[tuple[object, ...]]:
        """The rows to copy; *now* is the database's time, given if the plan is timed."""
        keys: set[str] = set()
        for event in self.events:
            # Within the batch, a later event of a key waits for the earlier ones.
            parked = event.ordering_key in keys
            if event.ordering_key is not None:
                keys.add(event.ordering_key)
            row = (
                event.event_id,
                event.topic,
                Jsonb(event.payload, _as_it_is),
                Jsonb(event.headers, _as_it_is),
                event.source,
                event.target,
                str(event.event_id),
                event.ordering_key,
                event.priority,
                event.generation,
                event.max_attempts,
                event.dead_key == "hold",
                parked,
            )
            yield row if now is None else (*row, _next_run_at(event, now))

    def topics(self) -> list[str]:
        return sorted({event.topic for event in self.events})


def plan_copy(events: Sequence[EncodedEvent]) -> CopyPlan:
    """How to COPY these events."""
    timed = any(event.run_at is not None or event.delay is not None for event in events)
    return CopyPlan(events=events, timed=timed)


def _next_run_at(event: EncodedEvent, now: datetime) -> datetime:
    if event.delay is not None:
        return now + event.delay
    return now if event.run_at is None else max(event.run_at, now)


def _as_it_is(text: str) -> str:
    return text


@lru_cache(maxsize=16)
def _wake_statement(schema: str) -> sql.Composed:
    return sql.SQL("select {}.outbox_wake(%s::text[])").format(sql.Identifier(schema))


# Read as a number: an application may have its own loader for timestamps.
_NOW = sql.SQL("select extract(epoch from clock_timestamp())::double precision")


def _time_of(row: tuple[Any, ...] | None) -> datetime:
    assert row is not None
    return datetime.fromtimestamp(row[0], UTC)


# How psycopg writes it


def enqueue(
    connection: psycopg.Connection[Any], schema: str, event: EncodedEvent, *, outside_transaction: bool
) -> UUID:
    """Writes one event; returns its id, or that of the event that is already there."""
    _check_kind(connection, psycopg.Connection)
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        with connection.pipeline():
            pass  # leaving the inner one waits for what was sent: until then the connection looks busy
    _check_state(connection, outside_transaction)
    with _database_errors(schema):
        cursor = psycopg.Cursor(connection, row_factory=tuple_row)
        return _one_id(cursor.execute(enqueue_statement(schema), event).fetchone())


async def enqueue_async(
    connection: psycopg.AsyncConnection[Any], schema: str, event: EncodedEvent, *, outside_transaction: bool
) -> UUID:
    """The same on an asynchronous connection."""
    _check_kind(connection, psycopg.AsyncConnection)
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        async with connection.pipeline():
            pass
    _check_state(connection, outside_transaction)
    with _database_errors(schema):
        cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
        await cursor.execute(enqueue_statement(schema), event)
        return _one_id(await cursor.fetchone())


def enqueue_many(
    connection: psycopg.Connection[Any],
    schema: str,
    batch: Batch,
    *,
    outside_transaction: bool,
) -> list[UUID]:
    """Writes many events, by COPY where that is possible; returns their ids in the given order."""
    _check_kind(connection, psycopg.Connection)
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        with connection.pipeline():
            pass
    _check_state(connection, outside_transaction)
    if not batch.events:
        return []
    with _database_errors(schema):
        cursor = psycopg.Cursor(connection, row_factory=tuple_row)
        if batch.may_exist or not _copy_works(connection):
            cursor.execute(enqueue_many_statement(schema), enqueue_many_values(batch.events))
            return [_one_id(row) for row in cursor.fetchall()]
        plan = plan_copy(batch.events)
        now = _time_of(cursor.execute(_NOW).fetchone()) if plan.timed else None
        with cursor.copy(plan.statement(schema)) as copy:
            copy.set_types(plan.types)
            for row in plan.rows(now):
                copy.write_row(row)
        cursor.execute(_wake_statement(schema), [plan.topics()])
    return [event.event_id for event in batch.events]


async def enqueue_many_async(
    connection: psycopg.AsyncConnection[Any],
    schema: str,
    batch: Batch,
    *,
    outside_transaction: bool,
) -> list[UUID]:
    """The same on an asynchronous connection."""
    _check_kind(connection, psycopg.AsyncConnection)
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        async with connection.pipeline():
            pass
    _check_state(connection, outside_transaction)
    if not batch.events:
        return []
    with _database_errors(schema):
        cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
        if batch.may_exist or not _copy_works(connection):
            await cursor.execute(enqueue_many_statement(schema), enqueue_many_values(batch.events))
            return [_one_id(row) for row in await cursor.fetchall()]
        plan = plan_copy(batch.events)
        now = None
        if plan.timed:
            await cursor.execute(_NOW)
            now = _time_of(await cursor.fetchone())
        async with cursor.copy(plan.statement(schema)) as copy:
            copy.set_types(plan.types)
            for row in plan.rows(now):
                await copy.write_row(row)
        await cursor.execute(_wake_statement(schema), [plan.topics()])
    return [event.event_id for event in batch.events]


Connection = psycopg.Connection[Any] | psycopg.AsyncConnection[Any]


def _check_kind(connection: object, wanted: type[Connection]) -> None:
    if isinstance(connection, wanted):
        return
    if isinstance(connection, psycopg.AsyncConnection):
        raise EnqueueError("this is an asynchronous connection: await enqueue_async or enqueue_many_async")
    if isinstance(connection, psycopg.Connection):
        raise EnqueueError("this is a synchronous connection: call enqueue or enqueue_many")
    raise EnqueueError(
        f"a psycopg {wanted.__name__} is needed, not {type(connection).__module__}."
        f"{type(connection).__qualname__}: pass the connection whose transaction the event belongs to"
    )


def _check_state(connection: Connection, outside_transaction: bool) -> None:
    """Refuses a connection on which the event could not become part of the caller's transaction."""
    status = connection.info.transaction_status
    if connection.closed or status == TransactionStatus.UNKNOWN:
        raise EnqueueError("the connection is closed: enqueue before closing it, inside the transaction")
    if status == TransactionStatus.INERROR:
        raise EnqueueError(
            "the connection's transaction has failed, so nothing more can be written in it: "
            "roll back and start again"
        )
    if status == TransactionStatus.ACTIVE:
        raise EnqueueError(
            "the connection is in the middle of a COPY or another statement: finish that first"
        )
    if status == TransactionStatus.IDLE and connection.autocommit and not outside_transaction:
        raise EnqueueError(
            "the connection is in autocommit and no transaction is open, so the event would not commit together "
            "with your data: use `with conn.transaction():`, or say outside_transaction=True if that is meant"
        )


def _copy_works(connection: Connection) -> bool:
    # COPY is not possible in pipeline mode, and psycopg writes JSON as UTF-8 whatever the connection's encoding.
    return connection.pgconn.pipeline_status == PipelineStatus.OFF and connection.info.encoding == "utf-8"


@contextmanager
def _database_errors(schema: str) -> Iterator[None]:
    """Explains the errors that have to do with us; any other error reaches the caller as it is."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate in UNMIGRATED_SQLSTATES:
            raise EnqueueError(
                f"this database has no outbox in schema {schema!r}, or an old one: run `pulse-outbox migrate`"
            ) from error
        if error.sqlstate == "42501":
            raise EnqueueError(
                f"this database user may not enqueue: `grant {schema}_producer to …` lets it"
            ) from error
        if ours := from_database_error(error):
            raise ours from error
        raise


def _one_id(row: tuple[Any, ...] | None) -> UUID:
    assert row is not None
    # An application may have its own loader for uuid.
    return row[0] if isinstance(row[0], UUID) else UUID(str(row[0]))
