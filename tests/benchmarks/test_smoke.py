"""Ours runs through the harness: what is measured is what the product does."""

import pytest

from benchmarks.bench import Bench, ours
from benchmarks.environments import OURS, find_peers, install
from benchmarks.postgres import Postgres
from benchmarks.workloads import WORKLOADS

SMALL = {"count": 60, "seconds": 20.0, "rate": 400.0, "batch": 25}
CASES = {
    "drain": ours(),
    "drain-1m": ours(sql="ours"),
    "drain-delete": ours(sql="bare", delete=True),
    "idle-latency": ours(),
    "enqueue-bare": ours(dispatcher="none"),
}


@pytest.mark.timeout(180)  # it starts processes one after the other, on a machine that may be busy
def test_workloads_run(tmp_path):
    """In one test, because the server that they share takes longer to start than they run."""
    postgres = Postgres(durable=False)
    try:
        bench = Bench(postgres, {OURS: install(find_peers()[OURS])}, payload=50, logs=tmp_path)
        outcomes = {
            name: WORKLOADS[name].run(bench, entry, {**WORKLOADS[name].sizes, **SMALL})
            for name, entry in CASES.items()
        }
    finally:
        postgres.close()

    for name, outcome in outcomes.items():
        # A handler may start before the producer has its commit's answer: then its wait is below zero.
        assert outcome.metrics[WORKLOADS[name].metric] > (-20 if name == "idle-latency" else 0)
        assert outcome.metrics.get("complete", 1.0) == 1.0  # every result was durable at the end
        assert outcome.metrics.get("lost", 0.0) == 0.0  # every job was seen by a handler
    assert outcomes["drain"].progress[-1][1] == SMALL["count"]
    assert outcomes["idle-latency"].metrics["jobs"] == SMALL["count"]
