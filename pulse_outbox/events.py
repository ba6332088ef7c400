"""Events: what a producer writes (`NewEvent`) and what a handler gets (`Event`).

Everything that PostgreSQL would reject is found here, before any SQL, because a rejected statement would
abort the producer's transaction. Messages name the place (`payload.items[3].price`) and never quote a value.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import accumulate, chain, repeat
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypedDict,
    TypeGuard,
    TypeVar,
)
from uuid import UUID, SafeUUID

from pydantic import BaseModel
from pydantic_core import from_json, to_json, to_jsonable_python

from pulse_outbox.errors import EnqueueError, OutboxError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

T = TypeVar("T")

DEFAULT_MAX_PAYLOAD_BYTES = 1024 * 1024
MAX_TOPIC_CHARACTERS = 200
# Keys are index entries, and PostgreSQL refuses those above 2,704 bytes (the topic takes up to 800 of them).
MAX_KEY_CHARACTERS = 400
# What pydantic's JSON parser reads back; PostgreSQL itself would take more of both.
MAX_DEPTH = 200
MAX_INTEGER_DIGITS = 4300
MAX_TIME = timedelta(days=36525)
# What the table takes: a time that a client can't hold could be claimed and never be read.
_FIRST_TIME, _LAST_TIME = datetime(2000, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


class Event(Generic[T]):
    """One claimed event, as its handler sees it.

    Two attributes are filled in by the dispatcher: `resources` is what the outbox's lifespan yielded,
    `connection` the open transaction of a transactional handler.
    """

    # A frozen dataclass takes about 2 µs longer to build, a tenth of what a whole job may cost. So: a plain
    # __init__, after which the object becomes a _SealedEvent, which refuses assignment.
    __slots__ = (
        "_claim",
        "attempt",
        "connection",
        "created_at",
        "generation",
        "headers",
        "id",
        "idempotency_key",
        "lease_seq",
        "max_attempts",
        "ordering_key",
        "payload",
        "resources",
        "snoozes",
        "source",
        "target",
        "topic",
    )

    def __init__(
        self,
        id: UUID,  # noqa: A002  the public name of the attribute
        topic: str,
        payload: T,
        headers: Mapping[str, Any],
        idempotency_key: str,
        ordering_key: str | None,
        attempt: int,
        max_attempts: int,
        generation: int,
        lease_seq: int,
        created_at: datetime,
        source: str | None = None,
        target: str | None = None,
        snoozes: int = 0,
        resources: Any = None,
        connection: Any = None,
    ) -> None:
        self.id: Final = id
        self.topic: Final = topic
        self.payload: Final = payload
        self.headers: Final = headers
        self.idempotency_key: Final = idempotency_key
        self.ordering_key: Final = ordering_key
        self.attempt: Final = attempt
        self.max_attempts: Final = max_attempts
        self.generation: Final = generation
        self.lease_seq: Final = lease_seq
        self.created_at: Final = created_at
        self.source: Final = source
        self.target: Final = target
        self.snoozes: Final = snoozes
        self.resources: Final[Any] = resources
        self.connection: Final[Any] = connection
        self.__class__ = _SealedEvent

    if not TYPE_CHECKING:  # else no misspelt name would be found

        def __getattr__(self, name):
            # Only where a slot is empty: of a claimed event, what nobody has asked for before.
            read = _OF_CLAIM.get(name)
            if read is None:
                raise AttributeError(f"an Event has no {name!r}")
            value = read(self._claim)
            object.__setattr__(self, name, value)
            return value

    def __reduce__(self) -> tuple[Any, ...]:
        # For copies, and for pickles to other processes. What the dispatcher filled in belongs to this run of the
        # handler, and stays with it.
        return Event, (
            self.id,
            self.topic,
            self.payload,
            self.headers,
            self.idempotency_key,
            self.ordering_key,
            self.attempt,
            self.max_attempts,
            self.generation,
            self.lease_seq,
            self.created_at,
            self.source,
            self.target,
            self.snoozes,
        )

    def __repr__(self) -> str:
        # Without payload and headers: a repr ends up in logs.
        return f"<Event {self.topic} {self.id} attempt {self.attempt}/{self.max_attempts}>"


class _SealedEvent(Event[T]):
    """What every Event is once it has been built."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an Event can't be changed ({name})")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"an Event can't be changed ({name})")


