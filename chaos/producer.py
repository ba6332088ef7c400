"""Run as a program: an application that changes its data and enqueues, and remembers what it was told.

    python -m chaos.producer NAME SEED RATE

Before anything is sent it writes down what it wants (`intent`, by a mark of its own that ends up in the column
source); then what it heard: `acked`, `never` (rolled back, or an error before COMMIT was sent) or `unknown`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg
from psycopg.types.json import Jsonb

from chaos import mutants
from chaos.journal import Journal
from chaos.points import Points
from chaos.topics import CANARY, TOPICS, weights
from pulse_outbox import Outbox
from pulse_outbox.errors import OutboxError
from pulse_outbox.events import NewEvent, uuid7
from pulse_outbox.link import shut_down

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 5.0
"""How long a producer waits for the database, in seconds, before it takes the connection for dead."""
TRIES = 6

outbox = Outbox()


@dataclass(slots=True, kw_only=True)
class Wish:
    """One event that is to be enqueued."""

    mark: str
    topic: str
    payload: dict[str, Any]
    bad: bool = False
    """The payload does not fit its model."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def repeatable(self) -> bool:
        """Enqueueing it twice makes one event."""
        return "idempotency_key" in self.options or "event_id" in self.options

    def new_event(self) -> NewEvent:
        return NewEvent(self.topic, self.payload, source=self.mark, **self.options)


