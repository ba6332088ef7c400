"""A small measurement on a database of yours, in a schema of its own that is dropped again.

What it tells is how quick this database and this machine are with a dispatcher beside them; comparisons with other
products, and the conditions that make a difference, are in benchmarks/ of the repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from pulse_outbox import schema as schemas
from pulse_outbox.dispatcher import Dispatcher
from pulse_outbox.errors import OutboxError
from pulse_outbox.events import Event, NewEvent
from pulse_outbox.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Sequence

TOPIC = "bench"
SINGLES = 300
"""Events that are enqueued one at a time."""
PINGS = 100
"""Events whose wait is measured, one at a time, on a dispatcher that has nothing else to do."""
PING_GAP = 0.02
BULK = 5000
WARM_UP = 10
DROP_TRIES = 5
PATIENCE = 120.0
"""How long a step may take, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found. Rates are per second, times in milliseconds."""

    server_version: str
    events: int
    payload_bytes: int
    enqueue_rate: float
    enqueue_p50_ms: float
    enqueue_p99_ms: float
    bulk_rate: float
    drain_rate: float
    latency_p50_ms: float
    latency_p99_ms: float


def measure(
    dsn: str,
    *,
    events: int = 10_000,
    payload_bytes: int = 100,
    concurrency: int = 100,
    batch: int = 500,
    report: Callable[[str], None] = lambda line: None,
) -> Measured:
    """Enqueues, drains and waits, in a schema that is gone afterwards, however this ends short of `kill -9`."""
    with _throw_away_schema(dsn, report) as schema:
        outbox = Outbox(schema)
        seen = _Seen()

        @outbox.handler(TOPIC)
        async def handle(event: Event[dict[str, Any]]) -> None:
            seen.note(event.payload["n"])

        payload = {"n": 0, "pad": "x" * max(0, payload_bytes - 20)}
        with psycopg.connect(dsn, autocommit=True, application_name="pulse-outbox bench") as conn:
            server_version = conn.info.parameter_status("server_version") or "unknown"
            report("enqueueing one at a time")
            singles = _enqueue_singles(conn, outbox, payload)
            report("enqueueing many at once")
            bulk_rate = _enqueue_bulk(conn, outbox, payload, events)
        report("draining")
        total = events + len(singles) + WARM_UP
        dispatcher = Dispatcher(outbox, dsn=dsn, concurrency=concurrency, batch=batch)
        drain_rate, waits = asyncio.run(
            _drain_and_ping(dispatcher, dsn, outbox, seen, payload, total, report)
        )
    return Measured(
        server_version=server_version,
        events=events,
        payload_bytes=payload_bytes,
        enqueue_rate=round(len(singles) / sum(singles), 1),
        enqueue_p50_ms=_quantile_ms(singles, 0.5),
        enqueue_p99_ms=_quantile_ms(singles, 0.99),
        bulk_rate=round(bulk_rate, 1),
        drain_rate=round(drain_rate, 1),
        latency_p50_ms=_quantile_ms(waits, 0.5),
        latency_p99_ms=_quantile_ms(waits, 0.99),
    )


@contextlib.contextmanager
def _throw_away_schema(dsn: str, report: Callable[[str], None]) -> Iterator[str]:
    name = f"pulse_bench_{secrets.token_hex(4)}"
    try:
        schemas.migrate(dsn, schema=name)
        report(f"measuring in schema {name}, which is dropped at the end")
        yield name
    finally:
        _drop(dsn, name)


def _drop(dsn: str, schema: str) -> None:
    """The schema, and the roles that its migration made; they are named after it, so nobody else's."""
    with psycopg.connect(dsn, autocommit=True, application_name="pulse-outbox bench") as conn:
        drop = sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(schema))
        for attempt in range(DROP_TRIES):
            try:
                conn.execute(drop)
                break
            except psycopg.errors.DeadlockDetected:
                # A dispatcher that was interrupted may still have a statement under way on the server.
                if attempt == DROP_TRIES - 1:
                    raise
        # Looked for first: even `if exists` asks for the right to drop one.
        made = conn.execute(
            "select rolname from pg_roles where rolname = any (%s)", [list(schemas.role_names(schema))]
        ).fetchall()
        for (role,) in made:
            conn.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def _enqueue_singles(conn: psycopg.Connection, outbox: Outbox, payload: dict[str, Any]) -> list[float]:
    """Seconds that each took, its commit included."""
    times = []
    for _ in range(SINGLES + WARM_UP):
        began = time.perf_counter()
        outbox.enqueue(conn, TOPIC, payload, outside_transaction=True)
        times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def _enqueue_bulk(conn: psycopg.Connection, outbox: Outbox, payload: dict[str, Any], events: int) -> float:
    began = time.perf_counter()
    for start in range(0, events, BULK):
        chunk = [NewEvent(TOPIC, payload) for _ in range(min(BULK, events - start))]
        with conn.transaction():
            outbox.enqueue_many(conn, chunk)
    return events / (time.perf_counter() - began)


class _Seen:
    """What the handler has seen: how many, since when, and when a numbered event came."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0.0
        self.last = 0.0
        self.starts: dict[int, float] = {}

    def note(self, number: int) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.count += 1
        if number:
            self.starts[number] = self.last


async def _drain_and_ping(
    dispatcher: Dispatcher,
    dsn: str,
    outbox: Outbox,
    seen: _Seen,
    payload: dict[str, Any],
    total: int,
    report: Callable[[str], None],
) -> tuple[float, list[float]]:
    """Events per second, and the seconds that single ones waited."""
    async with (
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn,
        _running(dispatcher),
    ):
        await _until(lambda: seen.count >= total, "the events were not all run")
        drain_rate = (total - 1) / (seen.last - seen.first)
        report("waiting")
        commits = {}
        for number in range(1, PINGS + 1):
            await asyncio.sleep(PING_GAP)
            await outbox.enqueue_async(conn, TOPIC, payload | {"n": number}, outside_transaction=True)
            commits[number] = time.perf_counter()
        await _until(lambda: len(seen.starts) == PINGS, "the single events were not all run")
    return drain_rate, [max(0.0, seen.starts[number] - commits[number]) for number in commits]


@contextlib.asynccontextmanager
async def _running(dispatcher: Dispatcher) -> AsyncIterator[None]:
    running = asyncio.create_task(dispatcher.run_async())
    try:
        yield
    finally:
        dispatcher.stop()
        await running


async def _until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise OutboxError(f"{complaint} within {PATIENCE:.0f} s: try fewer (--events)")
        await asyncio.sleep(0.005)


def _quantile_ms(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)] * 1000, 3)
