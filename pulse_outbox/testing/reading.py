"""What a test may see of the outbox: its rows as typed values, and words for what was expected and is not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from uuid import UUID

from psycopg import sql
from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json, to_jsonable_python

from pulse_outbox.failures import FailureCycle, PayloadError, Verdict

if TYPE_CHECKING:
    from pulse_outbox.handlers import Handler
    from pulse_outbox.link import AnyLink

T = TypeVar("T")

Status = Literal["PENDING", "RUNNING", "COMPLETED", "RETRYING", "DEAD_LETTERED", "DISCARDED"]
_LINES_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent(Generic[T]):
    """A row of the outbox. The payload is of the handler's type, where the topic has a handler and it fits."""

    id: UUID
    topic: str
    payload: T
    headers: dict[str, Any]
    status: Status
    idempotency_key: str
    ordering_key: str | None
    priority: int
    generation: int
    attempts: int
    max_attempts: int | None
    """The producer's budget, or the one of the newest claim."""
    next_run_at: datetime
    created_at: datetime
    completed_at: datetime | None
    """Also when it died."""
    source: str | None
    target: str | None
    error: str | None
    verdict: Verdict | None
    """What was said of its newest failure, and by which rule."""
    history: tuple[FailureCycle, ...]
    """Cycles that ended in a dead letter and were replayed or discarded."""
    locked_by: str | None
    waits_for_key: bool


_COLUMNS = """\
o.event_id, o.topic, o.payload::text, o.headers::text, o.status::text, o.idempotency_key, o.ordering_key, o.priority,
o.generation, o.attempts, coalesce(o.producer_max_attempts, o.max_attempts), o.next_run_at, o.created_at,
o.completed_at,
o.source, o.target, o.last_error, o.last_failure::text, o.failure_history::text, o.locked_by, o.parked"""

# Rows of the open transaction: we see them, and the transaction that wrote them is in progress, so it is ours; its
# savepoints have numbers of their own. Written there as new, not changed there.
_OF_THIS_TRANSACTION = """
o.created_at >= transaction_timestamp()
and (select pg_xact_status((case when x.id > s.newest + 2147483648 then x.id - 4294967296 else x.id end)::text::xid8)
       from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as newest) as s
      cross join lateral (select (s.newest >> 32 << 32) | o.xmin::text::bigint as id) as x) = 'in progress'"""


async def read_events(
    link: AnyLink,
    schema: str,
    handlers: Mapping[str, Handler],
    *,
    condition: str = "true",
    values: Iterable[object] = (),
    this_transaction: bool = False,
    payload_type: Any = None,
) -> list[StoredEvent[Any]]:
    """The rows that fulfil the condition, in the order in which they were enqueued."""
    if this_transaction:
        condition = f"{condition} and {_OF_THIS_TRANSACTION}"
    query = sql.SQL("select {} from {} as o where {} order by o.seq").format(
        sql.SQL(_COLUMNS),
        sql.Identifier(schema, "outbox"),
        sql.SQL(condition),  # of our own making
    )
    rows = await link.rows(query.as_bytes(None), list(values))
    return [_stored(row, _decoder(row[1], handlers, payload_type)) for row in rows]


def _decoder(topic: str, handlers: Mapping[str, Handler], payload_type: Any) -> Callable[[str], Any]:
    if payload_type is not None:
        return TypeAdapter(payload_type).validate_json
    handler = handlers.get(topic)
    if handler is None:
        return from_json

    def decode(text: str) -> Any:
        try:
            return handler.decode(text)
        except PayloadError:
            return from_json(text)  # running it will tell

    return decode


def _stored(row: tuple[Any, ...], decode: Callable[[str], Any]) -> StoredEvent[Any]:
    failure = json.loads(row[17]) if row[17] else None
    return StoredEvent(
        id=row[0],
        topic=row[1],
        payload=decode(row[2]),
        headers=json.loads(row[3]),
        status=row[4],
        idempotency_key=row[5],
        ordering_key=row[6],
        priority=row[7],
        generation=row[8],
        attempts=row[9],
        max_attempts=row[10],
        next_run_at=row[11],
        created_at=row[12],
        completed_at=row[13],
        source=row[14],
        target=row[15],
        error=row[16],
        verdict=None
        if failure is None
        else Verdict(
            kind=failure.get("verdict", "transient"),
            rule=failure.get("rule", ""),
            error_class=failure.get("error_class", ""),
        ),
        history=tuple(FailureCycle.model_validate(cycle) for cycle in json.loads(row[18])),
        locked_by=row[19],
        waits_for_key=row[20],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an event should look like. A mapping names some of the payload's fields, anything else all of it."""

    topic: str
    payload: object = None
    fields: Mapping[str, object]

    def fits(self, event: StoredEvent[Any]) -> bool:
        """Whether this event is such a one."""
        return (
            event.topic == self.topic
            and (self.payload is None or _payload_fits(self.payload, event.payload))
            and all(getattr(event, name) == value for name, value in self.fields.items())
        )

    def __str__(self) -> str:
        parts = [self.topic]
        if self.payload is not None:
            parts.append(
                f"payload {'with ' if isinstance(self.payload, Mapping) else ''}{_json(self.payload)}"
            )
        parts.extend(f"{name}={value!r}" for name, value in self.fields.items())
        return "  ".join(parts)


def _payload_fits(wanted: object, found: object) -> bool:
    there = to_jsonable_python(found)
    if isinstance(wanted, Mapping) and isinstance(there, dict):
        return all(name in there and there[name] == to_jsonable_python(wanted[name]) for name in wanted)
    return bool(there == to_jsonable_python(wanted))


def describe(events: Iterable[StoredEvent[Any]], fields: Iterable[str] = ()) -> str:
    """A line for each event: what a failed assertion shows."""
    shown = [
        "  ".join(
            [event.topic, _json(event.payload), *(f"{name}={getattr(event, name)!r}" for name in fields)]
        )
        for event in events
    ]
    if len(shown) > _LINES_SHOWN:
        shown[_LINES_SHOWN:] = [f"and {len(shown) - _LINES_SHOWN} more"]
    return (
        "\n".join(f"  {line}" for line in shown)
        or "  nothing (what is not committed is seen with its connection)"
    )


def _json(value: object) -> str:
    text = json.dumps(to_jsonable_python(value), default=str, ensure_ascii=False)
    if isinstance(value, BaseModel):
        text = f"{type(value).__name__} {text}"
    return text if len(text) <= 300 else f"{text[:300]}…"