_SealedEvent.__name__ = _SealedEvent.__qualname__ = "Event"


def event_of_claim(
    claim: _Claim, payload: T, headers: Mapping[str, Any], resources: Any, connection: Any
) -> Event[T]:
    """How a dispatcher builds an Event: of a claim, which is read where the handler asks for something.

    Most handlers ask for the payload and one or two other things, so this takes a third of the time.
    """
    event: Any = object.__new__(Event)
    event._claim = claim
    event.payload = payload
    event.headers = headers
    event.resources = resources
    event.connection = connection
    event.__class__ = _SealedEvent
    return event  # type: ignore[no-any-return]  # as such its attributes could not be set


class _Claim(Protocol):
    """What is read of a claim; see `pulse_outbox.claims`."""

    @property
    def event_id(self) -> UUID: ...
    @property
    def created_at(self) -> datetime: ...


_OF_CLAIM: dict[str, Callable[[_Claim], Any]] = {
    "id": attrgetter("event_id"),
    "attempt": attrgetter("attempts"),
    **{
        name: attrgetter(name)
        for name in (
            "topic", "idempotency_key", "ordering_key", "max_attempts", "generation", "lease_seq", "created_at",
            "source", "target", "snoozes",
        )
    },
}  # fmt: skip


class _NewEventFields(NamedTuple):
    topic: str
    payload: object
    idempotency_key: str | None
    ordering_key: str | None
    headers: Mapping[str, object] | None
    priority: int
    run_at: datetime | None
    delay: float | timedelta | None
    max_attempts: int | None
    generation: int
    source: str | None
    target: str | None
    event_id: UUID | None
    dead_key: Literal["hold", "skip"]


_new_tuple = tuple.__new__  # looked up once
_good_topics: set[str] = set()


def _remember(topic: str) -> None:
    if type(topic) is str and len(_good_topics) < 1000:
        _good_topics.add(topic)


class NewEvent(_NewEventFields):
    """An event to be written. Everything but the payload is checked here, the payload when it is encoded.

    `run_at` is an aware datetime; `delay` is in seconds (or a timedelta) and counts on the database's clock.
    """

    # A tuple because a bulk enqueue makes a hundred thousand of them a second: a frozen dataclass takes three times as
    # long to build.
    __slots__ = ()

    def __new__(
        cls,
        topic: str,
        payload: object,
        *,
        idempotency_key: str | None = None,
        ordering_key: str | None = None,
        headers: Mapping[str, object] | None = None,
        priority: int = 0,
        run_at: datetime | None = None,
        delay: float | timedelta | None = None,
        max_attempts: int | None = None,
        generation: int = 0,
        source: str | None = None,
        target: str | None = None,
        event_id: UUID | None = None,
        dead_key: Literal["hold", "skip"] = "hold",
    ) -> Self:
        # A few topics make all the events, so most were found good before.
        if type(topic) is not str or topic not in _good_topics:
            check_text("topic", topic, MAX_TOPIC_CHARACTERS)
            _remember(topic)
        if idempotency_key is not None:
            check_text("idempotency_key", idempotency_key)
        if ordering_key is not None:
            check_text("ordering_key", ordering_key)
        if source is not None:
            check_text("source", source)
        if target is not None:
            check_text("target", target)
        # Asked here already, to save most events the calls.
        if type(priority) is not int or not -9 <= priority <= 9:
            _check_integer("priority", priority, -9, 9)
        if type(generation) is not int or not 0 <= generation < 2**63:
            _check_integer("generation", generation, 0, 2**63 - 1)
        if max_attempts is not None:
            _check_integer("max_attempts", max_attempts, 1, 2**31 - 1)
        if event_id is not None and not isinstance(event_id, UUID):
            raise EnqueueError(f"event_id: a uuid.UUID is needed, not {_type_name(event_id)}")
        if dead_key != "hold" and dead_key != "skip":
            raise EnqueueError("dead_key: 'hold' or 'skip' is needed")
        if headers is not None and not isinstance(headers, Mapping):
            raise EnqueueError(f"headers: a mapping is needed, not {_type_name(headers)}")
        if run_at is not None:
            _check_run_at(run_at)
            if delay is not None:
                raise EnqueueError("run_at and delay: give one of them, not both")
        if delay is not None:
            as_timedelta("delay", delay)
        return _new_tuple(
            cls,
            (
                topic, payload, idempotency_key, ordering_key, headers, priority, run_at, delay, max_attempts,
                generation, source, target, event_id, dead_key,
            ),
        )  # fmt: skip

    def __getnewargs_ex__(self) -> tuple[tuple[object, ...], dict[str, object]]:
        """For pickle and copy, which would give all fields by position."""
        return self[:2], dict(zip(self._fields[2:], self[2:], strict=True))

    def _replace(self, **changes: Any) -> Self:
        """Another event, checked like any other."""
        return type(self)(**{**self._asdict(), **changes})

    __replace__ = _replace


