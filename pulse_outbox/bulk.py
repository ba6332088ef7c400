"""Many events at once: encoded and checked in parts, column by column, and written by COPY where that is possible.

All are checked before any SQL. Or, if the caller asks for a stream, only the first: the server then writes these while
the others are taken from the caller, under a savepoint, so that what is found later still refuses all and the caller's
transaction stays usable.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, NamedTuple
from uuid import UUID

from pulse_outbox.connections import Ask, Copy, Steps
from pulse_outbox.connections.copying import (
    END,
    NO_ROW,
    SIGNATURE,
    Field,
    bool_field,
    int2_field,
    int4_field,
    int8_field,
    jsonb_column,
    jsonb_field,
    rows_in_binary,
    shared,
    text_field,
    time_field,
    uuid_columns,
)
from pulse_outbox.enqueue import (
    ENQUEUE,
    NOTHING_MORE,
    EncodedEvent,
    as_encoded,
    as_json,
    encode_event,
    enqueue_each_statement,
    id_of,
    in_statements,
)
from pulse_outbox.errors import EnqueueError
from pulse_outbox.events import NewEvent, encode_flat, is_flat, uuid7, uuids
from pulse_outbox.trace import add_trace, current_trace_headers

FIRST_CHECKED = 200
"""How many events of a stream are checked before any SQL at least: so few gain less than the savepoint takes."""
PART = 100
"""How many events are encoded and sent at a time. The server works on one part while the next is made."""

# What is written


class Part(NamedTuple):
    """Some encoded events, column by column: a look at a whole column takes a fraction of one at each value."""

    number: int
    of: Mapping[str, Sequence[Any]]
    """The fields of EncodedEvent."""
    given: frozenset[str]
    """Those fields that are not at their default in every event."""

    @property
    def may_exist(self) -> bool:
        """A key or id was given: some may be there already, which COPY can't find out."""
        return not self.given.isdisjoint(("idempotency_key", "event_id"))

    @property
    def events(self) -> Iterator[EncodedEvent]:
        return map(as_encoded, zip(*self.of.values(), strict=True))


class Batch:
    """Many events, encoded; of a stream the first are, and the later ones when they are asked for."""

    def __init__(self, parts: Iterator[Part], *, stream: bool) -> None:
        self.first: list[Part] = []
        self.is_whole = True
        """There are no later ones."""
        self._later = parts
        self._trouble: BaseException | None = None
        number = 0
        for part in parts:
            self.first.append(part)
            number += part.number
            if stream and number > FIRST_CHECKED:
                self.is_whole = False
                break

    def take_all(self) -> None:
        """Encodes the later ones now: for a way of writing that could not be undone."""
        self.first += self._later
        self.is_whole = True

    def next(self) -> Part | None:
        """The next of the later ones. None at their end and where they fail, which `raise_trouble` tells apart.

        Asked for inside a COPY: if that was broken off, every driver would have its own way of taking it.
        """
        try:
            return next(self._later, None)
        except BaseException as error:
            self._trouble = error
            return None

    @property
    def has_trouble(self) -> bool:
        """Whether the later ones have failed."""
        return self._trouble is not None

    def raise_trouble(self) -> None:
        trouble, self._trouble = self._trouble, None
        try:
            if trouble is not None:
                raise trouble
        finally:
            del trouble  # whose traceback has this frame


def encode_events(events: Iterable[NewEvent], max_payload_bytes: int, *, stream: bool = False) -> Batch:
    """Encodes all, or the first of a stream; a complaint says which of them is bad."""
    return Batch(_encode_parts(events, max_payload_bytes, current_trace_headers()), stream=stream)


def _encode_parts(
    events: Iterable[NewEvent], max_payload_bytes: int, trace: Mapping[str, str]
) -> Iterator[Part]:
    stay = isinstance(events, list | tuple)
    untaken = iter(events if stay else _as_they_are(events, max_payload_bytes, trace))
    place = 0
    while some := [*islice(untaken, PART)]:
        of = _encode_alike(some, max_payload_bytes, trace)
        if of is None:
            of = _encode_each(some, place, max_payload_bytes, trace)
        given = frozenset(name for name, default in _DEFAULTS if of[name].count(default) < len(some))
        yield Part(len(some), of, given)
        place += len(some)


def _as_they_are(
    events: Iterable[NewEvent], max_payload_bytes: int, trace: Mapping[str, str]
) -> Iterator[NewEvent | EncodedEvent]:
    """Events that can't change any more: a generator may use an object again for its next event.

    Of a flat payload a copy is enough, and is encoded later, with others. All else is encoded at once.
    """
    for place, event in enumerate(events):
        if type(event) is not NewEvent:
            yield event  # which will be refused
        elif event[4] is None and is_flat(event[1]):
            yield _as_new((event[0], event[1].copy(), *event[2:]))
        else:
            yield _encode_one(event, place, max_payload_bytes, trace)


_as_new: Callable[[tuple[Any, ...]], NewEvent] = partial(tuple.__new__, NewEvent)


