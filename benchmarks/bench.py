"""A bench: a server, the installed products, and the few things that every workload does with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.driver import Task
from benchmarks.environments import OURS, Installed, Peer
from benchmarks.postgres import Postgres
from benchmarks.protocol import DriverProcess, started
from pulse_outbox.schema import migrate

LOAD_BATCH = 5000
MOST_AT_ONCE = 20_000_000
"""Bytes of payload that are enqueued in one call."""
GRACE = 120.0
"""What a driver gets beyond the time that its task allows, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Someone who takes part in a workload: a product, or one in another configuration, or pure SQL."""

    label: str
    key: str
    """The product whose driver and schema are used."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one run of one entry gave."""

    metrics: dict[str, float]
    settings: str = ""
    progress: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the first job, jobs)"""
    latencies: dict[str, list[float]] = field(default_factory=dict)
    """Names of distributions and their values in seconds, thinned."""
    database: dict[str, Any] = field(default_factory=dict)
    """Dead rows and size over time."""
    samples: dict[str, list[Any]] = field(default_factory=dict)
    """Anything else over time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Something to measure, by name."""

    name: str
    title: str
    better: str
    """The metric that is compared, and which way: '+rate', '-p50_ms'."""
    entries: Callable[[Sequence[Peer]], list[Entry]]
    run: Callable[[Bench, Entry, Mapping[str, Any]], Outcome]
    sizes: Mapping[str, Any]
    quick: Mapping[str, Any]
    """What is different with --quick."""
    most_rounds: int = 100
    """Some take too long to be repeated often, and are steady enough not to need it."""
    server: Mapping[str, str] = field(default_factory=dict)
    """Settings that the server needs for it."""

    @property
    def metric(self) -> str:
        return self.better[1:]

    @property
    def higher_is_better(self) -> bool:
        return self.better.startswith("+")


class Bench:
    """The products on one server."""

    def __init__(
        self, postgres: Postgres, installed: Mapping[str, Installed], *, payload: int, logs: Path
    ) -> None:
        self.postgres = postgres
        self.installed = installed
        self.payload = payload
        self._logs = logs

    def bulk(self, batch: int) -> int:
        """So many jobs at once, or fewer when they are large: some products build one text of them all."""
        return max(1, min(batch, MOST_AT_ONCE // max(1, self.payload)))

    def start(self, key: str, task: Task) -> contextlib.AbstractContextManager[DriverProcess]:
        """A driver that is ready to go."""
        product = self.installed[key]
        return started(
            DriverProcess(
                product.command,
                task,
                environment=product.environment,
                log=self._logs / f"{key}.log",
            )
        )

    def call(self, key: str, task: Task) -> Mapping[str, Any]:
        """Starts a driver, lets it do its task and returns what it says at the end."""
        with self.start(key, task) as driver:
            driver.go()
            return driver.wait_for("done", task.seconds + GRACE)

    @contextlib.contextmanager
    def database(self, entry: Entry) -> Iterator[str]:
        """A fresh database with the product's tables."""
        with self.postgres.database() as dsn:
            if entry.key == OURS:
                migrate(dsn)  # saves a process
            else:
                self.call(entry.key, Task(action="setup", dsn=dsn, options=dict(entry.options)))
            yield dsn

    def load(self, entry: Entry, dsn: str, count: int, **options: Any) -> None:
        """Enqueues *count* jobs and leaves the database at rest."""
        self.call(
            entry.key,
            Task(
                action="enqueue",
                dsn=dsn,
                count=count,
                batch=self.bulk(LOAD_BATCH),
                payload=self.payload,
                options={**entry.options, **options, "load": True},
                seconds=3600,
            ),
        )
        self.postgres.settle(dsn)


def ours(label: str = "pulse-outbox", **options: Any) -> Entry:
    return Entry(label=label, key=OURS, options=options)


def everyone(peers: Sequence[Peer]) -> list[Entry]:
    """Each product in its plain configuration."""
    return [Entry(label=peer.name, key=peer.key) for peer in peers]