class EventOptions(TypedDict, total=False):
    """What `enqueue` takes beside topic and payload; the meanings are those of NewEvent."""

    idempotency_key: str | None
    ordering_key: str | None
    headers: Mapping[str, object] | None
    priority: int
    run_at: datetime | None
    delay: float | timedelta | None
    max_attempts: int | None
    generation: int
    source: str | None
    target: str | None
    event_id: UUID | None
    dead_key: Literal["hold", "skip"]


def check_schema_name(schema: str) -> str:
    """The name itself, if it may be a schema of ours; it becomes part of SQL text, so little is allowed."""
    if (
        not re.fullmatch(r"[a-z_][a-z0-9_]{0,40}", schema)
        or schema.startswith("pg_")
        or schema == "information_schema"
    ):
        raise SettingsError(
            f"{schema[:60]!r} can't be the schema's name: lower-case letters, digits and underscores, "
            "not starting with a digit or pg_, at most 41 characters"
        )
    return schema


def as_timedelta(name: str, value: object, complaint: type[OutboxError] = EnqueueError) -> timedelta:
    """A time given in seconds or as a timedelta; refuses what is negative, not finite or above a century."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value
    else:
        raise complaint(f"{name}: seconds or a timedelta are needed, not {_type_name(value)}")
    if not 0 <= seconds <= MAX_TIME.total_seconds():  # false for NaN too
        raise complaint(f"{name}: must be between 0 and 100 years")
    return value if isinstance(value, timedelta) else timedelta(seconds=seconds)


def encode_payload(payload: object, max_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES) -> str:
    """The payload as JSON text that PostgreSQL accepts and that reads back; anything else is an EnqueueError.

    Takes pydantic models, dataclasses, mappings and any other JSON value. Dates, UUIDs, decimals and enums
    are written as pydantic writes them.
    """
    return encode_json("payload", payload, max_bytes).decode()


def encode_headers(headers: Mapping[str, object] | None, max_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES) -> str:
    """The headers as JSON text, under the payload's rules."""
    return encode_json("headers", headers, max_bytes).decode() if headers else "{}"


def encode_json(name: str, value: object, max_bytes: int) -> bytes:
    """What `encode_payload` says of a payload, of anything, and in UTF-8. A complaint begins with *name*."""
    try:
        body = to_json(value, fallback=_mapping_as_dict)
    except Exception as error:
        fault = _find_fault(name, value) or f"{name}: {_type_name(value)} can't be written as JSON"
        raise EnqueueError(fault) from error
    if len(body) > max_bytes:
        raise EnqueueError(
            f"{name}: {len(body):,} bytes of JSON, above the limit of {max_bytes:,}; "
            "store the data elsewhere and enqueue a reference, or raise Outbox(max_payload_bytes=…)"
        )
    unreadable = unchanged = False
    # Short texts have no room for a nesting or a number that would not read back.
    if len(body) <= 2 * MAX_DEPTH:
        if b"\\" not in body and is_flat(value):
            return body
    else:
        try:
            unchanged = _is_same(from_json(body, allow_inf_nan=False, cache_strings="keys"), value)
        except ValueError:
            unreadable = True
    # Nearly always a look at the bytes is enough.
    suspicious = unreadable or (b"\\" in body and b"\\u0000" in body)
    if not unchanged:
        suspicious = suspicious or b"NaN" in body or b"Infinity" in body
    found = _fault_in_json(name, body, unreadable) if suspicious else None
    if found is None and not (unchanged or _is_plain(value)):
        found = _fault_lost_in_json(name, value, body)
    if found:
        raise EnqueueError(found)
    return body


