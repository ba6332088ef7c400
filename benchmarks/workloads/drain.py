"""How fast a full table is worked off, under the conditions that make a difference."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.bench import Bench, Entry, Outcome, Workload, everyone, ours
from benchmarks.driver import Task, payload_of
from benchmarks.environments import OURS, Peer
from benchmarks.measures import rate, tenths
from benchmarks.postgres import observed, rows, vacuum_held_back, wal_position

PURE_SQL = Path(__file__).resolve().parent.parent / "pure_sql"
GIVE_UP = 60.0
"""Slow products are stopped after this time and judged by what they did until then, in seconds."""


def drain(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """Fills the table, then lets one worker (or several) empty it."""
    if "sql" in entry.options:
        return _pure_sql(bench, entry, size)
    with bench.database(entry) as dsn:
        if completed := size.get("completed"):
            rows(dsn, _COMPLETED_ROWS, completed)
        bench.load(entry, dsn, size["count"], **size.get("enqueue", {}))
        task = Task(
            action="work",
            dsn=dsn,
            count=size["count"],
            payload=bench.payload,
            handler=size.get("handler", "noop"),
            io=size.get("io", 0.0),
            concurrency=size["concurrency"],
            batch=size["batch"],
            seconds=size.get("seconds", GIVE_UP),
            options=dict(entry.options),
        )
        with contextlib.ExitStack() as stack:
            if size.get("held"):
                stack.enter_context(vacuum_held_back(dsn))
            series = stack.enter_context(observed(dsn))
            worker = stack.enter_context(bench.start(entry.key, task))
            log_before = wal_position(dsn)
            server_before, worker_before = bench.postgres.cpu_seconds, worker.cpu_seconds
            worker.go()
            done = worker.wait_for("done", task.seconds + 120)
            server_used = bench.postgres.cpu_seconds - server_before
            worker_used = worker.cpu_seconds - worker_before
            logged = wal_position(dsn) - log_before
            settings = worker.settings
    marks = [(int(count), float(when)) for count, when in done["marks"]]
    metrics = _metrics(done["count"], server_used, worker_used)
    metrics["rate"] = round(rate(marks, done["ended"] if done["complete"] else None), 1)
    metrics["complete"] = float(done["complete"])
    if done["count"]:
        metrics["wal_bytes"] = round(logged / done["count"], 1)
    if len(marks) > 20:
        first, last = tenths(marks)
        metrics |= {
            "first_tenth": round(first, 1),
            "last_tenth": round(last, 1),
            "last_to_first": round(last / first, 3),
        }
    began = marks[0][1] if marks else 0.0
    return Outcome(
        metrics=metrics,
        settings=settings,
        progress=[(round(when - began, 4), count) for count, when in marks],
        database=series.as_dict(),
    )


def _metrics(count: int, server_used: float, worker_used: float) -> dict[str, float]:
    each = 1e6 / count if count else math.nan
    return {
        "cpu_server": round(server_used * each, 2),
        "cpu_worker": round(worker_used * each, 2),
        "cpu": round((server_used + worker_used) * each, 2),
    }


def _pure_sql(bench: Bench, entry: Entry, size: Mapping[str, Any]) -> Outcome:
    """The same claims and completions in a loop on the server."""
    bare = entry.options["sql"] == "bare"
    with bench.database(entry) as dsn:
        if bare:
            rows(dsn, (PURE_SQL / "bare_table.sql").read_text())
            rows(
                dsn,
                "insert into bench_job (topic, payload) "
                "select 'bench', jsonb_build_object('n', n, 'pad', %s::text) from generate_series(1, %s) as n",
                payload_of(0, bench.payload).get("pad", ""),
                size["count"],
            )
            bench.postgres.settle(dsn)
        else:
            bench.load(entry, dsn, size["count"])
        for guarantee in entry.options.get("without", ()):
            rows(dsn, (PURE_SQL / f"without_{guarantee}.sql").read_text())
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select set_config('bench.batch', %s, false)", [str(size["batch"])])
            delete = str(bool(entry.options.get("delete"))).lower()
            conn.execute("select set_config('bench.delete', %s, false)", [delete])
            statements = (PURE_SQL / f"{entry.options['sql']}.sql").read_text()
            before = bench.postgres.cpu_seconds
            began = time.monotonic()
            conn.execute(statements)
            seconds = time.monotonic() - began
            used = bench.postgres.cpu_seconds - before
        table = "bench_job" if bare else "pulse.outbox"
        [(left,)] = rows(dsn, f"select count(*) from {table} where status <> 'COMPLETED'")
        if left:
            raise RuntimeError(f"pure SQL left {left} jobs")
    return Outcome(
        metrics={"rate": round(size["count"] / seconds, 1), "complete": 1.0}
        | _metrics(size["count"], used, 0.0),
        settings=f"one session, batch={size['batch']}, no client",
    )


_COMPLETED_ROWS = """
insert into pulse.outbox (
  event_id, topic, payload, idempotency_key, status, indexed_as, known_as, attempts, lease_seq, completed_at,
  claim_token, max_attempts)
