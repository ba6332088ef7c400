"""What size does: a long backlog, several dispatchers, many jobs in flight, many hours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg

from benchmarks.bench import Bench, Entry, Outcome, Workload, ours
from benchmarks.driver import Task
from benchmarks.environments import OURS, Peer
from benchmarks.machine import cpu_seconds, memory
from benchmarks.measures import latency_metrics, median, slope, thinned
from benchmarks.postgres import observed, rows

FILL_CHUNK = 500_000
FEW = 1000


def backlog(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """The time of a claim at the head of a long queue and of a short one, in turn, call by call."""
    with bench.database(entry) as long_dsn, bench.database(entry) as short_dsn:
        queues = {"long": _Queue(long_dsn, size["count"]), "short": _Queue(short_dsn, FEW)}
        for queue in queues.values():
            bench.postgres.settle(queue.dsn)
        times: dict[str, list[float]] = {name: [] for name in queues}
        listings: list[float] = []
        for number in range(size["claims"] + 10):
            for name, queue in queues.items():
                listed, claimed = queue.claim(size["batch"])
                if number >= 10:
                    times[name].append(claimed)
                    if name == "long":
                        listings.append(listed)
        for queue in queues.values():
            queue.close()
    return Outcome(
        metrics={
            "claim_ratio": round(median(times["long"]) / median(times["short"]), 3),
            "claim_ms": round(median(times["long"]) * 1000, 3),
            "lanes_ms": round(median(listings) * 1000, 3),
        }
        | latency_metrics(times["long"]),
        settings=f"{size['count']:,} and {FEW:,} waiting, claims of {size['batch']}, no wait for the disk",
        latencies={"long": thinned(times["long"]), "short": thinned(times["short"])},
    )


class _Queue:
    """A queue that is kept at its length: what was claimed is completed, and as much is enqueued."""

    def __init__(self, dsn: str, length: int) -> None:
        self.dsn = dsn
        self._next = 0
        self._conn = psycopg.connect(dsn, autocommit=True)
        # Both would wait equally long for the disk, which would hide what the length does.
        self._conn.execute("set synchronous_commit = off")
        for start in range(0, length, FILL_CHUNK):
            self._fill(min(FILL_CHUNK, length - start))
        self._place: tuple[datetime, int] = (datetime(2000, 1, 1, tzinfo=UTC), 0)

    def _fill(self, count: int) -> None:
        # Ids in the order of time, as uuid7 makes them, but without its cost.
        self._conn.execute(_FILL, {"first": self._next, "count": count})
        self._next += count

    def claim(self, batch: int) -> tuple[float, float]:
        """Seconds that listing the lanes took, and the claim."""
        began = time.perf_counter()
        self._conn.execute("select * from pulse.outbox_lanes('{bench}')").fetchall()
        listed = time.perf_counter() - began
        token = uuid4()
        due, seq = self._place
        began = time.perf_counter()
        claimed = self._conn.execute(_CLAIM, [token, due, seq, batch, batch]).fetchall()
        seconds = time.perf_counter() - began
        assert len(claimed) == batch
        self._place = max((due, seq + 1) for _, due, seq in claimed)
        ids = [event_id for event_id, _, _ in claimed]
        self._conn.execute(
            "select * from pulse.outbox_complete(p_event_ids => %s::uuid[], p_tokens => %s::uuid[])",
            [ids, [token] * len(ids)],
        )
        self._fill(batch)
        return listed, seconds

    def close(self) -> None:
        self._conn.close()


_FILL = """
insert into pulse.outbox (event_id, topic, payload, idempotency_key)
select made.id, 'bench', jsonb_build_object('n', made.n), made.id::text
  from (select ('01900000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid as id, n
          from generate_series(%(first)s::bigint + 1, %(first)s::bigint + %(count)s::bigint) as n) as made
"""
_CLAIM = """
select event_id, next_run_at, seq
  from pulse.outbox_claim_lane(
         p_token => %s::uuid, p_worker => 'bench', p_topic => 'bench', p_generation => 0, p_lapses => 0::smallint,
         p_priority => 0::smallint, p_next_run_at => %s, p_seq => %s, p_limit => %s, p_lease => '30 s',
         p_budget => 5, p_slots => %s, p_try => 1)
"""


def dispatchers(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """One table, several dispatchers."""
    with bench.database(entry) as dsn:
        bench.load(entry, dsn, size["count"])
        task = Task(
            action="work",
            dsn=dsn,
            count=size["count"],
            payload=bench.payload,
            concurrency=size["concurrency"],
            batch=size["batch"],
            seconds=size["seconds"],
        )
        with contextlib.ExitStack() as stack:
            series = stack.enter_context(observed(dsn))
            workers = [
                stack.enter_context(bench.start(entry.key, task)) for _ in range(entry.options["dispatchers"])
            ]
            before = bench.postgres.cpu_seconds
            for worker in workers:
                worker.go()
            _wait_until_empty(dsn, size["seconds"])
            ended = time.monotonic()
            server_used = bench.postgres.cpu_seconds - before
            for worker in workers:
                worker.stop()
            done = [worker.wait_for("done", 60) for worker in workers]
    began = min(one["marks"][0][1] for one in done if one["marks"])
    handled = sum(one["count"] for one in done)
    return Outcome(
        metrics={
            "rate": round(handled / (ended - began), 1),
            "cpu_server": round(server_used / handled * 1e6, 2),
            "fewest": min(one["count"] for one in done) / handled,
        },
        settings=f"{len(workers)} processes, concurrency={size['concurrency']}, batch={size['batch']} each",
        database=series.as_dict(),
    )


def _wait_until_empty(dsn: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    with psycopg.connect(dsn, autocommit=True) as conn:
        while time.monotonic() < deadline:
            [(unfinished,)] = conn.execute(
                "select exists (select 1 from pulse.outbox where status in ('PENDING', 'RETRYING') and not parked) "
                "or exists (select 1 from pulse.outbox where status = 'RUNNING')"
            ).fetchall()
            if not unfinished:
                return
            time.sleep(0.01)


def heartbeat(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """What it costs to keep many leases alive: processor time beyond that of a dispatcher with nothing to do."""
    window = size["seconds"]
    with bench.database(entry) as dsn:
        task = Task(
            action="work",
            dsn=dsn,
            count=10**9,
            handler="io",
            io=3600.0,
            concurrency=size["count"],
            batch=size["batch"],
            seconds=3600,
            options={"timeout": None},
        )
        with bench.start(entry.key, task) as worker:
            worker.go()
            time.sleep(3)
            idle = _used(bench, worker.pid, window)
            bench.load(entry, dsn, size["count"])
            _wait_until_running(dsn, size["count"])
            time.sleep(6)  # until they are old enough for the next beat
            busy = _used(bench, worker.pid, window)
            calls = _heartbeat_calls(dsn)
            worker.stop()
            worker.wait_for("done", 60)
            settings = worker.settings
    beats = window / 10
    extra = {name: max(0.0, busy[name] - idle[name]) / beats for name in busy}
    return Outcome(
        metrics={
            "heartbeat_ms": round((extra["server"] + extra["worker"]) * 1000, 2),
            "server_ms": round(extra["server"] * 1000, 2),
            "worker_ms": round(extra["worker"] * 1000, 2),
            "call_ms": round(median(calls) * 1000, 2),
        },
        settings=f"{size['count']:,} in flight, a beat every 10 s; {settings}",
    )


def _used(bench: Bench, pid: int, window: float) -> dict[str, float]:
    before = bench.postgres.cpu_seconds, cpu_seconds(pid)
    time.sleep(window)
    return {"server": bench.postgres.cpu_seconds - before[0], "worker": cpu_seconds(pid) - before[1]}


def _wait_until_running(dsn: str, count: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        [(running,)] = rows(dsn, "select count(*) from pulse.outbox where status = 'RUNNING'")
        if running >= count:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {running} of {count} jobs were running after two minutes")
        time.sleep(0.2)


def _heartbeat_calls(dsn: str) -> list[float]:
    """Seconds of the statement itself, for all that is in flight, five times."""
    times = []
    with psycopg.connect(dsn, autocommit=True) as conn:
        held = conn.execute(
            "select event_id::text, claim_token::text from pulse.outbox where status = 'RUNNING'"
        ).fetchall()
        ids, tokens = ["{" + ",".join(column) + "}" for column in zip(*held, strict=True)]
        for _ in range(5):
            began = time.perf_counter()
            conn.execute(
                "select * from pulse.outbox_heartbeat(p_event_ids => %s::uuid[], p_tokens => %s::uuid[], "
                "p_lease => interval '30 seconds')",
                [ids, tokens],
            )
            times.append(time.perf_counter() - began)
    return times


def memory_over_time(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """The dispatcher's resident memory under a steady load."""
    with bench.database(entry) as dsn:
        work = Task(
            action="work",
            dsn=dsn,
            count=10**9,
            payload=bench.payload,
            concurrency=size["concurrency"],
            batch=size["batch"],
            seconds=1e6,
            options=dict(entry.options),
        )
        produce = Task(
            action="enqueue",
            dsn=dsn,
            mode="paced",
            count=int(size["rate"] * size["seconds"]),
            rate=size["rate"],
            payload=bench.payload,
            seconds=size["seconds"] * 2,
        )
        samples: list[tuple[float, float]] = []
        with (
            observed(dsn, every=5) as series,
            bench.start(entry.key, work) as worker,
            bench.start(entry.key, produce) as producer,
        ):
            worker.go()
            time.sleep(2)
            producer.go()
            began = time.monotonic()
            while (since := time.monotonic() - began) < size["seconds"]:
                samples.append((round(since, 1), round(memory(worker.pid) / 2**20, 2)))
                time.sleep(min(1.0, size["seconds"] / 20))
            worker.stop()
            done = worker.wait_for("done", 60)
    later = samples[len(samples) // 5 :]  # the first fifth fills pools and caches
    return Outcome(
        metrics={
            "memory_mb": later[-1][1],
            "first_mb": later[0][1],
            "growth_mb_per_hour": round(slope(later) * 3600, 2),
            "jobs": float(done["count"]),
        },
        settings=f"{size['rate']:,.0f} jobs/s for {size['seconds']:,.0f} s, completed rows deleted",
        samples={"memory": samples},
        database=series.as_dict(),
    )


def _only_ours(peers: Sequence[Peer]) -> list[Entry]:
    return [ours()] if any(peer.key == OURS for peer in peers) else []


def _several(peers: Sequence[Peer]) -> list[Entry]:
    if not _only_ours(peers):
        return []
    return [ours(f"{count} dispatcher{'s' if count > 1 else ''}", dispatchers=count) for count in (1, 2, 4)]


def _deleting(peers: Sequence[Peer]) -> list[Entry]:
    return [ours(delete=True)] if _only_ours(peers) else []


WORKLOADS = (
    Workload(
        name="backlog",
        title="Claims at the head of a backlog of 10,000,000",
        better="-claim_ratio",
        entries=_only_ours,
        run=backlog,
        sizes={"count": 10_000_000, "claims": 200, "batch": 100},
        quick={"count": 20_000, "claims": 30},
        most_rounds=2,
    ),
    Workload(
        name="dispatchers",
        title="One, two and four dispatchers on one table",
        better="+rate",
        entries=_several,
        run=dispatchers,
        sizes={"count": 100_000, "concurrency": 100, "batch": 500, "seconds": 120.0},
        quick={"count": 5_000},
    ),
    Workload(
        name="heartbeat",
        title="Heartbeats of 10,000 jobs in flight",
        better="-heartbeat_ms",
        entries=_only_ours,
        run=heartbeat,
        sizes={"count": 10_000, "batch": 500, "seconds": 60.0},
        quick={"count": 500, "seconds": 10.0},
        most_rounds=2,
    ),
    Workload(
        name="memory",
        title="Memory of the dispatcher over an hour",
        better="-growth_mb_per_hour",
        entries=_deleting,
        run=memory_over_time,
        sizes={"rate": 2000.0, "seconds": 3600.0, "concurrency": 100, "batch": 500},
        quick={"seconds": 10.0},
        most_rounds=1,
    ),
)
