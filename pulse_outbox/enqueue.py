"""Enqueue: writes events on the application's own connection, inside its own transaction.

Nothing here commits, rolls back or opens a transaction. The first half knows the SQL and its values; the second half
sends it by whatever library the connection comes from, which `pulse_outbox.connections` finds out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache, partial
from typing import Any, NamedTuple
from uuid import UUID

from pulse_outbox.connections import Ask, Errand, Row, raise_explained
from pulse_outbox.errors import EnqueueError
from pulse_outbox.events import (
    MAX_TOPIC_CHARACTERS,
    NewEvent,
    as_timedelta,
    check_text,
    encode_headers,
    encode_json,
    uuid7,
)
from pulse_outbox.trace import add_trace, current_trace_headers

STATEMENT_CHARACTERS = 16 * 1024 * 1024
"""How much JSON one statement gets of many events that can't go by COPY, unless a single one is larger."""

# What is written


class EncodedEvent(NamedTuple):
    """A new event that has been found fit to be written: the fields of NewEvent, in its order.

    A tuple for the same reason.
    """

    topic: str
    payload: bytes
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
    event_id: UUID | None
    dead_key: str


# What an event has of which nothing was given but topic and payload.
NOTHING_MORE = EncodedEvent("", b"", None, None, "{}", 0, None, None, None, 0, None, None, None, "hold")


# Their own way of making one takes twice as long.
as_encoded: Callable[[tuple[Any, ...]], EncodedEvent] = partial(tuple.__new__, EncodedEvent)


def encode_plain(topic: str, payload: object, max_payload_bytes: int) -> EncodedEvent:
    """Encodes an event that has a topic and a payload only, in half the time that encode_event takes."""
    check_text("topic", topic, MAX_TOPIC_CHARACTERS)
    encoded = encode_json("payload", payload, max_payload_bytes)
    event = as_encoded((topic, encoded, *NOTHING_MORE[2:]))
    trace = current_trace_headers()
    return event._replace(headers=add_trace(None, "{}", trace)) if trace else event


def encode_event(
    event: NewEvent,
    max_payload_bytes: int,
    trace: Mapping[str, str] | None = None,
) -> EncodedEvent:
    """Encodes one event; raises EnqueueError without having touched the database.

    *trace*: the headers of the active span, where the caller has asked already.
    """
    (
        topic, payload, idempotency_key, ordering_key, headers, priority, run_at, delay, max_attempts, generation,
        source, target, event_id, dead_key,
    ) = event  # fmt: skip
    if trace is None:
        trace = current_trace_headers()
    encoded_headers = encode_headers(headers, max_payload_bytes) if headers else "{}"
    if trace:
        encoded_headers = add_trace(headers, encoded_headers, trace)
    if delay is not None:
        delay = as_timedelta("delay", delay)
    encoded = encode_json("payload", payload, max_payload_bytes)
    return as_encoded((
        topic, encoded, idempotency_key, ordering_key, encoded_headers, priority, run_at, delay, max_attempts,
        generation, source, target, event_id, dead_key,
    ))  # fmt: skip


def statement_of(event: EncodedEvent, new_id: UUID, schema: str) -> tuple[bytes, Sequence[object]]:
    """What writes one event on a connection that takes Python's own values, and these values.

    Its row is what the event's id turns out to be, or nothing: then it is *new_id*.
    """
    if event[2:] == NOTHING_MORE[2:]:
        return insert_statement(schema), (new_id, event.topic, event.payload.decode())
    given: dict[str, object] = {
        name: value
        for name, value, default in zip(EncodedEvent._fields, event, NOTHING_MORE, strict=True)
        if value != default
    }
    given["payload"] = event.payload.decode()
    given.setdefault("event_id", new_id)
    return enqueue_statement(schema, tuple(given)), tuple(given.values())


@lru_cache(maxsize=16)
def insert_statement(schema: str) -> bytes:
    """Does what `outbox_enqueue` would do for an event that can't be there already and waits for nothing.

    Most events are such, and calling the function costs the server a quarter more.
    """
    return (
        f'insert into "{schema}".outbox (event_id, topic, payload, idempotency_key) '  # noqa: S608  checked by the Outbox
        "values ($1::uuid, $2::text, $3::jsonb, $1::uuid::text) "
        f'returning case when exists (select 1 from "{schema}".dispatcher d where d.sleeping '
        "and $2::text operator(pg_catalog.=) any (d.topics)) "
        f'then "{schema}".outbox_wake(array[$2::text]) end'
    ).encode()


@lru_cache(maxsize=256)
def enqueue_statement(schema: str, given: Sequence[str]) -> bytes:
    """Calls `outbox_enqueue` with the fields that are given: each null that is not sent saves two microseconds."""
    arguments = ", ".join(_ARGUMENTS[name].format(f"${place}") for place, name in enumerate(given, 1))
    return f'select "{schema}".outbox_enqueue({arguments})'.encode()


