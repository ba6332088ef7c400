"""The states that runbooks describe, made by the functions that make them in life."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from psycopg import sql

from tests.sql.calls import Calls, Claim, Row


class Night(Calls):
    """What has happened before the operator was woken, and what is there afterwards. Its clock is the database's."""

    def ago(self, **duration: float) -> None:
        """What comes next happened this long ago; without a duration, now."""
        self.now = datetime.now(UTC) - timedelta(**duration) if duration else None

    def die(
        self,
        topic: str,
        count: int = 1,
        *,
        error_class: str = "GatewayDown",
        error: str = "the gateway does not answer",
        **enqueue: Any,
    ) -> list[uuid.UUID]:
        """Events that have failed for good; no others of the topic may be due."""
        for _ in range(count):
            self.enqueue(topic, **enqueue)
        dead = []
        while claim := self.claim(topic, count):
            failure = {
                "handler": f"shop.{topic}",
                "error_class": error_class,
                "verdict": "terminal",
                "rule": "policy",
            }
            self.fail(claim, error, terminal=True, failure=failure)
            dead += claim.ids
        assert len(dead) == count
        return dead

    def work(self, topic: str, worker: str = "shop-1", **claim: Any) -> list[uuid.UUID]:
        """A dispatcher takes what is due of the topic, and completes it."""
        done = self.claim(topic, 1000, worker=worker, **claim)
        self.complete(done)
        return done.ids

    def kill(self, topic: str, times: int = 1, error: str = "killed by signal 9") -> Claim:
        """The only due event of the topic kills whoever runs it, again and again."""
        for _ in range(times):
            claim = self.claim(topic, worker="shop-1")
            self.lapse(claim, error)
            if self.now is not None:
                self.forward(400)
        return claim

    def alive(
        self, worker: str = "shop-1", *topics: str, generations: list[int] | None = None, pid: int = 1
    ) -> None:
        """A dispatcher says that it is there."""
        self.call("dispatcher_seen", worker, "host-1", pid, "0.1.0", list(topics), generations, 0, False)

    # What is there afterwards

    def ask(self, query: str, *parameters: object) -> list[Row]:
        return self.conn.execute(sql.SQL(query), parameters or None).fetchall()

    def one(self, query: str, *parameters: object) -> Any:
        [row] = self.ask(query, *parameters)
        [value] = row.values()
        return value

    def count(self, **columns: object) -> int:
        condition = sql.SQL(" and ").join(
            sql.SQL("{}::text = {}").format(sql.Identifier(name), sql.Literal(str(value)))
            for name, value in columns.items()
        )
        query = sql.SQL("select count(*) as number from pulse.outbox where {}").format(condition)
        [row] = self.conn.execute(query).fetchall()
        return int(row["number"])

    def last_cycle(self, event_id: uuid.UUID) -> dict[str, Any]:
        history: list[dict[str, Any]] = self.row(event_id)["failure_history"]
        return history[-1]