def _fault_in_json(name: str, body: bytes, unreadable: bool) -> str | None:
    """What makes suspicious JSON unacceptable, if anything does."""
    # It may be harmless (the word "NaN" in a text): parsing tells, and what was parsed has the places.
    fault = _find_fault(name, json.loads(body, parse_int=_parse_integer))
    return fault or (f"{name}: can't be read back" if unreadable else None)


def _fault_lost_in_json(name: str, value: object, body: bytes) -> str | None:
    """What the JSON no longer shows: keys that were no strings; NaN, which pydantic models write as null."""
    # Models and dataclasses read their keys back from strings. Where a null remains without those for None, it may
    # have been NaN.
    typed = isinstance(value, BaseModel) or is_dataclass(value)
    if typed and not (
        b"null" in body and b"null" in to_json(value, exclude_none=True, fallback=_mapping_as_dict)
    ):
        return None
    return _find_fault(name, value)


def _is_same(back: object, value: object) -> bool:
    """Whether what was read back is what was given: then it had only string keys, and no NaN.

    Objects with a comparison of their own are believed.
    """
    try:
        return bool(back == value)
    except Exception:  # a comparison of the application's own, and whatever may go wrong in it
        return False


def encode_flat(payloads: Sequence[Any], max_bytes: int) -> list[bytes] | None:
    """What `encode_json` makes of each of them if all are flat and nothing is wrong; None if that is not certain.

    A look at all of them at once takes a third of the time.
    """
    if not _are_flat(payloads):
        return None
    try:
        bodies = [to_json(payload) for payload in payloads]
    except Exception:
        return None
    # Shorter than an integer that would not read back.
    if max(map(len, bodies)) > min(max_bytes, MAX_INTEGER_DIGITS):
        return None
    together = b"".join(bodies)
    return None if b"\\" in together and b"\\u0000" in together else bodies


_LONG_INTEGER = 10**MAX_INTEGER_DIGITS
_LONG_INTEGER_FAULT = f"an integer of more than {MAX_INTEGER_DIGITS:,} digits can't be read back"


class _LongInteger:
    """Stands for an integer that Python's JSON parsers refuse to read."""


def _parse_integer(digits: str) -> object:
    return 0 if len(digits.lstrip("-")) <= MAX_INTEGER_DIGITS else _LongInteger()


