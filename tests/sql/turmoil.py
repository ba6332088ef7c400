"""Many sessions do everything at once, at random, and keep a ledger of what they were told.

By hand, for as long as you like: `python -m tests.sql.turmoil DSN SECONDS [SEED]` on a migrated database.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

TOPICS = ["a", "b", "c"]
LEASE = 0.2  # short enough to lapse now and then
ONE_LANE = """
select event_id, seq, ordering_key, lease_seq
  from pulse.outbox_claim_lane(
         p_token => %s, p_worker => %s, p_topic => %s, p_generation => 0, p_lapses => 0::smallint,
         p_priority => 0::smallint, p_next_run_at => '2000-01-01', p_seq => 0, p_limit => %s,
         p_lease => make_interval(secs => %s), p_budget => 5, p_slots => 1000, p_try => 1, p_together => %s)
"""
UNFINISHED = "status not in ('COMPLETED', 'DISCARDED')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One row of a claim, as its claimer knows it."""

    event_id: uuid.UUID
    token: uuid.UUID
    seq: int
    key: str | None
    lease_seq: int
    since: float  # when the answer to the claim was here: from then on it certainly ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A claim whose settlement was accepted: it was RUNNING all the time between these two moments."""

    held: Held
    until: float  # when the settlement was sent
    how: str


@dataclass
class Ledger:
    """What all sessions were told."""

    enqueued: set[uuid.UUID] = field(default_factory=set)
    claimed: list[Held] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    healed_at_the_end: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complaints(self) -> list[str]:
        """Everything that must not be, from what was claimed and settled."""
        complaints = list(self.failures)
        starts = Counter((held.event_id, held.lease_seq) for held in self.claimed)
        complaints += [f"claimed twice: {start}" for start, count in starts.items() if count > 1]
        by_event, by_key = defaultdict(list), defaultdict(list)
        for settled in self.settled:
            by_event[settled.held.event_id].append(settled)
            if settled.held.key is not None:
                by_key[settled.held.key].append(settled)
        complaints += [
            f"ran twice at once: {pair}" for runs in by_event.values() for pair in overlapping(runs)
        ]
        complaints += [
            f"key ran twice at once: {pair}" for runs in by_key.values() for pair in overlapping(runs)
        ]
        for event_id, runs in by_event.items():
            if sum(run.how == "complete" for run in runs) > 1:
                complaints.append(f"completed twice: {event_id}")
        for key, runs in by_key.items():
            if key.startswith("one producer"):
                order = [
                    run.held.seq for run in sorted(runs, key=lambda run: run.until) if run.how == "complete"
                ]
                if order != sorted(order):
                    complaints.append(f"out of order: {key} {order}")
        return complaints


def overlapping(runs: list[Settled]) -> Iterable[tuple[Settled, Settled]]:
    runs = sorted(runs, key=lambda run: run.held.since)
    return [(one, next_one) for one, next_one in pairwise(runs) if next_one.held.since < one.until]


