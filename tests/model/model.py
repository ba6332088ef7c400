"""SPEC 3 in a few lines of Python: what each call must do to the rows, without a word of SQL."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta

LEASE = timedelta(seconds=30)
GAP = LEASE * 2 / 3  # nobody has swept for this long: the next sweep only holds


@dataclass(kw_only=True)
class Job:
    """A row, as everybody sees it."""

    seq: int
    topic: str
    key: str | None
    holds_key: bool
    priority: int
    budget: int | None  # the producer's own
    next_run_at: datetime
    status: str = "PENDING"
    attempts: int = 0
    max_attempts: int | None = None
    lapses: int = 0
    snoozes: int = 0
    lease_seq: int = 0
    lease_until: datetime | None = None
    locked_by: str | None = None
    claim_token: uuid.UUID | None = None
    last_error: str | None = None
    first_failed_at: datetime | None = None
    completed_at: datetime | None = None
    cycles: int = 0
    generation: int = 0
    alone: bool = False  # of the present claim

    @property
    def waits(self) -> bool:
        return self.status in {"PENDING", "RETRYING"}

    @property
    def is_in_the_way(self) -> bool:
        """Of later events of its key."""
        return self.waits or self.status == "RUNNING" or (self.status == "DEAD_LETTERED" and self.holds_key)

    def end_lease(self) -> None:
        self.lease_until = self.locked_by = None


@dataclass
class Model:
    jobs: dict[uuid.UUID, Job] = field(default_factory=dict)
    paused: set[str | None] = field(default_factory=set)
    swept_at: datetime | None = None
    hold_until: datetime | None = None

    # Claims

    def claimable(self, topics: list[str], now: datetime) -> dict[uuid.UUID, Job]:
        return {
            event_id: job
            for event_id, job in self.jobs.items()
            if job.waits
            and job.next_run_at <= now
            and job.topic in topics
            and not self.paused & {job.topic, None}
            and self.has_its_turn(job)
        }

    def has_its_turn(self, job: Job) -> bool:
        if job.key is None:
            return True
        others = [other for other in self.jobs.values() if other.key == job.key and other is not job]
        return not any(o.status == "RUNNING" or (o.is_in_the_way and o.seq < job.seq) for o in others)

    def check_choice(self, taken: list[uuid.UUID], topics: list[str], limit: int, now: datetime) -> None:
        """A claim may choose among what is claimable, within the rules."""
        claimable = self.claimable(topics, now)
        assert len(set(taken)) == len(taken) <= limit
        assert set(taken) <= claimable.keys(), "took what nobody may run now"
        keys = [key for event_id in taken if (key := claimable[event_id].key) is not None]
        assert len(set(keys)) == len(keys), "two of one key"
        assert len(taken) == min(limit, len(claimable)), (
            f"took {len(taken)} of {len(claimable)}, may take {limit}"
        )
        for topic in topics:
            mine = [job for event_id, job in claimable.items() if job.topic == topic and event_id in taken]
            left = [
                job for event_id, job in claimable.items() if job.topic == topic and event_id not in taken
            ]
            assert len(mine) >= min(len(mine) + len(left), limit // len(set(topics))), f"unfair to {topic}"
            for job in mine:
                for other in left:
                    assert job.priority >= other.priority, "less urgent before more urgent"
                    if lane(job) == lane(other) and job.key is other.key is None:
                        assert (job.next_run_at, job.seq) < (other.next_run_at, other.seq), (
                            "later before earlier"
                        )

    def claim(
        self, event_id: uuid.UUID, token: uuid.UUID, worker: str, policy: int, now: datetime, alone: bool
    ) -> None:
        job = self.jobs[event_id]
        job.status = "RUNNING"
        job.attempts += 1
        job.lease_seq += 1
        job.max_attempts = job.budget or policy
        job.lease_until = now + LEASE
        job.locked_by = worker
        job.claim_token = token
        job.alone = alone or job.lapses >= 2

    def held_by(self, token: uuid.UUID) -> set[uuid.UUID]:
        return {e for e, job in self.jobs.items() if job.status == "RUNNING" and job.claim_token == token}

    # Everything after a claim: the answer for one event

    def settle(
        self, verb: str, event_id: uuid.UUID, token: uuid.UUID, now: datetime, delay: timedelta
    ) -> str:
        job = self.jobs[event_id]
        if job.claim_token != token:
            return "lost"
        if job.status != "RUNNING":
            wanted = {
                "complete": {"COMPLETED"},
                "fail": {"RETRYING", "DEAD_LETTERED"},
                "die": {"RETRYING", "DEAD_LETTERED"},
                "lapse": {"RETRYING", "DEAD_LETTERED"},
                "snooze": {"RETRYING"},
                "release": {"PENDING", "RETRYING"},
                "heartbeat": set(),
            }[verb]
            if job.status not in wanted:
                return "lost"
            return job.status if verb in {"fail", "die", "lapse"} else "done"
        match verb:
            case "heartbeat":
                job.lease_until = now + LEASE
                return "done"
            case "complete":
                job.status, job.completed_at = "COMPLETED", now
            case "snooze":
                job.status = "RETRYING"
                job.attempts -= 1
                job.snoozes += 1
                job.next_run_at = now + delay
            case "release":
                job.attempts -= 1
                job.status = "RETRYING" if job.attempts or job.snoozes or job.lapses else "PENDING"
                job.next_run_at = now
            case "fail" | "die":
                self.fail(job, "boom", now, delay, terminal=verb == "die")
            case "lapse":
                self.lapse(job, "killed", now)
        job.end_lease()
        return job.status if verb in {"fail", "die", "lapse"} else "done"

    def lapse(self, job: Job, error: str, now: datetime) -> None:
        job.lapses += 1
        if not job.alone and job.max_attempts != 1:  # in company: it may be innocent
            job.attempts -= 1
            self.fail(job, error, now, timedelta(), spent=False)
        else:
            wait = timedelta(seconds=min(300, 2 ** (job.attempts - 1))) if job.alone else timedelta()
            self.fail(job, error, now, wait)

    def fail(
        self,
        job: Job,
        error: str,
        now: datetime,
        delay: timedelta,
        *,
        terminal: bool = False,
        spent: bool = True,
    ) -> None:
        assert job.max_attempts is not None
        if terminal or (spent and job.attempts >= job.max_attempts):
            job.status, job.completed_at = "DEAD_LETTERED", now
        else:
            job.status, job.next_run_at = "RETRYING", now + delay
        job.last_error = error
        job.first_failed_at = job.first_failed_at or now

    # The watchdog

    def reap(self, now: datetime) -> set[uuid.UUID]:
        if self.swept_at is None or self.swept_at < now - GAP:
            self.hold_until = now + LEASE
        self.swept_at = now
        if self.hold_until is not None and self.hold_until > now:
            return set()
        lapsed = {
            event_id
            for event_id, job in self.jobs.items()
            if job.status == "RUNNING" and job.lease_until is not None and job.lease_until < now
        }
        for event_id in lapsed:
            job = self.jobs[event_id]
            self.lapse(job, "worker lease expired", now)
            job.end_lease()
            job.claim_token = None
        return lapsed

    # Operators

    def replay(self, event_id: uuid.UUID, generation: int, now: datetime) -> bool:
        job = self.jobs[event_id]
        if job.status != "DEAD_LETTERED":
            return False
        job.status, job.generation, job.next_run_at = "PENDING", generation, now
        job.attempts = job.lapses = job.snoozes = 0
        job.max_attempts = job.claim_token = job.last_error = job.first_failed_at = job.completed_at = None
        job.cycles += 1
        return True

    def discard(self, event_id: uuid.UUID, now: datetime) -> bool:
        job = self.jobs[event_id]
        if not (job.waits or job.status == "DEAD_LETTERED"):
            return False
        job.status, job.completed_at = "DISCARDED", now
        job.cycles += 1
        return True


def lane(job: Job) -> tuple[str, int, int, int]:
    """Within one of these the order is exact; between those of a topic the one with the oldest job goes first."""
    return job.topic, job.priority, job.generation, job.lapses