def is_flat(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether this is a dict of texts, integers and the like, as most are: nothing in it could be lost on the way."""
    return (
        type(value) is dict
        and _FLAT_VALUES.issuperset(map(type, value.values()))
        and _FLAT_KEYS.issuperset(map(type, value))
    )


def _are_flat(payloads: Sequence[Any]) -> bool:
    return (
        _FLAT.issuperset(map(type, payloads))
        and _FLAT_VALUES.issuperset(map(type, chain.from_iterable(map(dict.values, payloads))))
        and _FLAT_KEYS.issuperset(map(type, chain.from_iterable(payloads)))
    )


_FLAT = frozenset({dict})
_FLAT_KEYS = frozenset({str})
_FLAT_VALUES = frozenset({str, int, bool, type(None)})


def _is_plain(value: object) -> bool:
    """Whether this is made of JSON's own types and string keys only."""
    kind = type(value)
    if kind is dict:
        for key, item in value.items():  # type: ignore[attr-defined]  # `kind is dict` does not narrow
            if type(key) is not str or not (type(item) in _PLAIN_SCALARS or _is_plain(item)):
                return False
        return True
    if kind is list:
        return all(type(item) in _PLAIN_SCALARS or _is_plain(item) for item in value)  # type: ignore[attr-defined]
    return kind in _PLAIN_SCALARS


_PLAIN_SCALARS = frozenset({str, int, float, bool, type(None)})


def _find_fault(path: str, value: object, ancestors: tuple[int, ...] = ()) -> str | None:
    """The first thing in *value* that can't be written, as "place: what is wrong"."""
    try:
        return _walk(path, value, ancestors)
    except RecursionError:
        return f"{_short(path)}: nested too deeply"


def _walk(path: str, value: object, ancestors: tuple[int, ...]) -> str | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        wrong = _wrong_with_text(value)
        return f"{_short(path)}: {wrong}" if wrong else None
    if isinstance(value, float | Decimal):
        return None if math.isfinite(value) else f"{_short(path)}: NaN and infinity are not JSON"
    if isinstance(value, int):
        return None if abs(value) < _LONG_INTEGER else f"{_short(path)}: {_LONG_INTEGER_FAULT}"
    if isinstance(value, _LongInteger):
        return f"{_short(path)}: {_LONG_INTEGER_FAULT}"
    if id(value) in ancestors:
        return f"{_short(path)}: refers back to something that contains it"
    if len(ancestors) >= MAX_DEPTH:
        return f"{_short(path)}: nested deeper than {MAX_DEPTH} levels"
    ancestors = (*ancestors, id(value))
    if isinstance(value, dict | Mapping):  # dict first: the check for a Mapping is slow
        return _walk_mapping(path, value, ancestors)
    if isinstance(value, list | tuple):
        return _first(_walk(f"{path}[{index}]", item, ancestors) for index, item in enumerate(value))
    return _walk_object(path, value, ancestors)


def _walk_mapping(path: str, value: Mapping[Any, object], ancestors: tuple[int, ...]) -> str | None:
    for key, item in value.items():
        if not isinstance(key, str):
            return f"{_short(path)}: a key is {_type_name(key)}, and JSON has only string keys"
        if wrong := _wrong_with_text(key):
            return f"{_short(path)}: the key {_short(ascii(key))}: {wrong}"
        place = f"{path}.{key}" if key.isidentifier() else f"{path}[{_short(ascii(key))}]"
        if fault := _walk(place, item, ancestors):
            return fault
    return None


def _walk_object(path: str, value: object, ancestors: tuple[int, ...]) -> str | None:
    """Look at what pydantic would write for *value* or, where it can't, for the culprit in its fields."""
    try:
        written = to_jsonable_python(value, fallback=_mapping_as_dict)
    except Exception:
        if isinstance(value, BaseModel):
            parts = {name: getattr(value, name, None) for name in type(value).model_fields}
        elif is_dataclass(value):
            parts = {field.name: getattr(value, field.name, None) for field in fields(value)}
        elif isinstance(value, set | frozenset):
            return _first(_walk(f"{path}[…]", item, ancestors) for item in value)
        else:
            parts = {}
        fault = _first(_walk(f"{path}.{name}", item, ancestors) for name, item in parts.items())
        return fault or f"{_short(path)}: {_type_name(value)} can't be written as JSON"
    return _walk(path, written, ancestors) or _number_lost(path, value, written)


def _number_lost(path: str, value: object, written: object) -> str | None:
    """Where pydantic wrote null for NaN or infinity, as it does in fields that say nothing about numbers."""
    if written is None:
        is_lost = isinstance(value, float | Decimal) and not math.isfinite(value)
        return f"{_short(path)}: NaN and infinity are not JSON" if is_lost else None
    if isinstance(written, list):
        items = zip(value, written, strict=False) if isinstance(value, list | tuple) else ()
        return _first(_number_lost(f"{path}[{n}]", *pair) for n, pair in enumerate(items))
    if not isinstance(written, dict):
        return None
    parts: dict[Any, object] = {}
    if isinstance(value, BaseModel):
        for name, part in value:
            field = type(value).model_fields.get(name)
            parts[name] = part
            if field is not None:
                parts |= {field.alias: part, field.serialization_alias: part}
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name, None) for field in fields(value)}
    elif isinstance(value, Mapping):
        parts = dict(value)
    return _first(
        _number_lost(f"{path}.{name}", parts[name], item) for name, item in written.items() if name in parts
    )