class Session:
    """One thread: it enqueues, claims, settles, beats, reaps, replays, discards and heals as its dice say."""

    def __init__(self, dsn: str, ledger: Ledger, number: int, seed: int) -> None:
        self.dsn = dsn
        self.ledger = ledger
        self.number = number
        self.dice = random.Random(f"{seed}/{number}")
        self.mine: list[Held] = []
        self.conn = psycopg.connect(dsn, autocommit=True)

    def run(self, until: float) -> None:
        actions: dict[Callable[[], None], float] = {
            self.enqueue: 20,
            self.claim: 25,
            self.settle: 40,
            self.heartbeat: 6,
            self.reap: 6,
            self.replay: 6,
            self.discard: 2,
            self.heal: 1,
            self.pause: 1,
            self.lanes: 2,
            self.stall: 0.2,
        }
        try:
            while time.monotonic() < until:
                [action] = self.dice.choices(list(actions), list(actions.values()))
                self.attempt(action)
        except Exception as error:
            with self.ledger.lock:
                self.ledger.failures.append(f"session {self.number}: {error!r}")
        finally:
            self.conn.close()

    def attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except psycopg.Error as error:
            name = f"{action.__name__} {error.sqlstate}"
            with self.ledger.lock:
                self.ledger.refusals[name] += 1
            # Two claims that go for one key at the same moment: claim again. An operator can come too late.
            if name not in {"claim 23505", "replay PO002", "discard PO002", "replay PO001", "discard PO001"}:
                raise

    def call(self, name: str, query: str, *parameters: object) -> list[Any]:
        rows = self.conn.execute(query, parameters).fetchall()
        with self.ledger.lock:
            self.ledger.calls[name] += 1
        return rows

    def enqueue(self) -> None:
        """One to five events, in a transaction that stays open for a while: their commits overlap."""
        events = []
        alone = self.dice.random() < 0.3
        with self.conn.transaction():
            for _ in range(self.dice.randint(1, 5)):
                key = None
                if alone:
                    key = f"one producer {self.number}"
                elif self.dice.random() < 0.5:
                    key = f"key {self.dice.randrange(12)}"
                skip = key is not None and not alone and self.dice.random() < 0.3
                [(event_id,)] = self.call(
                    "enqueue",
                    "select pulse.outbox_enqueue(%s, '{}', p_ordering_key => %s, p_dead_key => %s, p_priority => %s,"
                    " p_max_attempts => %s)",
                    self.dice.choice(TOPICS),
                    key,
                    "skip" if skip else "hold",
                    self.dice.choice([0, 0, 0, 3]),
                    self.dice.choice([None, None, 1, 3]),
                )
                events.append(event_id)
            time.sleep(self.dice.random() * 0.004)
        with self.ledger.lock:
            self.ledger.enqueued.update(events)

    def claim(self) -> None:
        if len(self.mine) > 60:
            return
        token = uuid.uuid4()
        arguments = (
            token,
            f"w{self.number}",
            self.dice.sample(TOPICS, self.dice.randint(1, 3)),
            self.dice.choice([1, 5, 20]),
        )
        query = (
            "select event_id, seq, ordering_key, lease_seq"
            "  from pulse.outbox_claim(%s, %s, %s, %s, make_interval(secs => %s), p_together => %s)"
        )
        together = self.dice.random() < 0.4
        if self.dice.random() < 0.5:
            rows = self.call("claim", query, *arguments, LEASE, together)
        else:
            rows = self.call(
                "claim a lane", ONE_LANE, *arguments[:2], arguments[2][0], arguments[3], LEASE, together
            )
        if len(rows) > arguments[3]:
            raise AssertionError(f"{len(rows)} rows instead of {arguments[3]}")
        held = [
            Held(
                event_id=row[0], seq=row[1], key=row[2], lease_seq=row[3], token=token, since=time.monotonic()
            )
            for row in rows
        ]
        if rows and self.dice.random() < 0.1:
            again = {row[0]: row[3] for row in self.call("claim again", query, *arguments, LEASE, together)}
            # Some may have been reaped meanwhile; never others, and never counted again. All: then it is a new claim.
            first = {row[0]: row[3] for row in rows}
            is_new = all(lease_seq > first.get(event_id, 0) for event_id, lease_seq in again.items())
            if not again.items() <= first.items() and not is_new:
                raise AssertionError(f"another answer for the same token: {first} {again}")
            if is_new:
                held = [
                    Held(event_id=e, seq=0, key=None, lease_seq=n, token=token, since=time.monotonic())
                    for e, n in again.items()
                ]
        self.mine += held
        with self.ledger.lock:
            self.ledger.claimed += held

    def some(self) -> list[Held]:
        """A few claims of ours, of different events: a reaped one and the next of the same event answer alike."""
        self.dice.shuffle(self.mine)
        return list({held.event_id: held for held in self.mine[: self.dice.randint(1, 8)]}.values())

    def settle(self) -> None:
        how = self.dice.choice(
            ["complete", "complete", "complete", "fail", "die", "snooze", "release", "lapse"]
        )
        some = self.some()
        ids, tokens, n = [h.event_id for h in some], [h.token for h in some], len(some)
        sent = time.monotonic()
        if how == "complete":
            rows = self.call(how, "select * from pulse.outbox_complete(%s, %s)", ids, tokens)
        elif how in {"fail", "die"}:
            rows = self.call(
                how,
                "select * from pulse.outbox_fail(%s, %s, %s, %s, %s::interval[], %s)",
                ids,
                tokens,
                ["boom"] * n,
                [Jsonb({})] * n,
                ["10 ms"] * n,
                [how == "die"] * n,
            )
        elif how == "snooze":
            rows = self.call(
                how, "select * from pulse.outbox_snooze(%s, %s, %s::interval[])", ids, tokens, ["10 ms"] * n
            )
        elif how == "release":
            rows = self.call(how, "select * from pulse.outbox_release(%s, %s)", ids, tokens)
        else:
            rows = self.call(how, "select * from pulse.outbox_lapse(%s, %s, 'killed')", ids, tokens)
        answers = dict(rows)
        loud = how in {"fail", "die", "lapse"}
        with self.ledger.lock:
            for held in some:
                answer = answers.get(held.event_id, "no answer" if loud else "done")
                self.ledger.answers[f"{how}: {answer}"] += 1
                if answer == "no answer":
                    self.ledger.failures.append(f"no answer for {held} from {how}")
                if answer != "locked":
                    self.mine.remove(held)
                if answer not in {"locked", "lost"}:
                    self.ledger.settled.append(Settled(held=held, until=sent, how=how))

    def heartbeat(self) -> None:
        some = self.some()
        query = "select * from pulse.outbox_heartbeat(%s, %s, make_interval(secs => %s))"
        answers = dict(
            self.call("heartbeat", query, [h.event_id for h in some], [h.token for h in some], LEASE)
        )
        lost = [held for held in some if answers.get(held.event_id) == "lost"]
        self.mine = [held for held in self.mine if held not in lost]

    def reap(self) -> None:
        self.call(
            "reap",
            "select * from pulse.outbox_reap(50, make_interval(secs => %s), p_full => %s)",
            LEASE,
            self.dice.random() < 0.5,
        )

    def replay(self) -> None:
        rows = self.call("find the dead", "select event_id from pulse.dead_letter order by random() limit 3")
        for (event_id,) in rows:
            self.call("replay", "select pulse.outbox_replay(%s, 0, 'operator')", event_id)

    def discard(self) -> None:
        rows = self.call(
            "find one",
            "select event_id from pulse.outbox where status in ('PENDING', 'RETRYING', 'DEAD_LETTERED')"
            " order by random() limit 1",
        )
        for (event_id,) in rows:
            self.call("discard", "select pulse.outbox_discard(%s, 'why', 'operator')", event_id)

    def heal(self) -> None:
        self.call("heal", "select * from pulse.outbox_heal(null, 5)")

    def pause(self) -> None:
        topic = self.dice.choice(TOPICS)
        self.call("pause", "select pulse.outbox_pause(%s, 'why', 'operator')", topic)
        self.call("resume", "select pulse.outbox_resume(%s, 'operator')", topic)

    def stall(self) -> None:
        """What it holds lapses, and is somebody else's when it goes on."""
        time.sleep(1.5 * LEASE)

    def lanes(self) -> None:
        self.call("lanes", "select * from pulse.outbox_lanes(%s)", TOPICS)