def _encode_alike(
    events: Sequence[NewEvent | EncodedEvent], max_payload_bytes: int, trace: Mapping[str, str]
) -> dict[str, Sequence[Any]] | None:
    """The columns of events like most: nothing but payloads has to be encoded, and these are flat. None of others."""
    if not _NEW_EVENT.issuperset(map(type, events)):
        return None
    of: dict[str, Sequence[Any]] = dict(zip(NewEvent._fields, zip(*events, strict=True), strict=True))
    if of["headers"].count(None) < len(events) or of["delay"].count(None) < len(events):
        return None
    payloads = encode_flat(of["payload"], max_payload_bytes)
    if payloads is None:
        return None
    of["payload"] = payloads
    of["headers"] = [add_trace(None, "{}", trace)] * len(events)
    return of


def _encode_one(
    event: NewEvent, place: int, max_payload_bytes: int, trace: Mapping[str, str]
) -> EncodedEvent:
    try:
        if not isinstance(event, NewEvent):
            raise EnqueueError(f"a NewEvent is needed, not {type(event).__qualname__}")
        return encode_event(event, max_payload_bytes, trace)
    except EnqueueError as error:
        raise EnqueueError(f"events[{place}]: {error}") from error


def _encode_each(
    events: Sequence[NewEvent | EncodedEvent], place: int, max_payload_bytes: int, trace: Mapping[str, str]
) -> dict[str, Sequence[Any]]:
    """The columns of any events; *place* is that of the first one in the batch."""
    encoded = [
        event if isinstance(event, EncodedEvent) else _encode_one(event, number, max_payload_bytes, trace)
        for number, event in enumerate(events, place)
    ]
    return dict(zip(EncodedEvent._fields, zip(*encoded, strict=True), strict=True))


_NEW_EVENT = frozenset({NewEvent})
_DEFAULTS = [*zip(EncodedEvent._fields, NOTHING_MORE, strict=True)][2:]


# As rows


class Copying:
    """A batch on its way into one COPY after the other, mostly a single one."""

    def __init__(self, batch: Batch, schema: str) -> None:
        self._batch = batch
        self._schema = schema
        self._parts = deque(batch.first)
        self._given = frozenset[str]().union(*(part.given for part in batch.first))
        self._keys: set[str | None] = {None}
        self.topics: set[str] = set()
        self.ids: list[UUID] = []
        self.now: datetime | None = None
        """The database's time, needed before the next COPY if that is `timed`."""

    @property
    def timed(self) -> bool:
        return not self._given.isdisjoint(("run_at", "delay"))

    def next_copy(self) -> Copy:
        """A COPY of all that is left, or as far as its columns suffice.

        A column that would hold its default in every row is left out: most are, mostly.
        """
        columns = [column for column, (name, _) in _OPTIONAL.items() if name in self._given]
        if "ordering_key" in self._given:
            columns.append("parked")
        if self.timed:
            # Left out, the column's default says now; COPY can't say that for some rows only.
            columns.append("next_run_at")
        needed = ["event_id", "idempotency_key", "topic", "payload"]
        rows = self._in_binary(columns)
        return Copy(self._schema, "outbox", needed + columns, rows, is_stream=not self._batch.is_whole)

    def _in_binary(self, columns: Sequence[str]) -> Iterator[bytes]:
        yield SIGNATURE
        while self._parts:
            yield self._rows(self._parts.popleft(), columns)
        while (part := self._batch.next()) is not None:
            if part.may_exist or not part.given <= self._given:
                self._parts.append(part)
                break
            yield self._rows(part, columns)
        # Where it fails, the server has to refuse the COPY: if it was ended well and then nothing came to take it back
        # (a task can be cancelled twice), half a batch could be committed.
        yield NO_ROW if self._batch.has_trouble else END

    def left(self) -> Part | None:
        """Where the next COPY has to begin, which then has the columns for it; None if all is written."""
        self._batch.raise_trouble()
        if not self._parts:
            return None
        self._given |= self._parts[0].given
        return self._parts[0]

    def left_events(self) -> Iterator[EncodedEvent]:
        """All that is left, to be written in another way."""
        while self._parts:
            yield from self._parts.popleft().events
        while (part := self._batch.next()) is not None:
            yield from part.events
        self._batch.raise_trouble()

    def _rows(self, part: Part, columns: Sequence[str]) -> bytes:
        numbers = uuid7.numbers(part.number)
        self.ids += uuids(numbers)
        self.topics.update(part.of["topic"])
        values = [
            *uuid_columns(numbers),
            shared(text_field, part.of["topic"]),
            jsonb_column(part.of["payload"]),
        ]
        for column in columns:
            if column == "parked":
                values.append(map(bool_field, self._waits(part.of["ordering_key"])))
            elif column == "next_run_at":
                values.append(
                    shared(time_field, [*map(self._next_run_at, part.of["run_at"], part.of["delay"])])
                )
            else:
                name, field = _OPTIONAL[column]
                values.append(shared(field, part.of[name]))
        return rows_in_binary(values, part.number)

    def _waits(self, keys: Sequence[str | None]) -> Iterator[bool]:
        """Within the batch, a later event of a key waits for the earlier ones."""
        for key in keys:
            yield key is not None and key in self._keys
            self._keys.add(key)

    def _next_run_at(self, run_at: datetime | None, delay: timedelta | None) -> datetime:
        assert self.now is not None
        if delay is not None:
            return self.now + delay
        # In UTC: of an hour that comes twice, both would be the same to whoever looks for equal times.
        return self.now if run_at is None else max(run_at.astimezone(UTC), self.now)


