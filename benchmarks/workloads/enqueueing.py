"""What a producer pays."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import psycopg

from benchmarks.bench import Bench, Entry, Outcome, Workload, everyone, ours
from benchmarks.driver import Task, payload_of
from benchmarks.environments import OURS, Peer
from benchmarks.measures import latency_metrics, median, thinned
from pulse_outbox import Outbox
from pulse_outbox.events import uuid7

WARM_UP = 50
POLL = 0.1
"""Of both dispatchers, in seconds, so that they differ in nothing else. One that is notified falls asleep all the same;
with the usual poll the other would sleep through the first seconds, and what it does not do would count for it."""


def enqueue(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """One producer: each job in its own transaction, or many at once."""
    with bench.database(entry) as dsn:
        bench.postgres.settle(dsn)
        task = Task(
            action="enqueue",
            dsn=dsn,
            mode=size["mode"],
            count=size["count"],
            batch=bench.bulk(size.get("batch", 1)),
            payload=bench.payload,
            seconds=size["seconds"],
            options=dict(entry.options),
        )
        with bench.start(entry.key, task) as driver:
            before = bench.postgres.cpu_seconds
            driver.go()
            done = driver.wait_for("done", task.seconds + 120)
            used = bench.postgres.cpu_seconds - before
            settings = driver.settings
    metrics = {
        "rate": round(done["count"] / (done["ended"] - done["started"]), 1),
        "cpu_server": round(used / done["count"] * 1e6, 2),
    }
    return Outcome(
        metrics=metrics | (latency_metrics(done["times"]) if done["times"] else {}),
        settings=settings,
        latencies={"enqueue": thinned(done["times"])} if done["times"] else {},
    )


def against_insert(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """Our enqueue and a bare INSERT of the same row into the same table, in turn, call by call, one server."""
    with bench.database(entry) as dsn, _dispatcher(bench, entry, dsn), psycopg.connect(dsn) as conn:
        bench.postgres.settle(dsn)
        times: dict[str, list[float]] = {"enqueue": [], "insert": []}
        outbox = Outbox(max_payload_bytes=200_000_000)
        for number in range(size["count"] + WARM_UP):
            payload = payload_of(number, bench.payload)
            row = _row(uuid7(), json.dumps(payload))
            # The order changes too: the second of two calls finds warmer caches.
            for who in ("enqueue", "insert") if number % 2 else ("insert", "enqueue"):
                began = time.perf_counter()
                with conn.transaction():
                    if who == "enqueue":
                        outbox.enqueue(conn, "bench", payload)
                    else:
                        conn.execute(_INSERT, row)
                if number >= WARM_UP:
                    times[who].append(time.perf_counter() - began)
    enqueues, inserts = times["enqueue"], times["insert"]
    return Outcome(
        metrics={
            "ratio": round(sum(inserts) / sum(enqueues), 3),
            "median_ratio": round(median(inserts) / median(enqueues), 3),
            "rate": round(len(enqueues) / sum(enqueues), 1),
            "insert_rate": round(len(inserts) / sum(inserts), 1),
        }
        | latency_metrics(enqueues)
        | latency_metrics(inserts, "insert_"),
        settings="psycopg, one connection, `with conn.transaction():` around each",
        latencies={"enqueue": thinned(enqueues), "bare INSERT": thinned(inserts)},
    )


# What outbox_enqueue writes, with every value at hand.
_INSERT = """
insert into pulse.outbox (
  event_id, topic, payload, headers, idempotency_key, priority, generation, next_run_at, created_at, holds_key, parked)
