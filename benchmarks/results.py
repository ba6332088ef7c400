"""What a whole session of measuring found, as it is kept in results.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.measures import Summary, ratios, summarise


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One entry in one round of one workload."""

    workload: str
    label: str
    key: str
    round: int
    place: int
    """Who was measured first, second … in this round."""
    busy: float
    """Cores that others used just before."""
    metrics: dict[str, float]
    settings: str = ""
    progress: list[Any] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(default_factory=dict)
    database: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[Any]] = field(default_factory=dict)
    problem: str = ""
    """Why there are no metrics."""


@dataclass(slots=True, kw_only=True)
class Results:
    """All of it."""

    machine: dict[str, Any]
    server: dict[str, str]
    started_at: str
    quick: bool
    payload: int
    sizes: dict[str, dict[str, Any]]
    peers: dict[str, dict[str, str]]
    """By key: name, version, language, lease, reason; problem where it could not be installed."""
    load_average: list[tuple[float, float, float]] = field(default_factory=list)
    runs: list[RunResult] = field(default_factory=list)

    # Reading

    def labels(self, workload: str) -> list[str]:
        """The entries of a workload, in the order in which they first appear in round 1's list."""
        seen: dict[str, None] = {}
        for run in sorted(self.of(workload), key=lambda run: (run.key != "pulse_outbox", run.label)):
            seen.setdefault(run.label)
        return list(seen)

    def of(self, workload: str, label: str | None = None) -> Iterator[RunResult]:
        for run in self.runs:
            if run.workload == workload and (label is None or run.label == label):
                yield run

    def key_of(self, workload: str, label: str) -> str:
        return next(run.key for run in self.of(workload, label))

    def by_round(self, workload: str, label: str, metric: str) -> dict[int, float]:
        """One number of one entry, by round; rounds in which it failed are missing."""
        return {
            run.round: run.metrics[metric]
            for run in self.of(workload, label)
            if metric in run.metrics and not math.isnan(run.metrics[metric])
        }

    def summary(self, workload: str, label: str, metric: str) -> Summary | None:
        values = list(self.by_round(workload, label, metric).values())
        return summarise(values) if values else None

    def ratios(self, workload: str, ours: str, theirs: str, metric: str) -> list[float]:
        return ratios(self.by_round(workload, ours, metric), self.by_round(workload, theirs, metric))

    def workloads(self) -> list[str]:
        return list(dict.fromkeys(run.workload for run in self.runs))

    @property
    def busiest(self) -> float:
        return max((run.busy for run in self.runs), default=0.0)

    def joined(self, other: Results) -> Results:
        """Both sessions as one; what both have measured, the later one counts."""
        for name in ("cores", "processor"):
            if self.machine[name] != other.machine[name]:
                raise ValueError(f"these sessions had different machines: {name}")
        if self.server != other.server or self.payload != other.payload:
            raise ValueError("these sessions had different servers or payloads")
        again = set(other.workloads())
        return replace(
            self,
            sizes=self.sizes | other.sizes,
            peers=self.peers | other.peers,
            started_at=f"{self.started_at} and {other.started_at}",
            load_average=[*self.load_average, *other.load_average],
            runs=[*(run for run in self.runs if run.workload not in again), *other.runs],
        )

    # Keeping

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        fields: Mapping[str, Any] = json.loads(path.read_text())
        return cls(**{**fields, "runs": [RunResult(**run) for run in fields["runs"]]})
