"""How long a job waits: on an idle system, and on one that works at half of what it can."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.bench import Bench, Entry, Outcome, Workload, everyone, ours
from benchmarks.driver import Task
from benchmarks.environments import OURS, Peer
from benchmarks.measures import latency_metrics, thinned
from benchmarks.postgres import observed, rows, vacuum_held_back

WARM_UP = 50
"""Jobs at the beginning that do not count."""
SETTLING = 1.5
"""What a worker gets to connect, listen and fall idle before the first job, in seconds."""


def idle(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """One job at a time on a system that has nothing else to do: from the commit to the handler's start."""
    with bench.database(entry) as dsn, contextlib.ExitStack() as stack:
        if dead := size.get("dead"):
            stack.enter_context(vacuum_held_back(dsn))
            bench.load(entry, dsn, dead)
            bench.call(
                entry.key, replace(_work(bench, entry, dsn, size, count=dead), handler="noop", seconds=120)
            )
        return _waits(bench, entry, dsn, count=size["count"], rate=size["rate"], size=size)


def steady(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """First how much producer and worker manage together, then half of that."""
    with bench.database(entry) as dsn:
        peak = _peak(bench, entry, dsn, size)
    half = max(1.0, peak / 2)
    with bench.database(entry) as dsn:
        outcome = _waits(bench, entry, dsn, count=int(half * size["seconds"]), rate=half, size=size)
    outcome.metrics |= {"peak": round(peak, 1), "asked": round(half, 1)}
    return outcome


def _peak(bench: Bench, entry: Entry, dsn: str, size: Mapping[str, Any]) -> float:
    """Jobs per second that are enqueued and run at the same time."""
    seconds = size["calibrate"]
    task = _work(bench, entry, dsn, size, count=10**9)
    with bench.start(entry.key, task) as worker:
        worker.go()
        time.sleep(SETTLING)
        bench.call(
            entry.key,
            Task(
                action="enqueue",
                dsn=dsn,
                count=10**7,
                batch=100,
                payload=bench.payload,
                seconds=seconds,
                options=dict(entry.options),
            ),
        )
        worker.stop()
        done = worker.wait_for("done", 60)
    starts = [when for _, when in done["starts"]]
    return (len(starts) - 1) / (starts[-1] - starts[0]) if len(starts) > 1 else 1.0


def _work(bench: Bench, entry: Entry, dsn: str, size: Mapping[str, Any], *, count: int) -> Task:
    return Task(
        action="work",
        dsn=dsn,
        count=count,
        payload=bench.payload,
        handler="record",
        concurrency=size["concurrency"],
        batch=size["batch"],
        seconds=3600,
        options=dict(entry.options),
    )


def _waits(
    bench: Bench, entry: Entry, dsn: str, *, count: int, rate: float, size: Mapping[str, Any]
) -> Outcome:
    count += WARM_UP
    produce = Task(
        action="enqueue",
        dsn=dsn,
        mode="paced",
        count=count,
        rate=rate,
        payload=bench.payload,
        seconds=count / rate * 2 + 10,
        options=dict(entry.options),
    )
    bench.postgres.settle(dsn)
    with (
        observed(dsn) as series,
        bench.start(entry.key, _work(bench, entry, dsn, size, count=count)) as worker,
        bench.start(entry.key, produce) as producer,
    ):
        worker.go()
        time.sleep(SETTLING)
        producer.go()
        produced = producer.wait_for("done", produce.seconds + 60)
        if produced["count"] < count:
            time.sleep(1)
            worker.stop()
        done = worker.wait_for("done", 120)
        settings = worker.settings
    commits = {int(number): float(when) for number, when in produced["commits"]}
    starts: dict[int, float] = {}
    for number, when in done["starts"]:
        starts.setdefault(int(number), float(when))
    counted = [number for number in commits if number >= WARM_UP and number in starts]
    # A worker may start before the producer has its answer: that is a wait below zero, and stays one.
    waits = [starts[number] - commits[number] for number in counted]
    spent = produced["ended"] - produced["started"]
    metrics = latency_metrics(waits) | {
        "jobs": float(len(waits)),
        "reached": round(produced["count"] / spent, 1) if spent else 0.0,
        "lost": float(len(commits) - len(starts.keys() & commits.keys())),
    }
    outcome = Outcome(
        metrics=metrics,
        settings=settings,
        latencies={"commit to start": thinned(waits)},
        database=series.as_dict(),
    )
    if size.get("durable") and entry.key == OURS:
        _add_completions(outcome, dsn, {number: commits[number] for number in counted})
    return outcome


def _add_completions(outcome: Outcome, dsn: str, commits: Mapping[int, float]) -> None:
    """From the commit of the job to the commit of its completion, by the server's commit timestamps."""
    offset = time.time() - time.monotonic()
    completed = rows(
        dsn,
        "select (payload ->> 'n')::bigint, extract(epoch from pg_xact_commit_timestamp(xmin))::double precision "
        "from pulse.outbox where status = 'COMPLETED'",
    )
    waits = [when - offset - commits[number] for number, when in completed if number in commits]
    outcome.metrics |= latency_metrics(waits, "durable_")
    outcome.latencies["commit to durable completion"] = thinned(waits)


def _of_many_topics(peers: Sequence[Peer]) -> list[Entry]:
    if not any(peer.key == OURS for peer in peers):
        return []
    return [ours(f"{number} topics", topics=number) for number in (1, 8, 30)]


WORKLOADS = (
    Workload(
        name="idle-latency",
        title="Idle latency: commit to handler start",
        better="-p50_ms",
        entries=everyone,
        run=idle,
        sizes={"count": 1000, "rate": 50.0, "concurrency": 100, "batch": 500},
        quick={"count": 100},
    ),
    Workload(
        name="idle-topics",
        title="Idle latency of a dispatcher of many topics",
        better="-p50_ms",
        entries=_of_many_topics,
        run=idle,
        sizes={"count": 600, "rate": 50.0, "concurrency": 100, "batch": 500},
        quick={"count": 100},
    ),
    Workload(
        name="idle-held",
        title="The same behind 200,000 dead rows, vacuum held back",
        better="-p50_ms",
        entries=everyone,
        run=idle,
        sizes={"count": 400, "rate": 50.0, "dead": 200_000, "concurrency": 100, "batch": 500},
        quick={"count": 100, "dead": 5_000},
    ),
    Workload(
        name="steady",
        title="Steady load at half of the peak",
        better="-p50_ms",
        entries=everyone,
        run=steady,
        sizes={"seconds": 20.0, "calibrate": 5.0, "concurrency": 100, "batch": 500, "durable": True},
        quick={"seconds": 3.0, "calibrate": 1.5},
        server={"track_commit_timestamp": "on"},
    ),
)
