"""The store: one method for each SQL function that a dispatcher or an operator calls.

The state machine is in `migrations/`. Here its functions get their arguments and their answers become values;
calls have a deadline, and are tried again where that can help. Repeating any of them is safe: a claim is known by
its token, and a write finds out by itself that an earlier try of it got through.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, LiteralString, NamedTuple, TypeVar
from uuid import UUID, uuid4

import psycopg
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.pq import Format

from pulse_outbox import schema as migrations
from pulse_outbox.claims import Claim, Claimed, Held, Lane, claimed_of, known_of
from pulse_outbox.errors import UNMIGRATED_SQLSTATES, SchemaError, from_database_error
from pulse_outbox.failures import DeadLetter
from pulse_outbox.storage_retry import StorageRetries, is_retryable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tenacity import AsyncRetrying

    from pulse_outbox.claims import Rows
    from pulse_outbox.link import AnyLink, Sent, Written

Clock = Callable[[], datetime]
"""Simulated time, in tests."""

TRIES_REMEMBERED = 100
"""Far more than one store has claims without an answer."""

_Question = tuple[bytes, list[object]]
"""A query, and its parameters."""

Answer = Literal["RETRYING", "DEAD_LETTERED", "locked", "lost"]
"""locked: somebody else holds the row, try again. lost: the claim is over. Silence: settled as wanted."""


class Listing(NamedTuple):
    """The lanes that have work, now or later."""

    lanes: list[Lane]
    looked_at: datetime
    """On the database's clock: what was committed before this is seen."""
    took: float
    """How long the server worked on it, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt, as it is stored. `delay` is used when the budget has something left."""

    held: Held
    error: str
    failure: Mapping[str, Any]
    delay: timedelta
    terminal: bool


class Reaped(NamedTuple):
    """One lease that had run out, and what became of its event."""

    event_id: UUID
    answer: str
    topic: str
    attempts: int
    max_attempts: int
    lapses: int
    last_error: str
    worker: str