values (%s, %s, %s::jsonb, '{}', %s, 0, 0, clock_timestamp(), clock_timestamp(), true, false)
"""


def _row(event_id: UUID, payload: str) -> tuple[UUID, str, str, str]:
    return event_id, "bench", payload, str(event_id)


def producers(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """Many producers at once, each a process of its own, while a dispatcher runs what they write."""
    each = size["count"] // size["producers"]
    with bench.database(entry) as dsn, _dispatcher(bench, entry, dsn), contextlib.ExitStack() as stack:
        bench.postgres.settle(dsn)
        drivers = [
            stack.enter_context(
                bench.start(
                    entry.key,
                    Task(
                        action="enqueue",
                        dsn=dsn,
                        mode="single",
                        count=each,
                        first=number * each,
                        payload=bench.payload,
                        seconds=size["seconds"],
                    ),
                )
            )
            for number in range(size["producers"])
        ]
        for driver in drivers:
            driver.go()
        done = [driver.wait_for("done", size["seconds"] + 120) for driver in drivers]
    began, ended = min(one["started"] for one in done), max(one["ended"] for one in done)
    times = [duration for one in done for duration in one["times"]]
    return Outcome(
        metrics={"rate": round(sum(one["count"] for one in done) / (ended - began), 1)}
        | latency_metrics(times),
        settings=f"{size['producers']} processes, dispatcher: {_KINDS[entry.options['dispatcher']]}",
        latencies={"enqueue": thinned(times)},
    )


@contextlib.contextmanager
def _dispatcher(bench: Bench, entry: Entry, dsn: str) -> Iterator[None]:
    """The dispatcher that the entry asks for: none, one that listens, or one that only polls."""
    kind = entry.options.get("dispatcher", "none")
    if kind == "none":
        yield
        return
    task = Task(
        action="work",
        dsn=dsn,
        count=10**9,
        seconds=3600,
        payload=bench.payload,
        options={"notify": kind == "notify", "poll": POLL},
    )
    with bench.start(entry.key, task) as worker:
        worker.go()
        time.sleep(1.5)  # until it has fallen asleep
        yield
        worker.stop()
        worker.wait_for("done", 60)


_KINDS = {
    "notify": f"is notified, and polls every {POLL * 1000:.0f} ms",
    "poll": f"polls every {POLL * 1000:.0f} ms",
}


def _dispatchers(peers: Sequence[Peer], kinds: Mapping[str, str]) -> list[Entry]:
    if not any(peer.key == OURS for peer in peers):
        return []
    return [ours(label, dispatcher=kind) for label, kind in kinds.items()]


def _beside_dispatchers(peers: Sequence[Peer]) -> list[Entry]:
    kinds = {"no dispatcher": "none", "dispatcher asleep": "notify", "dispatcher, notify off": "poll"}
    return _dispatchers(peers, kinds)


def _notify_on_and_off(peers: Sequence[Peer]) -> list[Entry]:
    return _dispatchers(peers, {"notify on": "notify", "notify off": "poll"})


WORKLOADS = (
    Workload(
        name="enqueue-single",
        title="Enqueue, one at a time, own transactions",
        better="+rate",
        entries=everyone,
        run=enqueue,
        sizes={"mode": "single", "count": 5000, "seconds": 20.0},
        quick={"count": 300},
    ),
    Workload(
        name="enqueue-bare",
        title="Enqueue against a bare INSERT of the same row",
        better="+ratio",
        entries=_beside_dispatchers,
        run=against_insert,
        sizes={"count": 3000},
        quick={"count": 200},
    ),
    Workload(
        name="enqueue-bulk",
        title="Bulk enqueue",
        better="+rate",
        entries=everyone,
        run=enqueue,
        sizes={"mode": "bulk", "count": 100_000, "batch": 5000, "seconds": 20.0},
        quick={"count": 10_000},
    ),
    Workload(
        name="enqueue-bulk-100kb",
        title="Bulk enqueue of 100 kB of payload",
        better="+rate",
        entries=everyone,
        run=enqueue,
        sizes={"mode": "bulk", "count": 5000, "batch": 500, "seconds": 20.0, "payload": 100_000},
        quick={"count": 500},
    ),
    Workload(
        name="producers-16",
        title="16 producers at once",
        better="+rate",
        entries=_notify_on_and_off,
        run=producers,
        sizes={"producers": 16, "count": 16_000, "seconds": 60.0},
        quick={"count": 800},
    ),
)
