"""A hypothesis state machine: two workers, a watchdog, an operator and a producer, against the model."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from psycopg.rows import dict_row

from tests.model.model import Job, Model
from tests.sql.calls import Calls, Claim, ids, seconds

T0 = datetime(2030, 1, 1, 12, tzinfo=UTC)
TOPICS = ["a", "b"]
VISIBLE = [
    "status", "attempts", "max_attempts", "lapses", "snoozes", "lease_seq", "lease_until", "locked_by", "claim_token",
    "last_error", "first_failed_at", "completed_at", "generation", "priority", "topic",
]  # fmt: skip

workers = st.sampled_from(["one", "two"])
some = st.integers(0, 30)  # picks one of a list, whatever its length
delays = st.sampled_from([0, 0, 0, 1, 40])
verbs = st.sampled_from(["fail", "release", "complete", "lapse", "die", "snooze", "heartbeat"])

statuses = st.sampled_from(
    ["DEAD_LETTERED", "DEAD_LETTERED", "COMPLETED", "RUNNING", "RETRYING", "DISCARDED", "PENDING"]
)


class OutboxMachine(RuleBasedStateMachine):
    """Every step is done twice, on the database and on the model; then all rows are compared."""

    dsn: str  # set by `on`

    @classmethod
    def on(cls, dsn: str) -> type[OutboxMachine]:
        return type(cls.__name__, (cls,), {"dsn": dsn})

    def __init__(self) -> None:
        super().__init__()
        conn = psycopg.connect(self.dsn, autocommit=True, row_factory=dict_row)
        conn.execute("truncate pulse.outbox, pulse.pause, pulse.sweep, pulse.batch")
        conn.execute("set lock_timeout = '5s'")
        self.sql = Calls(conn, T0)
        self.model = Model()
        self.claims: list[Claim] = []  # all that ever were: old ones are the interesting ones
        self.ids = itertools.count(1)

    def teardown(self) -> None:
        self.sql.conn.close()

    @property
    def now(self) -> datetime:
        assert self.sql.now is not None
        return self.sql.now

    def new_id(self) -> uuid.UUID:
        """Not by chance: the same steps must give the same rows, and a token decides which topic comes first."""
        return uuid.UUID(int=next(self.ids))

    # The producer

    @initialize()
    def start_with_a_few(self) -> None:
        for topic, key, budget in (
            ("a", "k", None),
            ("a", "k", None),
            ("b", None, 1),
            ("a", None, 2),
            ("a", None, None),
        ):
            self.enqueue(topic, key, budget, True, 0, 0)

    @rule(
        topic=st.sampled_from(TOPICS),
        key=st.sampled_from([None, "k", "l"]),
        budget=st.sampled_from([None, None, 1, 2]),
        holds_key=st.booleans(),
        priority=st.sampled_from([0, 0, 3]),
        delay=delays,
    )
    @precondition(lambda self: len(self.model.jobs) < 16)
    def enqueue(
        self, topic: str, key: str | None, budget: int | None, holds_key: bool, priority: int, delay: int
    ) -> None:
        event_id = self.sql.enqueue(
            topic,
            key=key,
            p_event_id=self.new_id(),
            p_max_attempts=budget,
            p_dead_key="hold" if holds_key else "skip",
            p_priority=priority,
            p_run_at=self.now + seconds(delay),
        )
        self.model.jobs[event_id] = Job(
            seq=len(self.model.jobs),
            topic=topic,
            key=key,
            holds_key=holds_key,
            priority=priority,
            budget=budget,
            next_run_at=self.now + seconds(delay),
        )

    # The workers

    @rule(
        worker=workers,
        topics=st.sampled_from([["a", "b"], ["a"], ["b"]]),
        limit=st.sampled_from([1, 2, 3, 20]),
        policy=st.sampled_from([2, 3, 1]),
        alone=st.sampled_from([False, False, True]),
        together=st.booleans(),
    )
    def claim(
        self, worker: str, topics: list[str], limit: int, policy: int, alone: bool, together: bool
    ) -> None:
        claim = self.sql.claim(
            topics,
            limit,
            worker=worker,
            p_budgets=[policy] * len(topics),
            p_alone=alone,
            p_together=together,
            token=self.new_id(),
        )
        self.model.check_choice(claim.ids, topics, limit, self.now)
        for event_id in claim.ids:
            self.model.claim(event_id, claim.token, worker, policy, self.now, alone)
        if claim:
            self.claims.append(claim)

    @rule(worker=workers, verb=verbs, delay=delays, limit=st.sampled_from([1, 2, 20]), together=st.booleans())
    def work(self, worker: str, verb: str, delay: int, limit: int, together: bool) -> None:
        """Claim and settle at once, which is most of what happens."""
        before = len(self.claims)
        self.claim(worker, TOPICS, limit, 2, False, together)
        if len(self.claims) > before:
            self.settle(0, verb, delay, False)

    @rule(which=some, limit=st.sampled_from([1, 20]))
    @precondition(lambda self: self.claims)
    def repeat_a_claim(self, which: int, limit: int) -> None:
        """Its answer was lost. Only the latest: a worker repeats nothing once it has gone on."""
        first = self.claims[-1 - which % min(2, len(self.claims))]
        held = self.model.held_by(first.token)
        if held:
            again = self.sql.claim(TOPICS, limit, token=first.token)
            assert set(again.ids) == held, "the same token, other rows"

    @rule(which=some, verb=verbs, delay=delays, twice=st.booleans())
    @precondition(lambda self: self.claims)
    def settle(self, which: int, verb: str, delay: int, twice: bool) -> None:
        """One claim, new or old; the answer may be lost, and then it is sent again."""
        claim = self.claims[-1 - which % len(self.claims)]
        for _ in range(1 + twice):
            expected = {
                event_id: answer
                for event_id in claim.ids
                if (answer := self.model.settle(verb, event_id, claim.token, self.now, seconds(delay)))
                != "done"
            }
            assert self.send(verb, claim, delay) == expected, verb

    def send(self, verb: str, claim: Claim, delay: int) -> dict[uuid.UUID, str]:
        match verb:
            case "fail" | "die":
                return self.sql.fail(claim, "boom", delay=delay, terminal=verb == "die")
            case "snooze":
                return self.sql.snooze(claim, delay)
            case "lapse":
                return self.sql.lapse(claim, "killed")
            case _:
                answers: dict[uuid.UUID, str] = getattr(self.sql, verb)(claim)
                return answers

    # The watchdog

    @rule()
    def reap(self) -> None:
        assert {row["event_id"] for row in self.sql.reap()} == self.model.reap(self.now)

    @rule()
    def let_leases_lapse(self) -> None:
        """A watchdog that sweeps all the time, for as long as a hold and a lease may take."""
        for pause in (0, 10, 10, 11):
            self.sql.forward(pause)
            self.reap()
        assert self.sql.heal()["healed"] == 0, "one session after another leaves no key without its head"

    @rule(duration=st.sampled_from([1, 5, 31, 300]))
    def let_time_pass(self, duration: float) -> None:
        self.sql.forward(duration)

    # The operator

    @rule(which=some, generation=st.sampled_from([0, 3]), status=statuses)
    def replay(self, which: int, generation: int, status: str) -> None:
        event_id = self.pick(which, status)
        allowed = self.model.replay(event_id, generation, self.now)
        self.expect(allowed, lambda: self.sql.replay(event_id, generation))

    @rule(which=some, status=statuses)
    def discard(self, which: int, status: str) -> None:
        event_id = self.pick(which, status)
        allowed = self.model.discard(event_id, self.now)
        self.expect(allowed, lambda: self.sql.discard(event_id))

    def pick(self, which: int, status: str) -> uuid.UUID:
        """One in this state, or any when there is none."""
        events = [e for e, job in self.model.jobs.items() if job.status == status] or list(self.model.jobs)
        return events[which % len(events)]

    def expect(self, allowed: bool, call: Callable[[], None]) -> None:
        refused = None
        try:
            call()
        except psycopg.Error as error:
            refused = error.sqlstate
        assert refused == (None if allowed else "PO002")

    @rule(topic=st.sampled_from([*TOPICS, None]))
    def claim_during_a_pause(self, topic: str | None) -> None:
        self.sql.pause(topic)
        self.model.paused.add(topic)
        self.claim("one", TOPICS, 20, 3, False, False)
        self.model.paused.remove(topic)
        assert self.sql.resume(topic)

    # All rows, after every step

    @invariant()
    def rows_are_as_the_model_says(self) -> None:
        rows = self.sql.conn.execute(
            "select *, jsonb_array_length(failure_history) as cycles from pulse.outbox"
        ).fetchall()
        assert {row["event_id"] for row in rows} == self.model.jobs.keys()
        running = self.sql.conn.execute("select event_id from pulse.running()").fetchall()
        assert sorted(ids(running)) == sorted(ids(row for row in rows if row["status"] == "RUNNING"))
        for row in rows:
            job = self.model.jobs[row["event_id"]]
            found = {name: row[name] for name in (*VISIBLE, "cycles")}
            assert found == {name: getattr(job, name) for name in (*VISIBLE, "cycles")}
            if row["alone"] != job.alone:
                assert job.status != "RUNNING"
            if job.key is not None and job.waits:
                # The end of another's turn makes it due now at the earliest.
                assert job.next_run_at <= row["next_run_at"] <= max(job.next_run_at, self.now)
                job.next_run_at = row["next_run_at"]
            elif job.waits:
                assert row["next_run_at"] == job.next_run_at
