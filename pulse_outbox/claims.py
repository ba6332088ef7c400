"""Claims: rows that a dispatcher holds, as the server sent them.

A dispatcher reads tens of thousands of them a second, and most handlers ask for the payload and little else. So ids and
times stay what they are on the wire until somebody asks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any, NamedTuple, Protocol
from uuid import UUID

Rows = list[tuple[Any, ...]]

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def time_of(raw: int) -> datetime:
    """A time on the wire: microseconds since the year 2000."""
    return _EPOCH + raw * _MICROSECOND


def raw_time(time: datetime) -> int:
    """The other way round."""
    return (time - _EPOCH) // _MICROSECOND


class Claim(NamedTuple):
    """One claimed row, and the token under which it was claimed. Payload and headers are JSON text."""

    raw_id: bytes
    seq: int
    payload: str
    headers: str | None
    """None: there are none."""
    source: str | None
    target: str | None
    idempotency_key: str
    ordering_key: str | None
    attempts: int
    max_attempts: int
    lease_seq: int
    snoozes: int
    raw_created_at: int
    raw_next_run_at: int
    raw_looked_at: int
    """When the server answered, by its clock."""
    # What all of a lane have in common, so that a claim of one lane has no need to be told.
    topic: str
    generation: int
    lapses: int
    priority: int
    alone: bool
    raw_token: bytes

    @property
    def event_id(self) -> UUID:
        """The event's."""
        return UUID(bytes=self.raw_id)

    @property
    def token(self) -> UUID:
        """The fence."""
        return UUID(bytes=self.raw_token)

    @property
    def created_at(self) -> datetime:
        """When the event was written."""
        return time_of(self.raw_created_at)

    @property
    def next_run_at(self) -> datetime:
        """When it was due."""
        return time_of(self.raw_next_run_at)

    @property
    def age(self) -> float:
        """Seconds since it was created, when the server answered."""
        return (self.raw_looked_at - self.raw_created_at) / 1e6


class Held(Protocol):
    """What a write after a claim is fenced by."""

    @property
    def raw_id(self) -> bytes: ...
    @property
    def raw_token(self) -> bytes: ...


class Lane(NamedTuple):
    """Rows that one claim may take in order, and where the first of them stands."""

    topic: str
    generation: int
    lapses: int
    priority: int
    next_run_at: datetime
    seq: int
    due_in: float
    """Seconds until the first row is due, on the database's clock; negative when it is."""


class Claimed(list[Claim]):
    """What one claim took, in order."""

    __slots__ = ("left_behind",)

    def __init__(self, claims: Iterable[Claim] = (), left_behind: Iterable[Lane] = ()) -> None:
        super().__init__(claims)
        self.left_behind = list(left_behind)
        """Lanes in which a budget of one waits for a free slot, and where."""


def claimed_of(rows: Rows, *known: object) -> Claimed:
    """The claims of these rows. *known*: their last fields, which are the same for all."""
    rows.sort(key=_due_order)
    claims = [_as_claim(row + known) for row in rows if row[0] is not None]
    if len(set(map(_priority, claims))) > 1:
        claims.sort(key=_priority, reverse=True)
    return Claimed(claims, [_lane_of(_as_claim(row + known)) for row in rows if row[0] is None])


def known_of(lane: Mapping[str, Any]) -> tuple[object, ...]:
    """What a claim of one lane is not told: the fields of Claim between the row's own and the token."""
    lapses = lane["lapses"]
    return lane["topic"], lane["generation"], lapses, lane["priority"], lapses >= 2


# Their own way of making one takes twice as long.
_as_claim: Callable[[tuple[Any, ...]], Claim] = functools.partial(tuple.__new__, Claim)
_priority = itemgetter(Claim._fields.index("priority"))
_due_order = itemgetter(Claim._fields.index("raw_next_run_at"), Claim._fields.index("seq"))


def _lane_of(row: Claim) -> Lane:
    return Lane(row.topic, row.generation, row.lapses, row.priority, row.next_run_at, row.seq, 0.0)
