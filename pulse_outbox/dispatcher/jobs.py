"""A job that this process holds, and the outcome of running it: a value, which is then one write."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from pulse_outbox.claims import Claim
    from pulse_outbox.handlers import Handler

Stage = Literal["waiting", "running", "finished", "withdrawn"]


class Job:
    """One claim that this process holds, from the claim until its result is stored."""

    __slots__ = (
        "_undecided",
        "begun_at",
        "claim",
        "claimed_at",
        "handler",
        "leased_until",
        "received_at",
        "stage",
    )

    def __init__(
        self,
        claim: Claim,
        handler: Handler,
        claimed_at: float,
        lease: float = math.inf,
        received_at: float | None = None,
    ) -> None:
        self.claim = claim
        self.handler = handler
        self.claimed_at = claimed_at
        """On this process's monotonic clock, before the claim was sent."""
        self.received_at = received_at or time.monotonic()
        self.leased_until = claimed_at + lease
        """On the same clock; the heart moves it on."""
        self.begun_at: float | None = None
        """When a transactional handler was called; before that, its transaction has to begin."""
        self.stage: Stage = "waiting"
        self._undecided = [None]

    def start(self) -> bool:
        """Says that it is run; False when it has been withdrawn."""
        return self._decide("running")

    def withdraw(self) -> bool:
        """Says that it is not run here; False when it has started, or was withdrawn before."""
        return self._decide("withdrawn")

    def _decide(self, stage: Stage) -> bool:
        # The event loop and the heart's thread may both want to: taking the one item is one step for either.
        try:
            self._undecided.pop()
        except IndexError:
            return False
        self.stage = stage
        return True

    def age(self) -> float:
        """Seconds since the event was created, on the database's clock; a little less, by the way of the answer."""
        # From the answer on, not from the question: who is told "not before ten" must not come a second early.
        return self.claim.age + time.monotonic() - self.received_at

    def database_time(self) -> datetime:
        """What time it is at the database, whatever this machine's clock says."""
        return self.claim.created_at + timedelta(seconds=self.age())

    def __repr__(self) -> str:
        return f"<Job {self.claim.topic} {self.claim.event_id} {self.stage}>"


@dataclass(slots=True)  # not frozen: that takes twice as long to make, and nearly every job makes one
class Completed:
    """The handler returned."""

    job: Job


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised, or its time ran out. The delay counts when the budget has something left."""

    job: Job
    error: str
    failure: Mapping[str, Any]
    delay: timedelta
    terminal: bool


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler asked to be called later."""

    job: Job
    delay: timedelta
    reason: str


@dataclass(frozen=True, slots=True)
class Released:
    """It was never started."""

    job: Job


@dataclass(frozen=True, slots=True)
class Lapsed:
    """The child process that ran it has died."""

    job: Job
    error: str


@dataclass(frozen=True, slots=True)
class Over:
    """There is nothing left to store: its own transaction completed it, or rolled back because the lease was lost."""

    job: Job
    lost: bool = False


_budget_of = attrgetter("max_attempts")  # over a whole batch, quicker than an expression

Outcome = Completed | Failed | Snoozed | Released | Lapsed | Over


def all_completed(outcomes: Sequence[Outcome]) -> bool:
    """Whether nothing but completed jobs is among them, as in nearly every write."""
    return {*map(type, outcomes)} == {Completed}


def apart(jobs: Iterable[Job]) -> list[list[Job]]:
    """The jobs in groups of which each has an event only once.

    An answer names the event, and a process may still run an old claim of an event that it has claimed again.
    """
    jobs = list(jobs)
    if len({job.claim.raw_id for job in jobs}) == len(jobs):
        return [jobs] if jobs else []  # nearly always
    groups: list[dict[bytes, Job]] = []
    for job in jobs:
        for group in groups:
            if job.claim.raw_id not in group:
                group[job.claim.raw_id] = job
                break
        else:
            groups.append({job.claim.raw_id: job})
    return [list(group.values()) for group in groups]


