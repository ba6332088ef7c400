"""Run as a program: somebody on call, who replays, discards, pauses, resumes and prunes, and remembers what he did.

python -m chaos.operators NAME SEED
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg

from chaos.journal import Journal
from chaos.points import Points
from chaos.topics import RETENTION
from pulse_outbox.errors import OutboxError, TransitionRefused
from pulse_outbox.link import shut_down
from pulse_outbox.operations import Operations, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Change = Callable[[Operations, UUID], int | None]

PATIENCE = 8.0
PAUSABLE = ("fast", "slow", "ordered", "effect")


class Operator:
    """Does one thing after the other. Every change has a request id of its own, under which it may be repeated."""

    def __init__(self, name: str, seed: int, directory: Path) -> None:
        self._name = name
        self._random = random.Random(seed)
        self._journal = Journal(directory / f"operator-{name}-{os.getpid()}.jsonl")
        Points(directory / f"orders-{name}", self._journal).wrap_operations()
        self._dsn = os.environ["PULSE_OUTBOX_DSN"]
        self._made: deque[tuple[UUID, Change]] = deque(maxlen=20)
        self.stopping = False

    def run(self) -> None:
        things = {
            self._replay_one: 40,
            self._replay_some: 10,
            self._replay_kind: 8,
            self._repeat: 10,
            self._discard_one: 8,
            self._discard_unfinished: 3,
            self._discard_kind: 1,
            self._pause: 4,
            self._prune: 5,
        }
        left_paused = list(PAUSABLE)  # by somebody who was killed before he could resume
        while not self.stopping:
            time.sleep(self._random.expovariate(2))
            try:
                with self._connected() as operations:
                    while left_paused:
                        self._resume(operations, left_paused[-1])
                        left_paused.pop()
                    self._random.choices(list(things), list(things.values()))[0](operations)
            except (psycopg.Error, OSError, OutboxError) as error:
                self._journal.write("failed", error=type(error).__name__)
        self._journal.write("stopped")

    @contextmanager
    def _connected(self) -> Iterator[Operations]:
        with connect(self._dsn) as conn:
            timer = threading.Timer(PATIENCE, shut_down, (conn,))
            timer.daemon = True
            timer.start()
            try:
                yield Operations(conn)
            finally:
                timer.cancel()

    def _replay_one(self, operations: Operations) -> None:
        if dead := self._some_dead(operations, 1):
            generation = self._random.choice((0, 1, 2))

            def replay(operations: Operations, request: UUID) -> None:
                operations.replay(dead[0], generation=generation, by=self._name, request=request)

            self._change(operations, "replay", dead, replay, generation=generation)

    def _replay_some(self, operations: Operations) -> None:
        if dead := self._some_dead(operations, 20):

            def replay(operations: Operations, request: UUID) -> int:
                return operations.replay_many(dead, generation=2, by=self._name, request=request)

            self._change(operations, "replay_many", dead, replay, generation=2)

    def _replay_kind(self, operations: Operations) -> None:
        generation = self._random.choice((None, 0, 1))
        self._change_kind(operations, "replay_kind", _REPLAY_KIND, generation=generation)

    def _discard_kind(self, operations: Operations) -> None:
        self._change_kind(operations, "discard_kind", _DISCARD_KIND, reason="all of a kind")

    def _change_kind(self, operations: Operations, verb: str, query: str, **asked: Any) -> None:
        """By topic, error class and time, as in the runbook for many."""
        kinds = operations.conn.execute("select topic, error_class from pulse.dead_kind").fetchall()
        if not kinds:
            return
        asked["topic"], asked["error_class"] = self._random.choice(kinds)
        asked |= {"until": operations.now().timestamp(), "limit": 5}

        def change(operations: Operations, request: UUID) -> int:
            given = asked | {"by": self._name, "request": request}
            [(changed,)] = operations.conn.execute(query.encode(), given).fetchall()
            return int(changed)

        self._change(operations, verb, [], change, **asked)

    def _discard_one(self, operations: Operations) -> None:
        if dead := self._some_dead(operations, 1):
            self._discard(operations, dead[0], "of no use")

    def _discard_unfinished(self, operations: Operations) -> None:
        rows = operations.conn.execute(
            "select event_id from pulse.outbox where status in ('PENDING', 'RETRYING') limit 20"
        ).fetchall()
        if rows:
            [event_id] = self._random.choice(rows)
            self._discard(operations, event_id, "no longer wanted")

    def _discard(self, operations: Operations, event_id: UUID, reason: str) -> None:
        def discard(operations: Operations, request: UUID) -> None:
            operations.discard(event_id, reason=reason, by=self._name, request=request)

        self._change(operations, "discard", [event_id], discard, reason=reason)

    def _pause(self, operations: Operations) -> None:
        topic = self._random.choice(PAUSABLE)
        self._journal.write("pausing", topic=topic, by=self._name)
        operations.pause(topic, reason="a drill", by=self._name)
        self._journal.write("paused", topic=topic, by=self._name)
        time.sleep(self._random.uniform(0, 1))
        self._resume(operations, topic)

    def _resume(self, operations: Operations, topic: str) -> None:
        self._journal.write("resuming", topic=topic)
        operations.resume(topic, by=self._name)

    def _prune(self, operations: Operations) -> None:
        page: int | None = 0
        while page is not None:
            _, page = operations.prune(retention=timedelta(seconds=RETENTION), page=page)

    def _some_dead(self, operations: Operations, limit: int) -> list[UUID]:
        rows = operations.conn.execute(
            "select event_id from pulse.dead_letter order by random() limit %s", (limit,)
        ).fetchall()
        return [event_id for (event_id,) in rows]

    def _change(
        self, operations: Operations, verb: str, events: list[UUID], change: Change, **asked: Any
    ) -> None:
        request = uuid4()
        self._journal.write(
            "act",
            verb=verb,
            events=[str(event) for event in events],
            request=str(request),
            asked={"by": self._name, **asked},
        )
        self._made.append((request, change))
        self._call(operations, request, change)

    def _repeat(self, operations: Operations) -> None:
        """As somebody does who has heard nothing; and now and then for no reason."""
        if self._made:
            request, change = self._random.choice(self._made)
            self._journal.write("again", request=str(request))
            self._call(operations, request, change)

    def _call(self, operations: Operations, request: UUID, change: Change) -> None:
        try:
            changed = change(operations, request)
        except TransitionRefused:
            result = "refused"
        except OutboxError:
            result = "failed"
        except (psycopg.Error, OSError):
            self._journal.write("result", request=str(request), result="unknown")
            raise
        else:
            result = "done" if changed is None else f"{changed} done"
        self._journal.write("result", request=str(request), result=result)


_REPLAY_KIND = """select pulse.outbox_replay_many(
    %(topic)s, %(error_class)s, null, to_timestamp(%(until)s), %(limit)s, %(generation)s::bigint, %(by)s,
    p_request => %(request)s)"""
_DISCARD_KIND = """select pulse.outbox_discard_many(
    %(topic)s, %(error_class)s, null, to_timestamp(%(until)s), %(limit)s, %(reason)s, %(by)s,
    p_request => %(request)s)"""


def main(name: str, seed: str) -> None:
    operator = Operator(name, int(seed), Path(os.environ["CHAOS_DIR"]))

    def stop(*_: object) -> None:
        operator.stopping = True

    signal.signal(signal.SIGTERM, stop)
    operator.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
