"""What is wrong with this dispatcher at the moment, in words, and what it has done."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

RATE_WINDOW = 5.0
"""Rates are taken over so many seconds at least: below the usual heartbeat, so that each brings new ones."""


@dataclass(slots=True)
class Condition:
    """Complaints by subject. Written by the loops, read by health and by the log."""

    complaints: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Subject → what is wrong, and since when on the monotonic clock."""

    def complain(self, subject: str, what: str) -> bool:
        """Notes that something is wrong; True when that is news."""
        known = self.complaints.get(subject)
        self.complaints[subject] = (what, known[1] if known else time.monotonic())
        return known is None

    def is_well(self, subject: str) -> float | None:
        """Notes that a subject is well; how long it was not, in seconds, when that is news."""
        known = self.complaints.pop(subject, None)
        return time.monotonic() - known[1] if known else None

    def in_words(self) -> list[str]:
        """Every complaint with how long it has lasted."""
        now = time.monotonic()
        return [f"{what} (for {now - since:.0f} s)" for what, since in list(self.complaints.values())]


@dataclass(slots=True)
class Tally:
    """What a dispatcher has done since it started."""

    claimed: int = 0
    completed: int = 0
    retried: int = 0
    dead: int = 0
    snoozed: int = 0
    released: int = 0
    lost: int = 0

    def copy(self) -> Tally:
        """The present numbers."""
        return Tally(**{name: getattr(self, name) for name in self.__slots__})


class Throughput:
    """How many events of each topic have completed, and lately complete in a second."""

    def __init__(self, topics: Iterable[str], now: float) -> None:
        self.completed = dict.fromkeys(topics, 0)
        self._since = (now, list(self.completed.values()))
        self._rates: list[float] | None = None

    def rates(self, now: float) -> list[float] | None:
        """Completed per second, of each topic in the order given; None before the first few seconds are over."""
        # Asked by two threads. Each replaces the mark as a whole: at worst both measure the same seconds.
        began, before = self._since
        if now - began >= RATE_WINDOW:
            counts = list(self.completed.values())
            self._rates = [(count - old) / (now - began) for count, old in zip(counts, before, strict=True)]
            self._since = (now, counts)
        return self._rates
