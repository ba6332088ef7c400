"""The test kit: runs an application's events through its own handlers, on a real database and on simulated time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload
from uuid import UUID

import psycopg
from psycopg import sql

from pulse_outbox.dispatcher.transactions import Transactions
from pulse_outbox.errors import EventNotFound, OutboxError, SettingsError
from pulse_outbox.link import Link
from pulse_outbox.outbox import Outbox
from pulse_outbox.store import Store
from pulse_outbox.testing.bench import Ran, open_bench
from pulse_outbox.testing.crashing import Crash
from pulse_outbox.testing.links import Borrowed, BorrowedTransactions, is_async
from pulse_outbox.testing.loop import Loop
from pulse_outbox.testing.reading import StoredEvent, Wanted, describe, read_events

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from typing import TypedDict

    from pulse_outbox.claims import Claim, Lane
    from pulse_outbox.dispatcher.running import RunsInTransaction
    from pulse_outbox.events import Event
    from pulse_outbox.link import AnyLink
    from pulse_outbox.testing.bench import Bench
    from pulse_outbox.testing.crashing import CrashPoint

    class Fields(TypedDict, total=False):
        """What assert_enqueued compares beside topic and payload."""

        idempotency_key: str
        ordering_key: str | None
        headers: dict[str, Any]
        priority: int
        generation: int
        max_attempts: int | None
        source: str | None
        target: str | None
        next_run_at: datetime
        status: str


T = TypeVar("T")
P = TypeVar("P")

LEASE = timedelta(seconds=30)
WATCHDOG = timedelta(seconds=10)
# What a claim always looks at again: an event that is to be claimed by its place must be older.
LOOK_BACK = timedelta(milliseconds=101)
WORKER = "testkit"
NO_TRANSACTION = (
    "enqueued: no transaction is open on this connection; what is committed is found without a connection"
)

log = logging.getLogger("pulse_outbox.testing")
_NOT_GIVEN: Any = object()


class NeverEnds(OutboxError, AssertionError):
    """`drain` has run as many events as it may, and more are due."""


class TestKit:
    """Runs the events of one Outbox, one at a time, through the dispatcher's own parts.

    On a database (*dsn*) or inside the test's own transaction (*connection*: whatever `enqueue` takes). Time is
    simulated: it stands still, except that it is never before the newest event, until `advance` moves it.

    Methods that end in `_async` are for async tests: handlers then run in the test's event loop. The others run async
    handlers in a loop of the kit's own, and sync handlers in the test's thread.
    """

    __test__ = False

    def __init__(
        self,
        outbox: Outbox,
        *,
        dsn: str | None = None,
        connection: object = None,
        resources: Any = _NOT_GIVEN,
        loop: Loop | None = None,
    ) -> None:
        given: object = outbox
        if not isinstance(given, Outbox):
            raise SettingsError(
                f"the test kit needs the application's Outbox, not {type(given).__qualname__}"
            )
        if (dsn is None) == (connection is None):
            raise SettingsError("the test kit needs either a dsn or a connection")
        self.outbox = outbox
        self.dsn = dsn
        self.resources = resources
        """What handlers get as `event.resources`; unless it is set, what the outbox's lifespan yields."""
        self._connection = connection
        self._own_loop = None if loop is not None else Loop()
        self._loop = loop or self._own_loop
        self._now = datetime.now(UTC)
        self._has_enqueued = False
        self._newest = sql.SQL("select coalesce(max(o.created_at), '2000-01-01 00:00Z') from {} as o").format(
            sql.Identifier(outbox.schema, "outbox")
        )
        self._swept: datetime | None = None
        self._crash: Crash | None = None
        # Seeded: a jittered delay is the same in every run of a test.
        self._random = random.Random(0)

    def __enter__(self) -> TestKit:
        self.outbox._simulated = self._ahead
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends simulated time for the outbox, and the kit's loop."""
        self.outbox._simulated = None
        if self._own_loop is not None:
            self._own_loop.close()

    # Time

    @property
    def now(self) -> datetime:
        """What time it is for the outbox."""
        return self._now

    def advance(self, time: timedelta | None = None, /, **parts: float) -> datetime:
        """Moves time on: `advance(hours=1)`, or by a timedelta. Retries and schedules become due, leases run out."""
        by = (time or timedelta()) + timedelta(**parts)
        if by < timedelta():
            raise SettingsError("advance: time goes forward only")
        self._now = self._not_before_newest() + by
        return self._now

    def _not_before_newest(self) -> datetime:
        """The present time, which is never before the newest event: what that waits for is counted from there."""
        if self.dsn is not None:
            # Not through the event loop, which an async test may be running.
            with psycopg.connect(self.dsn, autocommit=True) as conn:
                [(newest,)] = conn.execute(self._newest).fetchall()
            return newest if newest > self._now else self._now
        if not is_async(self._connection):
            return self._wait(self._newest_here)
        return max(self._now, datetime.now(UTC)) if self._has_enqueued else self._now

    async def _newest_here(self, here: Executor) -> datetime:
        async with self._link(here) as link:
            await self._note_newest(link)
        return self._now

    def _ahead(self) -> datetime | None:
        """The simulated time where it is ahead of the clock: a delay given now counts from there."""
        self._has_enqueued = True
        return self._now if self._now > datetime.now(UTC) else None

    # Running

    def run(self, event: UUID | StoredEvent[Any] | Event[Any] | Ran) -> Ran:
        """Claims this event, which must be due, runs its handler and stores what came of it."""
        return self._wait(lambda here: self._run(_id_of(event), here))

    async def run_async(self, event: UUID | StoredEvent[Any] | Event[Any] | Ran) -> Ran:
        """`run`, in the test's event loop."""
        return await self._run(_id_of(event), None)

    def drain(self, *, limit: int = 1000) -> list[Ran]:
        """Runs everything that is due, and what becomes due by that, until nothing is; NeverEnds after *limit* runs.

        The oldest first, within a topic by priority. A crash ends it, as it would end a process.
        """
        return self._wait(lambda here: self._drain(limit, here))

    async def drain_async(self, *, limit: int = 1000) -> list[Ran]:
        """`drain`, in the test's event loop."""
        return await self._drain(limit, None)

    @contextmanager
    def crash_at(self, point: CrashPoint, *, topic: str | None = None) -> Iterator[None]:
        """Lets every run inside, or those of one topic, stop at this point as if the process had been killed.

        The row stays RUNNING under its lease (after `after_complete`: as it was stored). `advance` past the lease
        (30 s) and run again, to see whether the handler does its work twice.
        """
        if self._crash is not None:
            raise SettingsError("crash_at: one crash point at a time")
        self._crash = crash = Crash(point, topic)
        try:
            yield
        finally:
            self._crash = None
        assert crash.crashed, f"nothing crashed: no run reached {point} inside crash_at"

    # Looking

    def event(self, event: UUID | StoredEvent[Any] | Event[Any] | Ran) -> StoredEvent[Any]:
        """The event as it is stored now."""
        return self._wait(lambda here: self._event(_id_of(event), here))

    async def event_async(self, event: UUID | StoredEvent[Any] | Event[Any] | Ran) -> StoredEvent[Any]:
        """`event`, in the test's event loop."""
        return await self._event(_id_of(event), None)

    @overload
    def enqueued(self, connection: object = ..., *, topic: str | None = ...) -> list[StoredEvent[Any]]: ...
    @overload
    def enqueued(
        self, connection: object = ..., *, topic: str | None = ..., payload_type: type[P]
    ) -> list[StoredEvent[P]]: ...
    def enqueued(
        self, connection: object = None, *, topic: str | None = None, payload_type: Any = None
    ) -> list[StoredEvent[Any]]:
        """Events in the order in which they were enqueued: with a *connection*, those of its open transaction.

        Without one all that are committed, or, where the kit has a connection, all of its transaction.
        """
        return self._wait(lambda here: self._enqueued(connection, topic, payload_type, here))

    @overload
    async def enqueued_async(
        self, connection: object = ..., *, topic: str | None = ...
    ) -> list[StoredEvent[Any]]: ...
    @overload
    async def enqueued_async(
        self, connection: object = ..., *, topic: str | None = ..., payload_type: type[P]
    ) -> list[StoredEvent[P]]: ...
    async def enqueued_async(
        self, connection: object = None, *, topic: str | None = None, payload_type: Any = None
    ) -> list[StoredEvent[Any]]:
        """`enqueued`, in the test's event loop."""
        return await self._enqueued(connection, topic, payload_type, None)

    def assert_enqueued(
        self,
        connection: object = None,
        *,
        topic: str,
        payload: object = None,
        count: int | None = None,
        **fields: Unpack[Fields],
    ) -> list[StoredEvent[Any]]:
        """Fails unless such an event, or exactly *count* of them, has been enqueued; returns those.

        A *payload* that is a mapping names some of the fields, anything else is compared as a whole.
        """
        __tracebackhide__ = True  # pytest shows the test's own line
        found = self.enqueued(connection)
        return _judged(found, Wanted(topic=topic, payload=payload, fields=fields), count)

    async def assert_enqueued_async(
        self,
        connection: object = None,
        *,
        topic: str,
        payload: object = None,
        count: int | None = None,
        **fields: Unpack[Fields],
    ) -> list[StoredEvent[Any]]:
        """`assert_enqueued`, in the test's event loop."""
        __tracebackhide__ = True
        found = await self.enqueued_async(connection)
        return _judged(found, Wanted(topic=topic, payload=payload, fields=fields), count)

    def dead_letters(self, *, topic: str | None = None) -> list[StoredEvent[Any]]:
        """What has died, with the verdicts."""
        return self._wait(lambda here: self._dead_letters(topic, here))

    async def dead_letters_async(self, *, topic: str | None = None) -> list[StoredEvent[Any]]:
        """`dead_letters`, in the test's event loop."""
        return await self._dead_letters(topic, None)

    def replay(
        self, event: UUID | StoredEvent[Any] | Event[Any] | Ran, *, generation: int | None = None
    ) -> None:
        """Gives a dead letter another cycle, as an operator would; in its own generation unless one is given."""
        self._wait(lambda here: self._replay(_id_of(event), generation, here))

    async def replay_async(
        self, event: UUID | StoredEvent[Any] | Event[Any] | Ran, *, generation: int | None = None
    ) -> None:
        """`replay`, in the test's event loop."""
        await self._replay(_id_of(event), generation, None)

    # Inside: each of these once, whatever kind of test asks. *here* is the waiting test's thread, None in its own loop.

    def _wait(self, make: Callable[[Executor], Coroutine[Any, Any, T]]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            assert self._loop is not None
            return self._loop.run(make)
        raise SettingsError("this test is async: await the kit's methods that end in _async (drain_async, …)")

    @asynccontextmanager
    async def _link(self, here: Executor | None, connection: object = None) -> AsyncIterator[AnyLink]:
        given = connection if connection is not None else self._connection
        if given is not None:
            yield Borrowed(given, here, outside="" if connection is None else NO_TRANSACTION)
            return
        assert self.dsn is not None
        link = Link(self.dsn, name="pulse-outbox testkit")
        try:
            yield link
        finally:
            await link.close()

    @asynccontextmanager
    async def _store(self, here: Executor | None) -> AsyncIterator[tuple[AnyLink, Store]]:
        """A store on simulated time, which has caught up with what the application has done."""
        async with self._link(here) as link:
            store = Store(link, schema=self.outbox.schema, clock=lambda: self._now)
            await store.require_supported()
            await self._catch_up(link, store)
            yield link, store

    async def _catch_up(self, link: AnyLink, store: Store) -> None:
        """Time is at least that of the newest event, and the watchdog has swept until now as often as it does."""
        await self._note_newest(link)
        # The first sweep in a long while only sets a hold of one lease: two leases of sweeps are enough, none less.
        tick = max(self._swept or self._now, self._now - 2 * LEASE)
        while self._swept is None or self._swept < self._now:
            await store.reap(lease=LEASE, now=tick)
            self._swept = tick
            tick = min(tick + WATCHDOG, self._now)

    async def _note_newest(self, link: AnyLink) -> None:
        [(newest,)] = await link.rows(self._newest.as_bytes(None), ())
        self._now = max(self._now, newest)
        self._has_enqueued = False

    @asynccontextmanager
    async def _bench(self, link: AnyLink, store: Store, here: Executor | None) -> AsyncIterator[Bench]:
        async with AsyncExitStack() as stack:
            bench = open_bench(
                link,
                store,
                threads=here if here is not None else 4,
                transactions=await stack.enter_async_context(self._transactions()),
                resources=await stack.enter_async_context(self._resources()),
                topics=self.outbox.handlers,
                redact=self.outbox.redact,
                random=self._random,
            )
            yield await stack.enter_async_context(bench)

    @asynccontextmanager
    async def _transactions(self) -> AsyncIterator[RunsInTransaction | None]:
        schema = self.outbox.schema
        if not any(handler.transactional for handler in self.outbox.handlers.values()):
            yield None
        elif self._connection is not None:
            yield BorrowedTransactions(self._connection, schema=schema, clock=lambda: self._now)
        else:
            assert self.dsn is not None
            transactions = Transactions(self.dsn, schema=schema, size=2, clock=lambda: self._now)
            await transactions.open()
            try:
                yield transactions
            finally:
                await transactions.close()

    @asynccontextmanager
    async def _resources(self) -> AsyncIterator[Any]:
        if self.resources is not _NOT_GIVEN:
            yield self.resources
            return
        async with self.outbox.open_resources() as resources:
            yield resources

    async def _run(self, event_id: UUID, here: Executor | None) -> Ran:
        async with self._store(here) as (link, store):
            event = await self._read_one(link, event_id)
            handler = self.outbox.handlers.get(event.topic)
            if handler is None:
                known = ", ".join(sorted(self.outbox.handlers)) or "none"
                raise SettingsError(f"{event.topic!r} has no handler (registered: {known})")
            claim = await self._claim_one(link, store, event)
            async with self._bench(link, store, here) as bench:
                return await bench.run(claim, handler, self._crash)

    async def _claim_one(self, link: AnyLink, store: Store, event: StoredEvent[Any]) -> Claim:
        if event.status not in ("PENDING", "RETRYING"):
            raise SettingsError(f"{event.topic} {event.id} is {event.status} and can't be run{_hint(event)}")
        if event.next_run_at > self._now:
            raise SettingsError(
                f"{event.topic} {event.id} is due in {event.next_run_at - self._now}: advance() the time first"
            )
        self._now = max(self._now, event.next_run_at + LOOK_BACK)
        query = sql.SQL(
            "select o.event_id, o.generation, o.lapses, o.priority, o.next_run_at, o.seq from {} as o "
            "where o.event_id = %s::uuid"
        ).format(sql.Identifier(self.outbox.schema, "outbox"))
        [(_, *place)] = await link.rows(query.as_bytes(None), [event.id])
        names = ("generation", "lapses", "priority", "next_run_at", "seq")
        lane = {"topic": event.topic, "quota": 1, **dict(zip(names, place, strict=True))}
        lane["next_run_at"] = lane["next_run_at"].isoformat()
        claims = await self._claim(store, [lane])
        if [claim.event_id for claim in claims] == [event.id]:
            return claims[0]
        await store.release(claims)
        if event.ordering_key is not None:
            raise SettingsError(
                f"{event.topic} {event.id} waits for an earlier event of its ordering key {event.ordering_key!r}"
            )
        raise SettingsError(
            f"{event.topic} {event.id} can't be claimed: is the topic paused, or the row locked?"
        )

    async def _claim(self, store: Store, lanes: list[dict[str, Any]]) -> list[Claim]:
        topics = sorted(self.outbox.handlers)
        return await store.claim(
            limit=1,
            topics=topics,
            worker=WORKER,
            lease=LEASE,
            budgets=[self.outbox.handlers[topic].retry.max_attempts for topic in topics],
            lanes=lanes,
        )

    async def _drain(self, limit: int, here: Executor | None) -> list[Ran]:
        ran: list[Ran] = []
        async with self._store(here) as (link, store), self._bench(link, store, here) as bench:
            while (claim := await self._claim_next(link, store)) is not None:
                if len(ran) >= limit:
                    await store.release([claim])
                    raise NeverEnds(_never_ends(ran))
                ran.append(await bench.run(claim, self.outbox.handlers[claim.topic], self._crash))
                if ran[-1].crashed_at is not None:
                    break
            else:
                await self._mention_unserved(link)
        return ran

    async def _claim_next(self, link: AnyLink, store: Store) -> Claim | None:
        """The next due event, if there is one."""
        await self._catch_up(link, store)
        while True:
            listing = await store.lanes(sorted(self.outbox.handlers))
            for lane in _in_order(lane for lane in listing.lanes if lane.due_in <= 0):
                asked = {**lane._asdict(), "quota": 1, "next_run_at": lane.next_run_at.isoformat()}
                if claims := await self._claim(store, [asked]):
                    return claims[0]
            # Nothing; or keys that a race left without a head, which a dispatcher frees within a second.
            if not (await store.heal())[1]:
                return None

    async def _mention_unserved(self, link: AnyLink) -> None:
        condition = "o.status in ('PENDING', 'RETRYING') and array_position(%s::text[], o.topic) is null"
        waiting = await read_events(
            link, self.outbox.schema, {}, condition=condition, values=[sorted(self.outbox.handlers)]
        )
        for topic, number in Counter(event.topic for event in waiting).items():
            log.warning("drain left %s event(s) of %r alone: the topic has no handler here", number, topic)

    async def _event(self, event_id: UUID, here: Executor | None) -> StoredEvent[Any]:
        async with self._store(here) as (link, _):
            return await self._read_one(link, event_id)

    async def _read_one(self, link: AnyLink, event_id: UUID) -> StoredEvent[Any]:
        found = await self._read(link, condition="o.event_id = %s::uuid", values=[event_id])
        if not found:
            raise EventNotFound(
                f"there is no event {event_id}: is its transaction committed? (where topics delete completed "
                "events it may be gone)"
            )
        return found[0]

    async def _enqueued(
        self, connection: object, topic: str | None, payload_type: Any, here: Executor | None
    ) -> list[StoredEvent[Any]]:
        async with self._link(here, connection) as link:
            mine = isinstance(link, Borrowed)
            if connection is not None:
                await _require_open(link)
            return await self._read(
                link, **_of_topic(topic), this_transaction=mine, payload_type=payload_type
            )

    async def _dead_letters(self, topic: str | None, here: Executor | None) -> list[StoredEvent[Any]]:
        async with self._store(here) as (link, _):
            found = await self._read(link, **_of_topic(topic))
            return [event for event in found if event.status == "DEAD_LETTERED"]

    async def _replay(self, event_id: UUID, generation: int | None, here: Executor | None) -> None:
        async with self._store(here) as (link, store):
            if generation is None:
                generation = (await self._read_one(link, event_id)).generation
            await store.replay(event_id, generation=generation, replayed_by=WORKER)

    async def _read(self, link: AnyLink, **wanted: Any) -> list[StoredEvent[Any]]:
        return await read_events(link, self.outbox.schema, self.outbox.handlers, **wanted)


def _id_of(event: object) -> UUID:
    found = getattr(event, "id", event)
    if isinstance(found, str):
        found = UUID(found)
    if not isinstance(found, UUID):
        raise SettingsError(f"an event or its id is needed, not {type(event).__qualname__}")
    return found


def _of_topic(topic: str | None) -> dict[str, Any]:
    return {} if topic is None else {"condition": "o.topic = %s::text", "values": [topic]}


async def _require_open(link: AnyLink) -> None:
    [(_, begun_by_us)] = await link.rows(b"select null, transaction_timestamp() = statement_timestamp()", ())
    if begun_by_us:
        raise SettingsError(NO_TRANSACTION)


def _in_order(lanes: Iterator[Lane]) -> list[Lane]:
    """The oldest first; of a topic, its highest priority first."""
    by_topic: dict[str, list[Lane]] = {}
    for lane in lanes:
        by_topic.setdefault(lane.topic, []).append(lane)
    for of_topic in by_topic.values():
        of_topic.sort(key=lambda lane: (-lane.priority, lane.next_run_at, lane.seq))
    topics = sorted(by_topic.values(), key=lambda found: min((lane.next_run_at, lane.seq) for lane in found))
    return [lane for of_topic in topics for lane in of_topic]


def _judged(found: list[StoredEvent[Any]], wanted: Wanted, count: int | None) -> list[StoredEvent[Any]]:
    __tracebackhide__ = True
    fitting = [event for event in found if wanted.fits(event)]
    if fitting if count is None else len(fitting) == count:
        return fitting
    number = f"exactly {count}" if count is not None else "at least one"
    raise AssertionError(
        f"{len(fitting) or 'no'} such event was enqueued, {number} is expected:\n  {wanted}\n"
        f"enqueued:\n{describe(found, wanted.fields)}"
    )


def _never_ends(ran: list[Ran]) -> str:
    often = ", ".join(
        f"{topic} × {number}" for topic, number in Counter(run.topic for run in ran).most_common(3)
    )
    return (
        f"drain has run {len(ran)} events and more are due ({often}): does a handler enqueue itself again, or retry "
        "without a delay? drain(limit=…) if that many are meant"
    )


def _hint(event: StoredEvent[Any]) -> str:
    match event.status:
        case "RUNNING":
            return f": advance() past the lease of {event.locked_by}, {LEASE.total_seconds():g} s"
        case "DEAD_LETTERED":
            return ": replay() it first"
        case _:
            return " again"