def _mapping_as_dict(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{_type_name(value)} can't be written as JSON")


def _first(faults: Iterable[str | None]) -> str | None:
    return next((fault for fault in faults if fault), None)


def _wrong_with_text(text: str) -> str | None:
    if "\0" in text:
        return "a NUL character, which PostgreSQL can't store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "a lone surrogate, which is not valid Unicode"
    return None


def check_text(
    name: str,
    text: object,
    max_characters: int = MAX_KEY_CHARACTERS,
    complaint: type[OutboxError] = EnqueueError,
) -> None:
    """Refuses what can't be a topic, a key or another short text of the row."""
    if not isinstance(text, str):
        raise complaint(f"{name}: a string is needed, not {_type_name(text)}")
    if not text:
        raise complaint(f"{name}: must not be empty")
    if len(text) > max_characters:
        raise complaint(f"{name}: {len(text):,} characters, above the limit of {max_characters}")
    if wrong := _wrong_with_text(text):
        raise complaint(f"{name}: {wrong}")


def _check_integer(name: str, value: int, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise EnqueueError(f"{name}: an integer is needed, not {_type_name(value)}")
    if not lowest <= value <= highest:
        raise EnqueueError(f"{name}: must be between {lowest} and {highest}")


def _check_run_at(run_at: datetime) -> None:
    if not isinstance(run_at, datetime):
        raise EnqueueError(f"run_at: a datetime is needed, not {_type_name(run_at)}")
    if run_at.utcoffset() is None:
        raise EnqueueError("run_at: needs a time zone, for instance datetime.now(timezone.utc)")
    if not _FIRST_TIME <= run_at < _LAST_TIME:
        raise EnqueueError("run_at: must lie between the years 2000 and 9000")


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:80]}…{text[-39:]}"


def _type_name(value: object) -> str:
    return type(value).__qualname__


def uuids(numbers: Sequence[int]) -> list[UUID]:
    """The UUIDs of these numbers. Their own way of making one takes twice as long, most of it to ask what was given."""
    made = [*map(UUID.__new__, repeat(UUID, len(numbers)))]
    for set_it, values in (_SET_INT, numbers), (_SET_SAFETY, repeat(SafeUUID.unknown)):
        deque(map(set_it, made, values), maxlen=0)
    return made


# A UUID refuses assignment; its slots do not.
_SET_INT, _SET_SAFETY = vars(UUID)["int"].__set__, vars(UUID)["is_safe"].__set__

# Version 7: 48 bits of milliseconds, the version, 12 bits, the variant, 62 bits. The 12 and the 62 are the tail here.
_LOW_BITS = (1 << 62) - 1


class Uuid7Source:
    """Makes time-ordered UUIDs (version 7) that grow strictly within a process, whatever its clock does.

    Ordered ids keep the table's indexes compact. Threads may share one; a forked child starts afresh.
    """

    def __init__(
        self, clock: Callable[[], int] = time.time_ns, entropy: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self._reset()

    def _reset(self) -> None:
        # A new lock too: another thread may have held it at the moment of the fork.
        self._lock = threading.Lock()
        self._millisecond = -1
        self._tail = 0
        self._drawn = b""

    def __call__(self) -> UUID:
        with self._lock:
            millisecond = self._clock() // 1_000_000
            if millisecond > self._millisecond:
                self._begin(millisecond)
            else:
                self._tail += 1 + int.from_bytes(self._draw(4))
                if self._tail >> 74:
                    self._begin(self._millisecond + 1)
            high = self._millisecond << 16 | 0x7000 | self._tail >> 62
            low = 0b10 << 62 | self._tail & _LOW_BITS
        return UUID(int=high << 64 | low)

    def many(self, number: int) -> list[UUID]:
        """That many ids, in half the time."""
        return uuids(self.numbers(number))

    def numbers(self, number: int) -> list[int]:
        """The same as integers."""
        steps = map((1).__add__, struct.unpack(f"{number}I", self._entropy(4 * number)))
        with self._lock:
            millisecond = self._clock() // 1_000_000
            if millisecond > self._millisecond:
                self._begin(millisecond)
            # The low bits have room for all of them, so that a step of the tail is one of the whole number.
            while self._tail >> 73 or (self._tail & _LOW_BITS) + (number << 32) > _LOW_BITS:
                self._begin(self._millisecond + 1)
            frame = self._millisecond << 80 | 0x7 << 76 | 0b10 << 62
            last = frame | self._tail >> 62 << 64 | self._tail & _LOW_BITS
            numbers = [*accumulate(steps, initial=last)]
            self._tail += numbers[-1] - last
        return numbers[1:]

    def _begin(self, millisecond: int) -> None:
        self._millisecond = millisecond
        # The top bit stays free, so that increments have room.
        self._tail = int.from_bytes(self._draw(10)) >> 7

    def _draw(self, number: int) -> bytes:
        """Random bytes, asked of the system by the hundred."""
        if len(self._drawn) < number:
            self._drawn = self._entropy(400)
        drawn, self._drawn = self._drawn[:number], self._drawn[number:]
        return drawn


uuid7 = Uuid7Source()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=uuid7._reset)