select made.id, 'bench', jsonb_build_object('n', made.n), made.id::text, 'COMPLETED', 'RUNNING', 'COMPLETED', 1, 1,
       clock_timestamp(), made.id, 5
  from (select gen_random_uuid() as id, n from generate_series(1, %s) as n) as made
"""


def _with_pure_sql(peers: Sequence[Peer]) -> list[Entry]:
    return [
        *everyone(peers),
        *(
            Entry(label=f"{peer.name}, {name}", key=peer.key, options=options)
            for peer in peers
            for name, options in peer.variants.items()
        ),
        ours("pure SQL, ours", sql="ours"),
        ours("pure SQL, bare", sql="bare"),
    ]


GUARANTEES = ("constraints", "rare_indexes")


def _guarantees(peers: Sequence[Peer]) -> list[Entry]:
    """Pure SQL, with guarantees taken away: what they cost, one by one and all together."""
    if not _only_ours(peers):
        return []
    return [
        ours("all guarantees", sql="ours"),
        *(
            ours(f"without {guarantee.replace('_', ' ')}", sql="ours", without=[guarantee])
            for guarantee in GUARANTEES
        ),
        ours("without both", sql="ours", without=list(GUARANTEES)),
        ours("our table, bare statements", sql="plain"),
        ours("our table without both, bare statements", sql="plain", without=list(GUARANTEES)),
        ours("bare table, bare statements", sql="bare"),
    ]


def _deleting(peers: Sequence[Peer]) -> list[Entry]:
    return [
        *(_deleting_entry(peer) for peer in peers if peer.deletes != "never"),
        ours("pure SQL, ours, delete", sql="ours", delete=True),
        ours("pure SQL, bare, delete", sql="bare", delete=True),
    ]


def _deleting_entry(peer: Peer) -> Entry:
    if peer.deletes == "always":
        return Entry(label=peer.name, key=peer.key)
    return Entry(label=f"{peer.name}, delete", key=peer.key, options={"delete": True})


def _only_ours(peers: Sequence[Peer]) -> list[Entry]:
    return [ours()] if any(peer.key == OURS for peer in peers) else []


def _drain(name: str, title: str, entries: Any = everyone, better: str = "+rate", **size: Any) -> Workload:
    quick = size.pop("quick", {})
    most_rounds = size.pop("most_rounds", 100)
    return Workload(
        name=name,
        title=title,
        better=better,
        entries=entries,
        run=drain,
        sizes={"concurrency": 100, "batch": 500, **size},
        quick={"count": 10_000, "seconds": 10.0, **quick},
        most_rounds=most_rounds,
    )


WORKLOADS = (
    _drain("drain", "Drain of 50,000 no-op jobs", _with_pure_sql, count=50_000),
    _drain(
        "drain-1m",
        "Drain of 1,000,000 no-op jobs",
        _with_pure_sql,
        count=1_000_000,
        seconds=120.0,
        most_rounds=3,
        quick={"count": 30_000},
    ),
    _drain("drain-1kb", "Drain of 50,000 jobs with 1 kB of payload", count=50_000, payload=1_000),
    _drain(
        "drain-100kb",
        "Drain of 5,000 jobs with 100 kB of payload",
        count=5_000,
        payload=100_000,
        quick={"count": 500},
    ),
    _drain("guarantees", "Pure SQL, with guarantees taken away", _guarantees, count=100_000),
    _drain("drain-delete", "Drain of 50,000, completed rows deleted at once", _deleting, count=50_000),
    _drain(
        "io-300",
        "10 ms of I/O per job, concurrency 300",
        handler="io",
        io=0.01,
        count=50_000,
        concurrency=300,
    ),
    _drain(
        "io-500",
        "10 ms of I/O per job, concurrency 500",
        handler="io",
        io=0.01,
        count=50_000,
        concurrency=500,
    ),
    _drain("sync", "Plain functions in threads", _only_ours, handler="sync", count=50_000),
    _drain(
        "failing",
        "20 % fail once, 1 % for good",
        _only_ours,
        handler="fail",
        count=50_000,
    ),
    _drain("keys-10000", "Ordering keys: 10,000 keys", _only_ours, count=50_000, enqueue={"keys": 10_000}),
    _drain(
        "keys-hot",
        "Ordering keys: one hot key",
        _only_ours,
        count=5_000,
        enqueue={"keys": 1},
        quick={"count": 500},
    ),
    _drain(
        "held-50",
        "Vacuum held back, batch 50 × 100,000",
        better="+last_to_first",
        count=100_000,
        batch=50,
        held=True,
        seconds=120.0,
    ),
    _drain(
        "held-500",
        "Vacuum held back, batch 500 × 300,000",
        better="+last_to_first",
        count=300_000,
        held=True,
        seconds=120.0,
        quick={"count": 30_000},
    ),
    _drain(
        "completed-5m",
        "Drain beside 5,000,000 completed rows",
        _only_ours,
        count=50_000,
        completed=5_000_000,
        most_rounds=2,
        quick={"completed": 20_000},
    ),
)