def apart_once(jobs: Sequence[Job]) -> tuple[Sequence[Job], Sequence[Job]]:
    """Budgets of one, which were claimed for slots that are free and must not wait in memory, and the others."""
    if 1 not in map(_budget_of, [job.claim for job in jobs]):
        return (), jobs
    once = [job for job in jobs if job.claim.max_attempts == 1]
    return once, [job for job in jobs if job.claim.max_attempts != 1]


class Asked:
    """Claims that are under way: what they took may stand in the database before this process knows of it.

    The loop asks and reads the answer. While it stands still, the heart may withdraw the claim: the first one has it.
    """

    def __init__(self) -> None:
        self._since: dict[UUID, float] = {}
        self._withdrawn: set[UUID] = set()
        self._deciding = threading.Lock()

    def ask(self, token: UUID) -> None:
        """Before the claim is sent. Sent once more under the same token, it is the same claim."""
        self._since.setdefault(token, time.monotonic())

    def answered(self, token: UUID) -> bool:
        """False: it was withdrawn."""
        with self._deciding:
            self._since.pop(token)
            if token in self._withdrawn:
                self._withdrawn.discard(token)
                return False
            return True

    def withdraw(self, token: UUID) -> bool:
        """Nobody shall run what this claim takes. False: its answer was read before."""
        with self._deciding:
            if token in self._since:
                self._withdrawn.add(token)
            return token in self._withdrawn

    def unanswered(self) -> list[tuple[UUID, float]]:
        """The tokens, and for how long they have been asked for."""
        now = time.monotonic()
        return [(token, now - since) for token, since in list(self._since.items())]


class InFlight:
    """The jobs that this process holds.

    Written by the event loop, read by the heart's thread: each method is one step under the interpreter's lock.
    """

    def __init__(self, freed: Callable[[], None] = lambda: None) -> None:
        self._freed = freed
        """Called when a place of a topic has become free."""
        self._jobs: dict[Job, None] = {}
        self._by_topic: dict[str, int] = {}
        self._kept_for: dict[UUID, list[tuple[str, int]]] = {}
        self.asked = Asked()

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    def of_topic(self, topic: str) -> int:
        """How many of this topic, with the places that are reserved."""
        return self._by_topic.get(topic, 0)

    def reserve(self, topic: str, places: int) -> None:
        """Keeps places of a topic for somebody, or gives them back (below 0)."""
        self._by_topic[topic] = self._by_topic.get(topic, 0) + places
        if places < 0:
            self._freed()

    def ask(self, token: UUID, places: Iterable[tuple[str, int]] = ()) -> None:
        """Before a claim is sent, and sent again. The places that it may need are kept until its answer is read."""
        if token not in self._kept_for:
            self._kept_for[token] = list(places)
            for topic, number in self._kept_for[token]:
                self.reserve(topic, number)
        self.asked.ask(token)

    def answered(self, token: UUID) -> bool:
        """The answer is read. False: the claim was withdrawn, and what it took must not be run."""
        for topic, number in self._kept_for.pop(token):
            self.reserve(topic, -number)
        return self.asked.answered(token)

    def add(self, jobs: Sequence[Job]) -> None:
        """From their claim on."""
        self._jobs.update(dict.fromkeys(jobs))
        topics = [job.claim.topic for job in jobs]
        for topic in {*topics}:  # not a Counter, which takes long over a single job
            self._by_topic[topic] = self._by_topic.get(topic, 0) + topics.count(topic)

    def remove(self, jobs: Iterable[Job]) -> None:
        """Their results are stored, or are nobody's business any more."""
        held = self._jobs
        topics = [job.claim.topic for job in jobs if held.pop(job, job) is None]
        for topic in {*topics}:
            self._by_topic[topic] -= topics.count(topic)
        self._freed()

    def snapshot(self) -> list[Job]:
        """All of them at this moment."""
        return list(self._jobs)

    def older_than(self, seconds: float) -> Iterator[Job]:
        """Those claimed longer ago than this."""
        limit = time.monotonic() - seconds
        for job in self.snapshot():
            if job.claimed_at <= limit:
                yield job
