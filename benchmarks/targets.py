"""What the project promises itself, as data, and whether a session of measuring bears it out.

All are ratios of one interleaved run, since absolute numbers belong to a machine. The two exceptions say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.environments import is_ours
from benchmarks.measures import median
from benchmarks.results import Results

OUR_LABEL = "pulse-outbox"


@dataclass(frozen=True, slots=True)
class Measured:
    """One target's number, and who or what it was measured against."""

    value: float
    against: str


Measure = Callable[[Results], Measured | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A number that must be reached; `at_most` ones must not be exceeded."""

    text: str
    measure: Measure
    at_least: float | None = None
    at_most: float | None = None
    unit: str = "×"

    def met(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most

    @property
    def bound(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g} {self.unit}"
        return f"≤ {self.at_most:g} {self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A target and what was measured of it; None: this session did not measure it."""

    target: Target
    measured: Measured | None

    @property
    def word(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if self.target.met(self.measured.value) else "MISSED"


def judge(results: Results) -> list[Judgement]:
    return [Judgement(target=target, measured=target.measure(results)) for target in TARGETS]


# How the numbers are made


def against_best(
    workload: str,
    metric: str,
    *,
    lower_is_better: bool = False,
    language: str | None = None,
    lease: str | None = "row",
    ours: str = OUR_LABEL,
) -> Measure:
    """Against that peer, of those that fit, whose own median is the best. Always: how many times better we are."""

    def measure(results: Results) -> Measured | None:
        best: tuple[float, str] | None = None
        for label in results.labels(workload):
            key = results.key_of(workload, label)
            peer = results.peers.get(key, {})
            if is_ours(key) or (language and peer.get("language") != language):
                continue
            if lease and peer.get("lease") != lease:
                continue
            summary = results.summary(workload, label, metric)
            if summary is None:
                continue
            worth = -summary.median if lower_is_better else summary.median
            if best is None or worth > best[0]:
                best = (worth, label)
        if best is None:
            return None
        return _times(results, workload, ours, best[1], metric, lower_is_better)

    return measure


def against(workload: str, metric: str, theirs: str, *, ours: str = OUR_LABEL) -> Measure:
    """Against one entry of the same workload."""
    return lambda results: _times(results, workload, ours, theirs, metric, False)


def _times(
    results: Results, workload: str, ours: str, theirs: str, metric: str, lower_is_better: bool
) -> Measured | None:
    values = results.ratios(workload, ours, theirs, metric)
    if not values:
        return None
    value = median(values)
    return Measured(1 / value if lower_is_better and value else value, theirs)


def inverse(measure: Measure) -> Measure:
    """How many times as much we need."""

    def measured(results: Results) -> Measured | None:
        better = measure(results)
        return Measured(1 / better.value, better.against) if better and better.value else None

    return measured


def own(workload: str, metric: str, *, ours: str = OUR_LABEL, against: str = "itself") -> Measure:
    """A number that a run gives by itself."""

    def measure(results: Results) -> Measured | None:
        summary = results.summary(workload, ours, metric)
        return Measured(summary.median, against) if summary else None

    return measure


TARGETS: tuple[Target, ...] = (
    Target(
        text="drain against the fastest Python peer with a lease per row",
        measure=against_best("drain", "rate", language="Python"),
        at_least=3,
    ),
    Target(
        text="drain against the fastest peer with a lease per row in any language",
        measure=against_best("drain", "rate"),
        at_least=2,
    ),
    Target(
        text="drain against the pure-SQL limit, one session",
        measure=against("drain", "rate", "pure SQL, ours"),
        at_least=0.8,
    ),
    Target(
        text="drain against pgque (whole-batch acknowledgement), completed rows deleted at once",
        measure=against_best("drain-delete", "rate", lease="batch", ours="pulse-outbox, delete"),
        at_least=1,
    ),
    Target(
        text="idle latency p50, by the best peer's",
        measure=inverse(against_best("idle-latency", "p50_ms", lower_is_better=True, lease=None)),
        at_most=1.2,
    ),
    Target(
        text="idle latency p99 on a quiet machine",
        measure=own("idle-latency", "p99_ms"),
        at_most=5,
        unit="ms",
    ),
    Target(
        text="last tenth against first tenth, vacuum held back, batch 50",
        measure=own("held-50", "last_to_first", against="its first tenth"),
        at_least=0.9,
    ),
    Target(
        text="last tenth against first tenth, vacuum held back, batch 500",
        measure=own("held-500", "last_to_first", against="its first tenth"),
        at_least=0.9,
    ),
    Target(
        text="one enqueue at a time, own transaction, against a bare INSERT of the same row",
        measure=own("enqueue-bare", "ratio", ours="no dispatcher", against="bare INSERT"),
        at_least=0.9,
    ),
    Target(
        text="16 producers with notify against without",
        measure=against("producers-16", "rate", "notify off", ours="notify on"),
        at_least=0.95,
    ),
    Target(
        text="bulk enqueue against the best peer",
        measure=against_best("enqueue-bulk", "rate", lease=None),
        at_least=2,
    ),
    Target(
        text="claim time with 10,000,000 waiting against 1,000",
        measure=own("backlog", "claim_ratio", against="1,000 waiting"),
        at_most=1.2,
    ),
    Target(
        text="10 ms of I/O per job, concurrency 300, against the best peer",
        measure=against_best("io-300", "rate", lease=None),
        at_least=1.3,
    ),
    Target(
        text="CPU seconds of dispatcher and PostgreSQL per million jobs, the best peer's by ours",
        measure=against_best("drain", "cpu", lower_is_better=True),
        at_least=1,
    ),
)
