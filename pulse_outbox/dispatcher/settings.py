"""What a dispatcher can be told, checked once."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypedDict
from uuid import uuid4

from pulse_outbox.errors import SettingsError
from pulse_outbox.events import as_timedelta
from pulse_outbox.storage_retry import StorageRetries

if TYPE_CHECKING:
    from collections.abc import Iterable

_TIMES = ("lease", "heartbeat", "watchdog", "poll", "grace", "retention")


def _worker_name() -> str:
    # Two processes of one name would be one row of pulse.dispatcher: the last part keeps them apart.
    return f"{socket.gethostname()}:{os.getpid()}:{uuid4().hex[:6]}"


class DispatcherOptions(TypedDict, total=False):
    """What `Dispatcher` takes, for type checkers; the meanings are those of DispatcherSettings."""

    concurrency: int
    batch: int
    lease: float | timedelta
    heartbeat: float | timedelta
    watchdog: float | timedelta
    poll: float | timedelta
    grace: float | timedelta
    generations: tuple[int, ...] | None
    worker: str
    topics: tuple[str, ...]
    notify: bool
    listen_dsn: str | None
    health: str | None
    burst: bool
    retention: float | timedelta | None
    retries: StorageRetries


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSettings:
    """How a dispatcher works. Times are seconds or timedeltas."""

    concurrency: int = 100
    """Handlers that run at the same time."""
    batch: int = 500
    """The most that one claim takes. One write settles up to twice as many."""
    lease: float | timedelta = 30
    heartbeat: float | timedelta = 10
    watchdog: float | timedelta = 10
    poll: float | timedelta = 5
    """The longest sleep, whatever notifications do."""
    grace: float | timedelta = 30
    """What running handlers get to finish when the process is to end."""
    generations: tuple[int, ...] | None = None
    """These and generation 0; None: all."""
    worker: str = field(default_factory=_worker_name)
    topics: tuple[str, ...] = ("*",)
    """Patterns of the handlers' topics to serve."""
    notify: bool = True
    listen_dsn: str | None = None
    """A direct connection for LISTEN where the DSN leads to a pooler in transaction mode."""
    health: str | None = None
    """HOST:PORT of the health endpoint."""
    burst: bool = False
    """End when nothing is due or running."""
    retention: float | timedelta | None = timedelta(days=7)
    """How long completed events are kept; None: for ever."""
    retries: StorageRetries = field(default_factory=StorageRetries)

    def __post_init__(self) -> None:
        for name in _TIMES:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, as_timedelta(name, value, SettingsError))
        for name in ("concurrency", "batch"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 100_000:
                raise SettingsError(f"{name} must be an integer between 1 and 100,000")
        if not self.seconds("lease") > 0 or not self.seconds("heartbeat") > 0:
            raise SettingsError("lease and heartbeat must be above 0")
        if self.seconds("heartbeat") * 2 > self.seconds("lease"):
            raise SettingsError("heartbeat must be at most half of the lease, or one late heartbeat loses it")
        if not 0 < self.seconds("watchdog") * 1.5 <= self.seconds("lease"):
            raise SettingsError(
                "watchdog must be above 0 and at most two thirds of the lease: after a longer gap it only holds off"
            )
        if not self.seconds("poll") > 0:
            raise SettingsError("poll must be above 0")
        given: object = self.topics
        if not isinstance(given, tuple | list) or not given:
            raise SettingsError("topics are patterns in a tuple: ('order.*',)")
        if not self.worker or "\0" in self.worker or len(self.worker) > 200:
            raise SettingsError("worker must have 1 to 200 characters")
        if self.generations is not None:
            if any(type(number) is not int or number < 0 for number in self.generations):
                raise SettingsError("generations are numbers from 0 on")
            object.__setattr__(self, "generations", tuple(self.generations))

    def seconds(self, name: str) -> float:
        """One of the times, in seconds."""
        return as_timedelta(name, getattr(self, name)).total_seconds()

    @property
    def lease_time(self) -> timedelta:
        """The lease as the database takes it."""
        return as_timedelta("lease", self.lease)

    def serves(self, topics: Iterable[str]) -> list[str]:
        """Those of the topics that the patterns ask for."""
        return sorted(
            topic for topic in topics if any(fnmatchcase(topic, pattern) for pattern in self.topics)
        )
