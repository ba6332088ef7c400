"""The SQL functions on one connection, under their own names and at a simulated time."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import DictRow
from psycopg.types.json import Jsonb

Row = DictRow
NewSession = Callable[[], "Calls"]
LEASE = timedelta(seconds=30)

# Functions whose time comes from their arguments or that need none.
TIMELESS = {"outbox_lanes", "outbox_wake", "outbox_resume", "dispatcher_gone", "uuid7", "paused_topics"}


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


def ids(rows: Iterable[Row]) -> list[uuid.UUID]:
    return [row["event_id"] for row in rows]


class Claim(list[Row]):
    """The rows of one claim, and the token that holds them."""

    def __init__(self, token: uuid.UUID, rows: Iterable[Row]) -> None:
        rows = list(rows)
        super().__init__(row for row in rows if row["event_id"] is not None)
        self.left_behind = [row for row in rows if row["event_id"] is None]
        self.token = token

    @property
    def ids(self) -> list[uuid.UUID]:
        return ids(self)

    @property
    def tokens(self) -> list[uuid.UUID]:
        return [self.token] * len(self)


class Calls:
    """One session of a producer, a worker, a watchdog or an operator. `now` stands still until it is moved."""

    def __init__(self, conn: psycopg.Connection[Row], now: datetime | None) -> None:
        self.conn = conn
        self.now = now

    def forward(self, duration: float) -> None:
        assert self.now is not None
        self.now += seconds(duration)

    def call(self, function: str, *arguments: object, **named: object) -> list[Row]:
        if function not in TIMELESS:
            named.setdefault("p_now", self.now)
        parts: list[sql.Composable] = [sql.Placeholder()] * len(arguments)
        parts += [sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder()) for name in named]
        query = sql.SQL("select * from pulse.{}({})").format(
            sql.Identifier(function), sql.SQL(", ").join(parts)
        )
        return self.conn.execute(query, [*arguments, *named.values()]).fetchall()

    def scalar(self, function: str, *arguments: object, **named: object) -> Any:
        [row] = self.call(function, *arguments, **named)
        [value] = row.values()
        return value

    # Producers

    def enqueue(
        self, topic: str = "mail", *, key: str | None = None, payload: object = None, **named: Any
    ) -> uuid.UUID:
        if key is not None:
            named["p_ordering_key"] = key
        event_id: uuid.UUID = self.scalar("outbox_enqueue", topic, Jsonb(payload or {}), **named)
        return event_id

    def enqueue_many(self, count: int, topic: str = "mail", **named: Any) -> list[uuid.UUID]:
        return [self.enqueue(topic, **named) for _ in range(count)]

    # Dispatchers

    def claim(
        self,
        topics: str | Sequence[str] = "mail",
        limit: int = 10,
        *,
        token: uuid.UUID | None = None,
        worker: str = "worker",
        **named: object,
    ) -> Claim:
        token = token or uuid.uuid4()
        names = [topics] if isinstance(topics, str) else list(topics)
        return Claim(token, self.call("outbox_claim", token, worker, names, limit, **named))

    def claim_lane(
        self, topic: str = "mail", limit: int = 10, *, token: uuid.UUID | None = None, **named: object
    ) -> Claim:
        """The short way, from the beginning of the lane of ordinary events unless another is named."""
        token = token or uuid.uuid4()
        arguments: dict[str, object] = {
            "p_worker": "worker", "p_topic": topic, "p_generation": 0, "p_lapses": 0, "p_priority": 0,
            "p_next_run_at": datetime(2000, 1, 1, tzinfo=UTC), "p_seq": 0, "p_limit": limit, "p_lease": seconds(30),
            "p_budget": 5, "p_slots": limit, "p_try": 1, **named,
        }  # fmt: skip
        return Claim(token, self.call("outbox_claim_lane", token, **arguments))

    def heartbeat(self, claim: Claim, **named: object) -> dict[uuid.UUID, str]:
        return _answers(self.call("outbox_heartbeat", claim.ids, claim.tokens, **named))

    def complete(self, claim: Claim, **named: object) -> dict[uuid.UUID, str]:
        return _answers(self.call("outbox_complete", claim.ids, claim.tokens, **named))

    def fail(
        self,
        claim: Claim,
        error: str = "boom",
        *,
        delay: float = 1,
        terminal: bool = False,
        failure: object = None,
    ) -> dict[uuid.UUID, str]:
        count = len(claim)
        return _answers(
            self.call(
                "outbox_fail",
                claim.ids,
                claim.tokens,
                [error] * count,
                [Jsonb(failure or {"error_class": "Boom"})] * count,
                [seconds(delay)] * count,
                [terminal] * count,
            )
        )

    def snooze(self, claim: Claim, delay: float = 1) -> dict[uuid.UUID, str]:
        return _answers(self.call("outbox_snooze", claim.ids, claim.tokens, [seconds(delay)] * len(claim)))

    def release(self, claim: Claim) -> dict[uuid.UUID, str]:
        return _answers(self.call("outbox_release", claim.ids, claim.tokens))

    def lapse(self, claim: Claim, error: str = "killed by signal 9") -> dict[uuid.UUID, str]:
        return _answers(self.call("outbox_lapse", claim.ids, claim.tokens, error))

    def reap(self, **named: object) -> list[Row]:
        return self.call("outbox_reap", **named)

    def keep_sweeping(self, duration: float) -> list[Row]:
        """What a living watchdog does: it sweeps every ten seconds, here without anything to reap on the way."""
        reaped = self.reap()
        left = duration
        while left > 0:
            self.forward(min(10, left))
            left -= 10
            reaped += self.reap()
        return reaped

    def heal(self, after: str | None = None, limit: int = 500) -> Row:
        [row] = self.call("outbox_heal", after, limit)
        return row

    def seen(
        self,
        worker: str = "worker",
        topics: Sequence[str] = ("mail",),
        *,
        sleeping: bool = False,
        **named: object,
    ) -> None:
        self.call("dispatcher_seen", worker, "host", 1, "0.1.0", list(topics), None, 0, sleeping, **named)

    # Operators

    def replay(self, event_id: uuid.UUID, generation: int = 0, by: str = "operator") -> None:
        self.call("outbox_replay", event_id, generation, by)

    def discard(self, event_id: uuid.UUID, reason: str = "obsolete", by: str = "operator") -> None:
        self.call("outbox_discard", event_id, reason, by)

    def pause(self, topic: str | None = "mail") -> None:
        self.call("outbox_pause", topic, "maintenance", "operator")

    def resume(self, topic: str | None = "mail") -> bool:
        return bool(self.scalar("outbox_resume", topic, "operator"))

    # What the tests look at

    def row(self, event_id: uuid.UUID) -> Row:
        row = self.conn.execute("select * from pulse.outbox where event_id = %s", (event_id,)).fetchone()
        assert row is not None, f"event {event_id} is gone"
        return row

    def status(self, event_id: uuid.UUID) -> str:
        return str(self.row(event_id)["status"])

    def statuses(self, *event_ids: uuid.UUID) -> list[str]:
        return [self.status(event_id) for event_id in event_ids]

    # Short cuts to a state

    def dead(self, topic: str = "mail", *, error: str = "boom", **named: Any) -> uuid.UUID:
        """An event that has died: the only due one of its topic, please."""
        event_id = self.enqueue(topic, **named)
        claim = self.claim(topic)
        assert claim.ids == [event_id]
        assert self.fail(claim, error, terminal=True) == {event_id: "DEAD_LETTERED"}
        return event_id

    def insert(self, **columns: object) -> uuid.UUID:
        """Write a row past the functions, as COPY does."""
        event_id = columns.setdefault("event_id", uuid.uuid4())
        assert isinstance(event_id, uuid.UUID)
        columns = {
            "topic": "mail",
            "payload": Jsonb({}),
            "idempotency_key": str(event_id),
            "next_run_at": self.now,
            "created_at": self.now,
            **columns,
        }
        self.conn.execute(
            sql.SQL("insert into pulse.outbox ({}) values ({})").format(
                sql.SQL(", ").join(map(sql.Identifier, columns)),
                sql.SQL(", ").join([sql.Placeholder()] * len(columns)),
            ),
            list(columns.values()),
        )
        return event_id


def _answers(rows: list[Row]) -> dict[uuid.UUID, str]:
    answers = {row["event_id"]: row["answer"] for row in rows}
    assert len(answers) == len(rows), "one answer for an event"
    return answers