class Producer:
    """Enqueues at about the given rate, in all the ways there are."""

    def __init__(self, name: str, seed: int, rate: float, lease: float, directory: Path) -> None:
        self._name = name
        self._random = random.Random(seed)
        self._rate = rate
        self._lease = lease
        self._directory = directory
        self._journal = Journal(directory / f"producer-{name}-{os.getpid()}.jsonl")
        self._points = Points(directory / f"orders-{name}", self._journal)
        self._dsn = os.environ["PULSE_OUTBOX_DSN"]
        self._weights = weights(os.environ.get("CHAOS_TOPICS", ""))
        self._conn: psycopg.Connection[Any] | None = None
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            time.sleep(self._random.expovariate(self._rate))
            if not (self._directory / "brake").exists():
                self._one_round()
        self._journal.write("stopped")

    def _one_round(self) -> None:
        way = self._random.choices(
            (self._in_transaction, self._rolled_back, self._by_function, self._in_bulk), (70, 8, 15, 7)
        )[0]
        try:
            way()
        except (psycopg.Error, OSError, OutboxError):
            self._drop()

    # Ways of enqueueing

    def _in_transaction(self) -> None:
        wishes = [self._wish() for _ in range(self._random.choice((1, 1, 1, 2, 4)))]
        self._intend(wishes)
        if len(wishes) == 1 and wishes[0].repeatable:
            self._until_acked(wishes[0])
        else:
            self._commit(wishes)

    def _until_acked(self, wish: Wish) -> None:
        """What may be repeated is, after a lost answer and now and then for no reason."""
        for _ in range(TRIES):
            try:
                self._commit([wish])
                if self._random.random() < 0.8:
                    return
            except (psycopg.Error, OSError):
                self._drop()
                time.sleep(0.2)

    def _commit(self, wishes: list[Wish]) -> None:
        with self._certain_before_commit(wishes), self._deadline() as conn:
            self._points.reached("before_enqueue")
            ids = []
            for wish in wishes:
                options = dict(wish.options, source=wish.mark)
                ids.append(outbox.enqueue(conn, wish.topic, wish.payload, **options))
                conn.execute("insert into chaos.business values (%s)", (ids[-1],))
            self._points.reached("after_enqueue")
        with self._uncertain(wishes), self._deadline() as conn:
            conn.commit()
        self._points.reached("after_commit")
        self._acked(wishes, ids)

    def _rolled_back(self) -> None:
        wishes = [self._wish()]
        self._intend(wishes)
        with self._certain_before_commit(wishes), self._deadline() as conn:
            outbox.enqueue(conn, wishes[0].topic, wishes[0].payload, source=wishes[0].mark)
        self._journal.write("never", marks=[wishes[0].mark])
        with self._deadline() as conn:
            conn.rollback()

    def _by_function(self) -> None:
        """As a producer in another language does it: one call that commits by itself."""
        wish = self._wish()
        wish.options.pop("delay", None)
        self._intend([wish])
        given = {"p_topic": wish.topic, "p_payload": Jsonb(wish.payload), "p_source": wish.mark}
        given |= {f"p_{name}": value for name, value in wish.options.items()}
        call = ", ".join(f"{name} => %({name})s{_CASTS.get(name, '')}" for name in given)
        for _ in range(TRIES if wish.repeatable else 1):
            try:
                with self._uncertain([wish]), self._deadline() as conn:
                    conn.autocommit = True
                    [(event_id,)] = conn.execute(f"select pulse.outbox_enqueue({call})", given).fetchall()
                    conn.autocommit = False
            except (psycopg.Error, OSError):
                self._drop()
                time.sleep(0.2)
                continue
            self._points.reached("after_commit")
            self._acked([wish], [event_id])
            return

    def _in_bulk(self) -> None:
        wishes = [self._wish() for _ in range(self._random.randint(3, 15))]
        if self._random.random() < 0.7:  # without keys of their own, so that COPY may write them
            for wish in wishes:
                wish.options.pop("idempotency_key", None)
                wish.options.pop("event_id", None)
        self._intend(wishes)
        with self._certain_before_commit(wishes), self._deadline() as conn:
            ids = outbox.enqueue_many(conn, [wish.new_event() for wish in wishes])
            with conn.cursor() as cursor:
                cursor.executemany(
                    "insert into chaos.business values (%s)", [(event_id,) for event_id in ids]
                )
        with self._uncertain(wishes), self._deadline() as conn:
            conn.commit()
        self._points.reached("after_commit")
        self._acked(wishes, ids)

    # What is remembered

    def _intend(self, wishes: list[Wish]) -> None:
        self._journal.write(
            "intent",
            wishes=[
                {
                    "mark": wish.mark,
                    "topic": wish.topic,
                    "bad": wish.bad,
                    "key": wish.options.get("ordering_key"),
                    "options": {
                        name: wish.options[name]
                        for name in ("dead_key", "max_attempts", "generation", "priority", "delay")
                        if name in wish.options
                    },
                    "repeatable": wish.repeatable,
                }
                for wish in wishes
            ],
        )

    def _acked(self, wishes: list[Wish], ids: list[UUID]) -> None:
        self._journal.write(
            "acked",
            marks=[wish.mark for wish in wishes],
            events=[str(event_id) for event_id in ids],
        )

    @contextmanager
    def _certain_before_commit(self, wishes: list[Wish]) -> Iterator[None]:
        """An error before COMMIT was sent: the transaction can't have been committed."""
        try:
            yield
        except (psycopg.Error, OSError, OutboxError):
            if not any(wish.repeatable for wish in wishes):  # or an earlier try may have got through
                self._journal.write("never", marks=[wish.mark for wish in wishes])
            raise

    @contextmanager
    def _uncertain(self, wishes: list[Wish]) -> Iterator[None]:
        try:
            yield
        except (psycopg.Error, OSError):
            self._journal.write("unknown", marks=[wish.mark for wish in wishes])
            raise

    # The connection

    @contextmanager
    def _deadline(self) -> Iterator[psycopg.Connection[Any]]:
        """The connection, cut off when it does not answer in time."""
        if self._conn is None or self._conn.closed:
            self._conn = psycopg.connect(self._dsn, connect_timeout=int(PATIENCE))
        timer = threading.Timer(PATIENCE, shut_down, (self._conn,))
        timer.daemon = True
        timer.start()
        try:
            yield self._conn
        finally:
            timer.cancel()

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            shut_down(conn)
            conn.close()

    # What is enqueued

    def _wish(self) -> Wish:
        chance = self._random.random
        [topic] = self._random.choices(list(self._weights), list(self._weights.values()))
        secret = f"{CANARY}-{uuid4().hex}"
        wish = Wish(mark=uuid4().hex, topic=topic, payload={"secret": secret})
        wish.payload["mark"] = wish.mark
        self._payload_of(wish, secret)
        if topic == "ordered" or chance() < 0.05:
            hot = chance() < 0.15
            wish.options["ordering_key"] = (
                "hot" if hot else f"{self._name}:{int(self._random.triangular(0, 200, 0))}"
            )
            wish.options["dead_key"] = self._random.choice(("hold", "skip"))
        if chance() < 0.15:
            wish.options["priority"] = self._random.randint(-9, 9)
        if chance() < 0.1:
            wish.options["delay"] = self._random.uniform(0, 2 * self._lease)
        if chance() < 0.15:
            wish.options["idempotency_key"] = f"key {wish.mark}"
        elif chance() < 0.15 and not TOPICS[topic].deleted:  # or the same id could come again, and rightly so
            wish.options["event_id"] = uuid7()
        if chance() < 0.05 and topic not in ("kills", "kills in a thread"):
            wish.options["max_attempts"] = self._random.choice((1, 2, 8))
        if topic == "generations":
            wish.options["generation"] = self._random.choice((0, 1, 2))
        return wish

    def _payload_of(self, wish: Wish, secret: str) -> None:
        rng, lease, payload = self._random, self._lease, wish.payload
        match wish.topic:
            case "slow" | "thread":
                # Mostly quick, some longer than a lease.
                payload["seconds"] = (
                    min(rng.expovariate(4), 2 * lease) if rng.random() < 0.97 else 1.5 * lease
                )
            case "blocks" | "grabs":
                payload["seconds"] = rng.choice((0.05, 0.3, 1.3 * lease))
            case "ordered" | "transactional" | "transactional.sync" | "effect":
                payload["seconds"] = rng.expovariate(50)
                payload["fails"] = rng.choices((0, 1, 2, 99), (85, 8, 4, 3))[0]
            case "once":
                payload["seconds"] = rng.choice((0.0, 0.1, 0.3))
            case "generations":
                payload["hits_the_bug"] = rng.random() < 0.3
            case "raises" | "raises in a thread":
                payload["error"] = rng.choice(ERRORS)
                payload["fails"] = rng.choice((1, 1, 2, 99))
            case "model":
                wish.bad = rng.random() < 0.7
                wish.payload = {"number": secret if wish.bad else 7, "owner": secret}
            case "later":
                payload["times"] = rng.choice((0, 1, 2, 3))
                payload["limit"] = rng.choice((None, None, 2))
            case "hangs in a thread" | "stubborn":
                payload["seconds"] = rng.choice((0.2, 1.5, 2.5))
            case "kills" | "kills in a thread":
                payload["how"] = rng.choice(("kill", "exit", "segfault"))
                payload["times"] = rng.choice((1, 2, 99, 99))


ERRORS = (
    *("terminal", "integrity", "connection", "value", "operational", "exit", "interrupt", "cancelled"),
    *("group of terminals", "mixed group", "unprintable", "nul", "surrogate", "huge", "stop", "generator"),
    *("recursion", "memory", "validation"),
)
_CASTS = {"p_priority": "::smallint", "p_max_attempts": "::integer", "p_generation": "::bigint"}


def main(name: str, seed: str, rate: str) -> None:
    mutants.patch(os.environ.get("CHAOS_MUTANT", ""))
    producer = Producer(
        name, int(seed), float(rate), float(os.environ["CHAOS_LEASE"]), Path(os.environ["CHAOS_DIR"])
    )

    def stop(*_: object) -> None:
        producer.stopping = True

    signal.signal(signal.SIGTERM, stop)
    producer.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