_ARGUMENTS = {
    "topic": "p_topic => {}::text",
    "payload": "p_payload => {}::jsonb",
    "idempotency_key": "p_idempotency_key => {}::text",
    "ordering_key": "p_ordering_key => {}::text",
    "headers": "p_headers => {}::jsonb",
    "priority": "p_priority => {}::smallint",
    "run_at": "p_run_at => {}::timestamptz",
    # A delay counts on the database's clock, not on the producer's.
    "delay": "p_run_at => pg_catalog.clock_timestamp() operator(pg_catalog.+) {}::interval",
    "max_attempts": "p_max_attempts => {}::integer",
    "generation": "p_generation => {}::bigint",
    "source": "p_source => {}::text",
    "target": "p_target => {}::text",
    "event_id": "p_event_id => {}::uuid",
    "dead_key": "p_dead_key => {}::text",
}


_FIELDS = (
    "topic text, payload jsonb, idempotency_key text, ordering_key text, headers jsonb, priority smallint, "
    "run_at timestamptz, delay double precision, max_attempts integer, generation bigint, source text, target text, "
    "event_id uuid, dead_key text"
)


@lru_cache(maxsize=16)
def enqueue_each_statement(schema: str) -> str:
    """Calls `outbox_enqueue` for each event of one JSON text, in their order; returns the ids as text.

    A single parameter, and that a text: no adapter or codec of the application changes what is written.
    """
    names = ", ".join(field.split()[0] for field in _FIELDS.split(", "))
    return (
        f'select cast("{schema}".outbox_enqueue('  # noqa: S608  the schema's name was checked by the Outbox
        # A JSON null comes out of the record as no value at all.
        "e.topic, coalesce(e.payload, 'null'), e.idempotency_key, e.ordering_key, e.headers, e.priority, "
        "coalesce(e.run_at, "
        "pg_catalog.clock_timestamp() operator(pg_catalog.+) pg_catalog.make_interval(secs => e.delay)), "
        "e.max_attempts, e.generation, e.source, e.target, e.event_id, e.dead_key) as text) "
        f"from rows from (pg_catalog.json_to_recordset(cast(cast($1 as text) as json)) as ({_FIELDS})) "
        f"with ordinality as e ({names}, place) order by e.place"
    )


def as_json(events: Iterable[EncodedEvent]) -> str:
    """The parameter of `enqueue_each_statement`."""
    return f"[{', '.join(map(_event_as_json, events))}]"


def in_statements(events: Iterable[EncodedEvent]) -> Iterator[str]:
    """The same for several statements, one after the other: PostgreSQL takes no value of a gigabyte."""
    part: list[str] = []
    size = 0
    for text in map(_event_as_json, events):
        if part and size + len(text) > STATEMENT_CHARACTERS:
            yield f"[{', '.join(part)}]"
            part, size = [], 0
        part.append(text)
        size += len(text)
    yield f"[{', '.join(part)}]"


def _event_as_json(event: EncodedEvent) -> str:
    fields = event._asdict()
    del fields["payload"], fields["headers"]  # JSON already
    fields["event_id"] = str(event.event_id or uuid7())
    fields["run_at"] = event.run_at and event.run_at.isoformat()
    fields["delay"] = None if event.delay is None else event.delay.total_seconds()
    given = json.dumps({name: value for name, value in fields.items() if value is not None})
    return f'{given[:-1]}, "headers": {event.headers}, "payload": {event.payload.decode()}}}'


# Writing it

ENQUEUE = Errand(
    complaint=EnqueueError,
    sync_call="enqueue or enqueue_many",
    async_call="enqueue_async or enqueue_many_async",
    written="event",
    beside="data",
    optional=True,
    unmigrated=(EnqueueError, "this database has no outbox in schema {schema!r}, or an old one"),
    forbidden="this database user may not enqueue: `grant {schema}_producer to …` lets it",
)


def enqueue(connection: object, schema: str, event: EncodedEvent, *, outside_transaction: bool) -> UUID:
    """Writes one event; returns its id, or that of the event that is already there."""
    route = ENQUEUE.sync_route(connection, outside=outside_transaction)
    try:
        if route.call is not None:
            new_id = uuid7()
            row = route.call(*statement_of(event, new_id, schema))
            return id_of(row) if row[0] else new_id
        return id_of(*route.ask(Ask(enqueue_each_statement(schema), (as_json([event]),))))
    except Exception as error:
        raise_explained(error, ENQUEUE.explained(error, schema))


async def enqueue_async(
    connection: object, schema: str, event: EncodedEvent, *, outside_transaction: bool
) -> UUID:
    """The same on an asynchronous connection."""
    route = await ENQUEUE.async_route(connection, outside=outside_transaction)
    try:
        if route.call is not None:
            new_id = uuid7()
            row = await route.call(*statement_of(event, new_id, schema))
            return id_of(row) if row[0] else new_id
        return id_of(*await route.ask(Ask(enqueue_each_statement(schema), (as_json([event]),))))
    except Exception as error:
        raise_explained(error, ENQUEUE.explained(error, schema))


def id_of(row: Row) -> UUID:
    # An application may have its own loader for uuid.
    return row[0] if isinstance(row[0], UUID) else UUID(str(row[0]))