class Store:
    """The SQL functions of one schema, over one link.

    *now* of the methods is for tests: null in production, where the database's clock rules. *clock* gives it to calls
    that name none.
    """

    def __init__(
        self,
        link: AnyLink,
        *,
        schema: str = "pulse",
        retries: StorageRetries | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._link = link
        self._clock = clock
        self._schema = migrations.check_schema_name(schema)
        retries = retries or StorageRetries()
        self._storage = retries.storage.retrying()
        self._dequeue = retries.dequeue.retrying()
        self._queries: dict[tuple[bool | str, ...], bytes] = {}
        self._tries: dict[UUID, int] = {}
        """How often each of the latest claims was sent, by its token."""

    async def close(self) -> None:
        """Ends the connection."""
        await self._link.close()

    # Dispatchers

    async def require_supported(self) -> None:
        """Raises SchemaError when the database's schema does not fit this code."""
        try:
            rows = await _tried(
                self._storage, self._link.rows, migrations.versions_query(self._schema).as_bytes(None), ()
            )
        except psycopg.Error as error:
            if error.sqlstate not in UNMIGRATED_SQLSTATES:
                raise
            rows = []
        migrations.judge_versions(rows, schema=self._schema).require_supported()

    def lanes(
        self, topics: Sequence[str], generations: Sequence[int] | None = None, *, now: datetime | None = None
    ) -> Asking[Listing]:
        """The lanes of these topics that have work, now or later."""

        def question() -> _Question:
            arguments = {"p_topics": _array(topics), "p_generations": _array(generations), "p_now": now}
            return self._question("outbox_lanes", arguments)

        return Asking(self._link, question, self._answer, self._dequeue, _listing_of)

    def claim(
        self,
        *,
        limit: int,
        topics: Sequence[str],
        worker: str = "store",
        lease: timedelta = timedelta(seconds=30),
        budgets: Sequence[int] | None = None,
        generations: Sequence[int] | None = None,
        slots: int | None = None,
        lanes: Sequence[Mapping[str, Any]] | None = None,
        lapses: int | None = None,
        alone: bool = False,
        token: UUID | None = None,
        fresh: bool = False,
        plain: bool = False,
        together: bool = False,
        unflushed: bool = False,
        now: datetime | None = None,
    ) -> Asking[Claimed]:
        """Takes up to *limit* due events; see outbox_claim. By priority, due time and seq.

        A caller that wants to ask again after an error awaits the same again. One that asks another time, or another
        store, brings its own *token*, *fresh* when it is new. *plain*: there is one lane, in which ordering keys and
        budgets of one are not to be expected. *together*: many are. Both are only about speed; see outbox_claim_lane
        and outbox_claim. *unflushed*: its first try does not wait for the disk, so a crash of the server may undo it.
        The caller starts nothing before a flush that was made ready earlier has succeeded.
        """
        if token is None:
            token, fresh = uuid4(), True
        arguments: dict[str, object] = {
            "p_token": token,
            "p_worker": worker,
            "p_topics": _array(topics),
            "p_limit": limit,
            "p_lease": _interval(lease),
            "p_budgets": _array(budgets),
            "p_generations": _array(generations),
            "p_slots": slots,
            "p_lanes": json.dumps(lanes) if lanes is not None else None,
            "p_lapses": lapses,
            "p_alone": alone,
            "p_together": together,
            "p_now": now,
        }

        tries = 0
        raw_token = token.bytes
        known: tuple[object, ...] = ()

        def next_try() -> _Question:
            nonlocal fresh, tries, known
            arguments["p_fresh"] = is_first = fresh
            fresh = False  # whatever becomes of this try, the next one can't be certain
            arguments["p_try"] = tries = self._count_try(token, tries)
            if plain and is_first and lanes and budgets:
                [lane] = lanes
                known = known_of(lane)
                lane_arguments = _of_lane(arguments, topics, budgets, lane)
                return self._question("outbox_claim_lane", lane_arguments, unflushed=unflushed)
            known = ()
            return self._question("outbox_claim", arguments, unflushed=unflushed and is_first)

        def read(rows: Rows) -> Claimed:
            return claimed_of(rows, *known, raw_token)

        return Asking(self._link, next_try, self._raw_answer, self._dequeue, read)

    @property
    def server(self) -> object:
        """The server that its connection leads to; None where there is none."""
        return self._link.server

    def flush(self) -> Flush | None:
        """A flush that can be sent; None where the connection has to be made first, or is somebody else's too."""
        question = self._question("outbox_flush", {})
        written = self._link.write(*question)
        return Flush(self._link, written) if written is not None else None

    async def flush_now(self) -> None:
        """Makes the connection if need be, and waits for the disk."""
        await self._call("outbox_flush", self._storage)

    async def held_by(self, token: UUID) -> list[Claim]:
        """What runs under this token: what its claim took, and nothing that it has not taken yet."""
        arguments: dict[str, object] = {
            "p_token": token,
            "p_worker": "nobody",
            "p_topics": _array(()),
            "p_limit": 0,
            "p_lease": _interval(timedelta(0)),
        }
        question = self._question("outbox_claim", arguments)
        return claimed_of(await _tried(self._storage, self._raw_answer, *question), token.bytes)

    async def heartbeat(
        self, held: Sequence[Held], *, lease: timedelta, now: datetime | None = None
    ) -> dict[UUID, Answer]:
        """Extends leases; the answer is about those that could not be extended."""
        return await self._settle("outbox_heartbeat", held, p_lease=lease, p_now=now)

    async def complete(
        self, held: Sequence[Held], *, delete: bool = False, now: datetime | None = None
    ) -> dict[UUID, Answer]:
        """RUNNING → COMPLETED, or deleted; the answer is about those that are not settled."""
        return await self._settle("outbox_complete", held, p_delete=delete, p_now=now)

    async def fail(self, failures: Sequence[Failure], *, now: datetime | None = None) -> dict[UUID, Answer]:
        """RUNNING → RETRYING or DEAD_LETTERED; the answer is about all of them."""
        return await self._settle(
            "outbox_fail",
            [failure.held for failure in failures],
            p_errors=_array_text(failure.error for failure in failures),
            p_failures=_array_text(json.dumps(failure.failure) for failure in failures),
            p_delays=_array_text(_interval(failure.delay) for failure in failures),
            p_terminal=_array_text(failure.terminal for failure in failures),
            p_now=now,
        )

    async def snooze(
        self, held: Sequence[Held], delays: Sequence[timedelta], *, now: datetime | None = None
    ) -> dict[UUID, Answer]:
        """RUNNING → RETRYING without spending the attempt; the answer is about those that are not settled."""
        return await self._settle(
            "outbox_snooze", held, p_delays=_array_text(map(_interval, delays)), p_now=now
        )

    async def release(self, held: Sequence[Held], *, now: datetime | None = None) -> dict[UUID, Answer]:
        """RUNNING → where it came from; the answer is about those that are not settled."""
        return await self._settle("outbox_release", held, p_now=now)

    async def lapse(
        self,
        held: Sequence[Held],
        error: str,
        *,
        handlers: Mapping[str, str] | None = None,
        now: datetime | None = None,
    ) -> dict[UUID, Answer]:
        """What was running in a child that died; the answer is about all of them. *handlers*: names by topic."""
        return await self._settle(
            "outbox_lapse", held, p_error=error, p_handlers=json.dumps(handlers or {}), p_now=now
        )

    async def reap(
        self,
        *,
        limit: int = 1000,
        lease: timedelta = timedelta(seconds=30),
        full: bool = True,
        handlers: Mapping[str, str] | None = None,
        now: datetime | None = None,
    ) -> list[Reaped]:
        """One sweep of the watchdog. *handlers*: their names by topic, for the evidence."""
        rows = await self._call(
            "outbox_reap",
            self._storage,
            p_limit=limit,
            p_lease=lease,
            p_full=full,
            p_handlers=json.dumps(handlers or {}),
            p_now=now,
        )
        return [Reaped._make(row) for row in rows]

    async def heal(
        self, after: str | None = None, *, limit: int = 500, now: datetime | None = None
    ) -> tuple[str | None, int]:
        """Frees ordering keys that a race left stuck: where to go on, and how many were freed."""
        [(last_key, healed)] = await self._call(
            "outbox_heal", self._storage, p_after=after, p_limit=limit, p_now=now
        )
        return last_key, healed

    async def next_alert(
        self, *, lease: timedelta, quiet: Sequence[tuple[str, str]] = (), now: datetime | None = None
    ) -> DeadLetter | None:
        """The next alert to send, lent for *lease*; none of these kinds (topic and error class) that has no id yet."""
        rows = await self._call(
            "outbox_next_alert",
            self._storage,
            p_lease=lease,
            p_quiet_topics=[topic for topic, _ in quiet],
            p_quiet_classes=[error_class for _, error_class in quiet],
            p_now=now,
        )
        return DeadLetter(**dict(zip(_ALERT_COLUMNS, rows[0], strict=True))) if rows else None

    async def pay_alert(self, alert_id: UUID, *, now: datetime | None = None) -> int:
        """The alert was accepted; how many events owe none any more."""
        [(paid,)] = await self._call("outbox_pay_alert", self._storage, p_alert_id=alert_id, p_now=now)
        return int(paid)

    async def dispatcher_seen(
        self,
        worker: str,
        *,
        host: str,
        pid: int,
        version: str,
        topics: Sequence[str],
        generations: Sequence[int] | None,
        in_flight: int,
        sleeping: bool,
        lease: timedelta,
        completed: int = 0,
        rates: Sequence[float] | None = None,
        now: datetime | None = None,
    ) -> None:
        """Says that this dispatcher is alive, and whether producers must wake it.

        *completed* since it started; *rates*: completed per second, of each topic.
        """
        await self._call(
            "dispatcher_seen",
            self._storage,
            p_worker=worker,
            p_host=host,
            p_pid=pid,
            p_version=version,
            p_topics=_array(topics),
            p_generations=_array(generations),
            p_in_flight=in_flight,
            p_sleeping=sleeping,
            p_lease=lease,
            p_completed=completed,
            p_rates=list(rates) if rates is not None else None,
            p_now=now,
        )

    async def dispatcher_gone(self, worker: str) -> None:
        """Says that this dispatcher ends."""
        await self._call("dispatcher_gone", self._storage, p_worker=worker)

    async def paused(self) -> frozenset[str | None]:
        """The paused topics; None among them stands for all."""
        query = sql.SQL("select topic from {}.pause").format(sql.Identifier(self._schema))
        rows: list[tuple[Any, ...]] = await _tried(self._storage, self._link.rows, query.as_bytes(None), ())
        return frozenset(topic for (topic,) in rows)

    # Operators

    async def replay(
        self, event_id: UUID, *, generation: int, replayed_by: str, now: datetime | None = None
    ) -> None:
        """DEAD_LETTERED → PENDING in place."""
        await self._call(
            "outbox_replay",
            self._storage,
            event_id=event_id,
            p_new_generation=generation,
            p_replayed_by=replayed_by,
            p_request=uuid4(),
            p_now=now,
        )

    async def prune(
        self,
        *,
        retention: timedelta,
        page: int = 0,
        pages: int = 1000,
        dead: bool = False,
        now: datetime | None = None,
    ) -> tuple[int, int | None]:
        """Deletes what ended long ago from some pages of the table: how many, and the page to go on with."""
        [(pruned, next_page)] = await self._call(
            "outbox_prune",
            self._storage,
            p_retention=retention,
            p_page=page,
            p_pages=pages,
            p_dead=dead,
            p_now=now,
        )
        return pruned, next_page

    # Inside

    def _count_try(self, token: UUID, before: int) -> int:
        """The number of the next try. *before*: of the last one, as far as who asks now knows."""
        number = max(before, self._tries.pop(token, 0)) + 1
        while len(self._tries) >= TRIES_REMEMBERED:
            del self._tries[next(iter(self._tries))]
        self._tries[token] = number
        return number

    async def _settle(self, function: str, held: Sequence[Held], **arguments: object) -> dict[UUID, Answer]:
        if not held:
            return {}
        rows = await self._call(
            function,
            self._storage,
            p_event_ids=_uuids([claim.raw_id for claim in held]),
            p_tokens=_uuids([claim.raw_token for claim in held]),
            **arguments,
        )
        return dict(rows)  # two columns

    async def _call(self, function: str, retrying: AsyncRetrying, **arguments: object) -> Rows:
        return await _tried(retrying, self._rows, function, **arguments)

    async def _rows(self, function: str, **arguments: object) -> Rows:
        return await self._answer(*self._question(function, arguments))

    def _question(
        self, function: str, arguments: Mapping[str, object], *, unflushed: bool = False
    ) -> _Question:
        query = self._queries.get((unflushed, function, *arguments))
        if query is None:
            query = _call_of(self._schema, function, arguments) + (_UNFLUSHED if unflushed else b"")
            self._queries[unflushed, function, *arguments] = query
        parameters = list(arguments.values())
        if self._clock is not None and arguments.get("p_now", ...) is None:
            parameters[list(arguments).index("p_now")] = self._clock()
        return query, parameters

    async def _raw_answer(self, query: bytes, parameters: list[object], sent: Sent | None = None) -> Rows:
        return await self._answer(query, parameters, sent, raw=True)

    async def _answer(
        self, query: bytes, parameters: list[object], sent: Sent | None = None, *, raw: bool = False
    ) -> Rows:
        try:
            return await self._link.rows(query, parameters, sent, raw=raw)
        except psycopg.Error as error:
            if ours := from_database_error(error):
                raise ours from error
            if error.sqlstate in UNMIGRATED_SQLSTATES:
                raise SchemaError(
                    f"schema {self._schema} is missing or older than this code: run `pulse-outbox migrate`"
                ) from error
            raise


T = TypeVar("T")


class Asking(Generic[T]):
    """A call that is ready to be sent. Awaited, it is sent, again where that helps, and gives its answer.

    It may be sent ahead, once before each time that it is awaited. After an error it may be awaited again.
    """

    def __init__(
        self,
        link: AnyLink,
        next_try: Callable[[], _Question],
        answer: Callable[[bytes, list[object], Sent | None], Awaitable[Rows]],
        retrying: AsyncRetrying,
        read: Callable[[Rows], T],
    ) -> None:
        self._link = link
        self._next_try = next_try
        self._answer = answer
        self._retrying = retrying
        self._read = read
        self._question: _Question | None = None
        """Of a try that has begun, …"""
        self._written: Written | None = None
        """… that can be sent …"""
        self._sent: Sent | None = None
        """… and that was."""

    def prepare(self) -> None:
        """Makes its next try ready, which takes longer than to send it."""
        if self._sent is not None:
            return  # what is under way is read as what was asked last
        self._question = self._next_try()
        self._written = self._link.write(*self._question)

    def send(self) -> None:
        """Sends it now, if the connection stands and is its own: whoever awaits it later has the answer sooner."""
        if self._sent is not None:
            return
        try:
            if self._question is None:
                self.prepare()
            written, self._written = self._written, None
            self._sent = written and self._link.send(written)
            if written is not None and self._sent is None:
                self._question = None  # was meant for the server that its connection led to
        except psycopg.Error:
            self._question = None  # it may have got through: to be asked again, on another connection

    @property
    def is_lost(self) -> bool:
        """Whether it was sent ahead and the connection lost since: awaited, it will be sent again."""
        return self._sent is not None and self._sent.is_lost

    def __await__(self) -> Generator[Any, None, T]:
        return self._ask().__await__()

    async def _ask(self) -> T:
        return self._read(await _tried(self._retrying, self._try))

    async def _try(self) -> Rows:
        if self.is_lost:
            self._question = self._sent = None
        question, self._question = self._question or self._next_try(), None
        sent, self._sent, self._written = self._sent, None, None
        return await self._answer(*question, sent)


class Flush:
    """Waits for the disk on behalf of a claim that does not, and that is sent after this was made ready.

    It goes with the connection that stands then: a server to which another one leads may have crashed in between, and
    have lost the claim.
    """

    def __init__(self, link: AnyLink, written: Written) -> None:
        self._link = link
        self._written = written

    def send(self, then: Callable[[bool], None]) -> None:
        """Sends it, and says whether it has succeeded."""
        try:
            sent = self._link.send(self._written)
        except psycopg.Error:
            sent = None
        if sent is None:
            then(False)
        else:
            sent.answer.add_done_callback(
                lambda answer: then(not answer.cancelled() and answer.exception() is None)
            )


def _of_lane(
    claim: Mapping[str, object], topics: Sequence[str], budgets: Sequence[int], lane: Mapping[str, Any]
) -> dict[str, object]:
    """The arguments of outbox_claim_lane, of those of the claim and its only lane."""
    return {
        "p_token": claim["p_token"],
        "p_worker": claim["p_worker"],
        "p_topic": lane["topic"],
        "p_generation": lane["generation"],
        "p_lapses": lane["lapses"],
        "p_priority": lane["priority"],
        "p_next_run_at": lane["next_run_at"],
        "p_seq": lane["seq"],
        "p_limit": min(claim["p_limit"], lane["quota"]),
        "p_lease": claim["p_lease"],
        "p_budget": budgets[topics.index(lane["topic"])],
        "p_slots": claim["p_slots"],
        "p_try": claim["p_try"],
        "p_together": claim["p_together"],
        "p_now": claim["p_now"],
    }


def _listing_of(rows: Rows) -> Listing:
    *_, looked_at, took = rows[0]
    return Listing([Lane._make(row[:-2]) for row in rows if row[0] is not None], looked_at, took)


async def _tried(
    retrying: AsyncRetrying, call: Callable[..., Awaitable[Rows]], *arguments: Any, **named: Any
) -> Rows:
    """Calls, and hands over to tenacity only what fails: most calls succeed, and it costs as much as the call."""
    failed: BaseException | None
    try:
        return await call(*arguments, **named)
    except psycopg.Error as error:
        if not is_retryable(error):
            raise
        failed = error

    async def again() -> Rows:
        nonlocal failed
        if failed is not None:
            first, failed = failed, None
            raise first  # the first attempt, as it was
        return await call(*arguments, **named)

    rows: Rows = await retrying(again)
    return rows


_ALERT_COLUMNS = tuple(field.name for field in fields(DeadLetter))

# What psycopg could not know of a parameter that is null or a list.
_TYPES = {
    "p_payload": "jsonb",
    "p_lanes": "jsonb",
    "p_failures": "jsonb[]",
    "p_handlers": "jsonb",
    "p_topics": "text[]",
    "p_quiet_topics": "text[]",
    "p_quiet_classes": "text[]",
    "p_errors": "text[]",
    "p_budgets": "integer[]",
    "p_generations": "bigint[]",
    "p_rates": "real[]",
    "p_event_ids": "uuid[]",
    "p_tokens": "uuid[]",
    "p_delays": "interval[]",
    "p_terminal": "boolean[]",
    "p_limit": "integer",
    "p_lapses": "smallint",
    "p_priority": "smallint",
    "p_generation": "bigint",
    "p_seq": "bigint",
    "p_budget": "integer",
    "p_next_run_at": "timestamptz",
    "p_slots": "integer",
    "p_try": "integer",
    "p_pages": "integer",
    "p_pid": "integer",
    "p_in_flight": "integer",
    "p_page": "bigint",
    "p_completed": "bigint",
    "p_new_generation": "bigint",
    "p_now": "timestamptz",
    "p_token": "uuid",
    "p_alert_id": "uuid",
    "p_request": "uuid",
    "event_id": "uuid",
    "p_lease": "interval",
    "p_retention": "interval",
    "p_delete": "boolean",
    "p_dead": "boolean",
    "p_fresh": "boolean",
    "p_full": "boolean",
    "p_alone": "boolean",
    "p_together": "boolean",
    "p_sleeping": "boolean",
}


# Text is made of a payload when its row is sent: a function's result that held the texts of a whole batch would go
# through a file as soon as they are large. A column costs both sides, so a claim of one lane is not told what it knows.
_CLAIM_COLUMNS = [
    {"payload": "payload::text", "headers": "nullif(headers, '{{}}')::text", "raw_id": "event_id"}.get(
        name, name.removeprefix("raw_")
    )
    for name in Claim._fields
]
_CLAIM: LiteralString = "select {} from {{}}({{}})"
_UNFLUSHED = b" where (select pg_catalog.set_config('synchronous_commit', 'off', true)) is not null"
_QUERIES: dict[str, LiteralString] = {
    "outbox_claim": _CLAIM.format(", ".join(_CLAIM_COLUMNS[: Claim._fields.index("raw_token")])),
    "outbox_claim_lane": _CLAIM.format(", ".join(_CLAIM_COLUMNS[: Claim._fields.index("topic")])),
    # The server's own time, since a busy client is late to see the answer. A row even when there is no lane.
    "outbox_lanes": """
        select l.*, statement_timestamp(), date_part('epoch', clock_timestamp() - statement_timestamp())
          from (select) as always left join {}({}) as l on true
        """,
}


def _call_of(schema: str, function: str, arguments: Iterable[str]) -> bytes:
    given = sql.SQL(", ").join(
        sql.SQL("{} => %s::{}").format(sql.Identifier(name), sql.SQL(_TYPES.get(name, "text")))
        for name in arguments
    )
    query = sql.SQL(_QUERIES.get(function, "select * from {}({})"))
    return query.format(sql.Identifier(schema, function), given).as_bytes(None)


class UuidArray(bytes):
    """An array of UUIDs in PostgreSQL's binary form: psycopg would take ten times as long over a list."""

    def uuids(self) -> list[UUID]:
        """Its elements."""
        return [UUID(bytes=self[at - 16 : at]) for at in range(40, len(self) + 1, 20)]


class _ArrayDumper(Dumper):
    format = Format.BINARY
    oid = 2951  # uuid[]

    def dump(self, obj: UuidArray) -> bytes:
        return obj


psycopg.adapters.register_dumper(UuidArray, _ArrayDumper)

_UUID_OID = 2950
_ARRAY_OF = struct.Struct("!iiIii").pack
"""Dimensions, whether there are nulls, type; then the length and the lower bound of the only dimension."""
_SIXTEEN_BYTES = (16).to_bytes(4)


def _uuids(values: Sequence[bytes]) -> UuidArray:
    elements = _SIXTEEN_BYTES.join(values)
    return UuidArray(_ARRAY_OF(1, 0, _UUID_OID, len(values), 1) + _SIXTEEN_BYTES + elements)


# psycopg takes long over lists and intervals: 70 µs for those of one failure, 20 µs for those that every claim repeats,
# and three times as long after a pause, when an event that comes alone waits for it.


def _array(values: Sequence[str] | Sequence[int] | None) -> str | None:
    """The text of an array that is sent again and again."""
    return None if values is None else _known_array(tuple(values))


@functools.lru_cache(maxsize=64)
def _known_array(values: tuple[str | int, ...]) -> str:
    return _array_text(values)


def _array_text(values: Iterable[str | int]) -> str:
    escaped = (str(value).replace("\\", r"\\").replace('"', r"\"") for value in values)
    return "{" + ",".join([f'"{value}"' for value in escaped]) + "}"


def _interval(value: timedelta) -> str:
    return f"{value.days} days {value.seconds} seconds {value.microseconds} microseconds"
