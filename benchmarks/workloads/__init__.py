"""The workloads, by name, in the order in which they run."""

from __future__ import annotations

from benchmarks.bench import Workload
from benchmarks.workloads import drain, enqueueing, latency, scale

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        *drain.WORKLOADS,
        *latency.WORKLOADS,
        *enqueueing.WORKLOADS,
        *scale.WORKLOADS,
    )
}
