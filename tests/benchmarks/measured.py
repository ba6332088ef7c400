"""Results that nobody measured."""

from __future__ import annotations

from typing import Any

from benchmarks.results import Results, RunResult

PEERS = {
    "pulse_outbox": {"name": "pulse-outbox", "language": "Python", "lease": "row"},
    "pgqueuer": {"name": "pgqueuer", "language": "Python", "lease": "row"},
    "pg_boss": {"name": "pg-boss", "language": "Node", "lease": "row"},
    "pgque": {"name": "pgque-py", "language": "Python", "lease": "batch"},
    "gone": {"name": "gone", "language": "Python", "lease": "row", "problem": "no network"},
}


def results_of(
    *runs: tuple[str, str, str, int, dict[str, float]], busy: float = 0.0, quick: bool = False
) -> Results:
    """Each run: workload, label, key, round, metrics."""
    server = ("server_version", "fsync", "synchronous_commit", "shared_buffers", "max_wal_size")
    machine: dict[str, Any] = {"cores": 2, "processor": "a processor", "memory_gb": 4}
    return Results(
        machine=machine | {"python": "3.11", "system": "a system"},
        server=dict.fromkeys(server, "on"),
        started_at="2026-11-16 00:00 UTC",
        quick=quick,
        payload=10,
        sizes={},
        peers={key: {"version": "1", "reason": "newest"} | peer for key, peer in PEERS.items()},
        runs=[
            RunResult(
                workload=workload, label=label, key=key, round=number, place=1, busy=busy, metrics=metrics
            )
            for workload, label, key, number, metrics in runs
        ],
    )