def _hold_field(dead_key: str) -> bytes:
    return bool_field(dead_key == "hold")


# Column, field, format.
_OPTIONAL: dict[str, tuple[str, Field]] = {
    "headers": ("headers", jsonb_field),
    "source": ("source", text_field),
    "target": ("target", text_field),
    "ordering_key": ("ordering_key", text_field),
    "priority": ("priority", int2_field),
    "generation": ("generation", int8_field),
    "producer_max_attempts": ("max_attempts", int4_field),
    "holds_key": ("dead_key", _hold_field),
}


# Writing it

# Read as a number: an application may have its own loader for timestamps.
_NOW = "select cast(extract(epoch from pg_catalog.clock_timestamp()) as double precision)"
# An application's own savepoint of this name would only be hidden until ours is released.
_SAVEPOINT = "pulse_outbox_enqueue_many"


def enqueue_many(connection: object, schema: str, batch: Batch, *, outside_transaction: bool) -> list[UUID]:
    """Writes many events, by COPY where that is possible; returns their ids in the given order."""
    return ENQUEUE.run(
        connection,
        schema,
        lambda route: _write(batch, schema, route.copies, alone=outside_transaction),
        outside=outside_transaction,
    )


async def enqueue_many_async(
    connection: object, schema: str, batch: Batch, *, outside_transaction: bool
) -> list[UUID]:
    """The same on an asynchronous connection."""
    return await ENQUEUE.run_async(
        connection,
        schema,
        lambda route: _write(batch, schema, route.copies, alone=outside_transaction),
        outside=outside_transaction,
    )


def _write(batch: Batch, schema: str, copies: Callable[[], bool], *, alone: bool) -> Steps[list[UUID]]:
    """*alone*: without a transaction around it, only one statement writes all or none, and nothing takes it back."""
    if not batch.first:
        return []
    can_copy = copies()
    if alone or not can_copy or _may_exist(batch):
        batch.take_all()
    if not can_copy or _may_exist(batch):
        events = chain.from_iterable(part.events for part in batch.first)
        return (yield from _call([as_json(events)] if alone else in_statements(events), schema))
    if batch.is_whole:
        return (yield from _copy(batch, schema))
    yield Ask(f"savepoint {_SAVEPOINT}", (), has_rows=False)
    try:
        ids = yield from _copy(batch, schema)
    except BaseException:
        with suppress(Exception):  # the connection is lost, and what was raised says why
            yield Ask(f"rollback to savepoint {_SAVEPOINT}", (), has_rows=False)
            yield Ask(f"release savepoint {_SAVEPOINT}", (), has_rows=False)
        raise
    yield Ask(f"release savepoint {_SAVEPOINT}", (), has_rows=False)
    return ids


def _may_exist(batch: Batch) -> bool:
    return any(part.may_exist for part in batch.first)


def _call(statements: Iterable[str], schema: str) -> Steps[list[UUID]]:
    """Calls `outbox_enqueue` for each event."""
    ids: list[UUID] = []
    for events in statements:
        rows = yield Ask(enqueue_each_statement(schema), (events,))
        ids += map(id_of, rows)
    return ids


@lru_cache(maxsize=16)
def wake_statement(schema: str) -> str:
    """Wakes who sleeps. While nobody does, the function is not even called."""
    return (
        f'select case when exists (select 1 from "{schema}".dispatcher d where d.sleeping) then '  # noqa: S608  checked by the Outbox
        f'"{schema}".outbox_wake(array(select pg_catalog.json_array_elements_text(cast(cast($1 as text) as json)))) end'
    )


def _copy(batch: Batch, schema: str) -> Steps[list[UUID]]:
    copying = Copying(batch, schema)
    while True:
        if copying.timed and copying.now is None:
            [row] = yield Ask(_NOW, ())
            copying.now = datetime.fromtimestamp(float(row[0]), UTC)
        try:
            yield copying.next_copy()
        except Exception:
            batch.raise_trouble()  # for which the server was made to refuse the COPY
            raise
        left = copying.left()
        if left is None or left.may_exist:
            break
    ids = copying.ids
    if left is not None:
        ids += yield from _call(in_statements(copying.left_events()), schema)
    yield Ask(wake_statement(schema), (json.dumps(sorted(copying.topics)),))
    return ids
