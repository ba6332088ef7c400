"""How fast work goes, and how often it is worth looking for more. Times are seconds on the monotonic clock."""

from __future__ import annotations

from collections import deque

RATE_WINDOW = 0.5
RATE_SAMPLE = 0.02
LISTING_INTERVAL = 1.0
"""The lanes are listed at least this often under load, and more often where that is quick …"""
LISTING_INTERVAL_MIN = 0.05
LISTING_SHARE = 0.02
"""… which means that listing takes at most this share of the time."""
COSTLY_LISTING = 0.01
"""From so many seconds of the server on, a listing is made as rarely as polling, however often there is something new:
vacuum is held back, and it walks over all that is dead …"""
COSTLY_LISTING_SHARE = 0.2
"""… or more rarely, so that it takes at most this share of the time."""


LOUD_WINDOW = 0.25
LOUD_RATE = 200
"""Wake-ups per second from which on they are too many."""


class Rate:
    """How many jobs end per second, lately."""

    def __init__(self, now: float) -> None:
        self.restart(0, now)

    def restart(self, ended: int, now: float) -> None:
        """There was nothing to do until now, which says nothing about how fast work goes."""
        self._ends = deque([(now, ended)])

    def per_second(self, ended: int, now: float) -> float:
        """Over the last moments; *ended* since the beginning."""
        if now - self._ends[-1][0] >= RATE_SAMPLE:
            self._ends.append((now, ended))
        while len(self._ends) > 1 and now - self._ends[0][0] > RATE_WINDOW:
            self._ends.popleft()
        since, before = self._ends[0]
        return (ended - before) / max(now - since, RATE_SAMPLE)


class Looks:
    """When the lanes were listed, what that cost the server, and so how often it is done.

    Between two listings the lanes that are known can be asked without one.
    """

    def __init__(self, poll: float) -> None:
        self._poll = poll
        self._listed_at = 0.0
        self._known_asked_at = 0.0
        self._took = 0.0
        self.interval = 0.0
        """Between listings while there is work."""
        self.seldom = 0.0
        """Between listings while nothing that was listed is left, when they are costly."""
        self.are_costly = False

    def listed(self, now: float, took: float) -> None:
        """A listing was made; *took*: how long the server worked on it."""
        self._listed_at = now
        # One that had to wait for something else says nothing: the next one does.
        cost = min(took, self._took)
        self._took = took
        self.are_costly = cost > COSTLY_LISTING
        self.interval = min(LISTING_INTERVAL, max(LISTING_INTERVAL_MIN, took / LISTING_SHARE))
        if self.are_costly:
            self.interval = max(self.interval, cost / COSTLY_LISTING_SHARE)
            self.seldom = max(self.interval, min(cost / LISTING_SHARE, self._poll))

    def listed_within(self, seconds: float, now: float) -> bool:
        """Whether the last listing is not older than this."""
        return now - self._listed_at <= seconds

    def listing_is_due(self, now: float, *, work_is_known: bool) -> bool:
        """Whether the lanes are to be listed again; rarely where that is costly and no work is known."""
        pause = self.interval if work_is_known or not self.are_costly else self.seldom
        return now >= self._listed_at + pause

    def list_at_once(self) -> None:
        """The next listing is due, whatever it costs."""
        self._listed_at = 0.0

    def last_was_quick(self) -> bool:
        """Whether a claim that has to find out by itself what there is would cost little."""
        return self._took < COSTLY_LISTING

    def known_are_due(self, now: float) -> bool:
        """Whether it is time to ask the known lanes beside a backlog, since listings do not come often enough."""
        return self.interval > LISTING_INTERVAL_MIN and now >= self._known_asked_at + LISTING_INTERVAL_MIN

    def known_asked(self, now: float) -> None:
        """The known lanes are asked."""
        self._known_asked_at = now


class Noise:
    """Whether there are too many wake-ups. They cost producers a lock that all their commits share, and under such a
    load polling is as quick."""

    def __init__(self) -> None:
        self.is_listening = False
        """Whether notifications come in. Else each event stands for one."""
        self._since = 0.0
        self._count = 0

    def heard(self, commits: int, now: float) -> None:
        """Notifications of so many commits have come."""
        if self.is_listening:
            self._add(commits, now)

    def claimed(self, events: int, now: float) -> None:
        """So many events were claimed."""
        if not self.is_listening:
            self._add(events, now)

    def _add(self, number: int, now: float) -> None:
        if now - self._since > LOUD_WINDOW:
            self._since, self._count = now, 0
        self._count += number

    def is_loud(self, now: float) -> bool:
        """Whether there were too many, lately."""
        return self._count >= LOUD_RATE * LOUD_WINDOW and now - self._since <= 2 * LOUD_WINDOW