def drain(dsn: str, ledger: Ledger, deadline: float = 30) -> None:
    """Bring everything to its end: replay the dead, wait for leases to lapse, complete the rest."""
    end = time.monotonic() + deadline
    with psycopg.connect(dsn, autocommit=True) as conn:
        idle = 0
        while time.monotonic() < end:
            for (event_id,) in conn.execute("select event_id from pulse.dead_letter").fetchall():
                conn.execute("select pulse.outbox_replay(%s, 0, 'operator')", (event_id,))
            conn.execute("select * from pulse.outbox_reap(1000, make_interval(secs => %s))", (LEASE,))
            token = uuid.uuid4()
            rows = conn.execute(
                "select event_id from pulse.outbox_claim(%s, 'last', %s, 500)", (token, TOPICS)
            ).fetchall()
            if rows:
                ids = [row[0] for row in rows]
                conn.execute("select * from pulse.outbox_complete(%s, %s)", (ids, [token] * len(ids)))
                idle = 0
                continue
            [(left, running)] = conn.execute(
                f"select count(*), count(*) filter (where status = 'RUNNING') from pulse.outbox where {UNFINISHED}"
            ).fetchall()
            if not left:
                return
            idle += 1
            if idle > 20 and not running:  # nobody works any more, and something still waits
                [(_, healed)] = conn.execute("select * from pulse.outbox_heal(null, 1000)").fetchall()
                ledger.healed_at_the_end += healed
                idle = 0
            time.sleep(0.02)
        ledger.failures.append(
            f"not drained: {conn.execute(f'select * from pulse.outbox where {UNFINISHED}').fetchmany(5)}"
        )


def turmoil(dsn: str, duration: float, *, seed: int = 1, sessions: int = 8) -> Ledger:
    """Let *sessions* threads loose for *duration* seconds, drain, and check that nothing is lost."""
    ledger = Ledger()
    until = time.monotonic() + duration
    threads = [
        threading.Thread(target=Session(dsn, ledger, number, seed).run, args=(until,), daemon=True)
        for number in range(sessions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(duration + 30)
        if thread.is_alive():
            ledger.failures.append("a session hangs")
    drain(dsn, ledger)
    with psycopg.connect(dsn) as conn:
        there = {row[0] for row in conn.execute("select event_id from pulse.outbox")}
    if lost := ledger.enqueued - there:
        ledger.failures.append(f"lost: {lost}")
    return ledger


if __name__ == "__main__":
    result = turmoil(sys.argv[1], float(sys.argv[2]), seed=int([*sys.argv, "1"][3]))
    for title in ("calls", "answers", "refusals"):
        print(title, dict(sorted(getattr(result, title).items())))
    print(f"{len(result.enqueued)} enqueued, {len(result.claimed)} claimed, {len(result.settled)} settled")
    print(f"healed at the end: {result.healed_at_the_end}")
    print("complaints:", result.complaints() or "none")
