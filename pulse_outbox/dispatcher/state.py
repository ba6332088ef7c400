"""What is wrong with this dispatcher at the moment, in words, and what it has done."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


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
