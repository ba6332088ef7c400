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
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg

from chaos.journal import Journal
from chaos.points import Points
from chaos.topics import RETENTION
from pulse_outbox.errors import OutboxError
from pulse_outbox.link import shut_down
from pulse_outbox.operations import Operations, RowLocked, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        self.stopping = False

    def run(self) -> None:
        things = {
            self._replay_one: 40,
            self._replay_some: 10,
            self._discard_one: 8,
            self._discard_unfinished: 3,
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
            self._change(
                "replay",
                dead,
                lambda request: operations.replay(
                    dead[0], generation=generation, by=self._name, request=request
                ),
            )

    def _replay_some(self, operations: Operations) -> None:
        if dead := self._some_dead(operations, 20):
            self._change(
                "replay_many",
                dead,
                lambda request: operations.replay_many(dead, generation=2, by=self._name, request=request),
            )

    def _discard_one(self, operations: Operations) -> None:
        if dead := self._some_dead(operations, 1):
            self._change(
                "discard",
                dead,
                lambda request: operations.discard(
                    dead[0], reason="of no use", by=self._name, request=request
                ),
            )

    def _discard_unfinished(self, operations: Operations) -> None:
        rows = operations.conn.execute(
            "select event_id from pulse.outbox where status in ('PENDING', 'RETRYING') limit 20"
        ).fetchall()
        if rows:
            [event_id] = self._random.choice(rows)
            self._change(
                "discard",
                [event_id],
                lambda request: operations.discard(
                    event_id, reason="no longer wanted", by=self._name, request=request
                ),
            )

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

    def _change(self, verb: str, events: list[UUID], change: Callable[[UUID], Any]) -> None:
        request = uuid4()
        self._journal.write("act", verb=verb, events=[str(event) for event in events], request=str(request))
        try:
            changed = change(request)
        except RowLocked:
            result = "refused"
        except OutboxError:
            result = "refused"
        except (psycopg.Error, OSError):
            self._journal.write("result", request=str(request), result="unknown")
            raise
        else:
            result = "done" if changed is None else f"{changed} done"
        self._journal.write("result", request=str(request), result=result)


def main(name: str, seed: str) -> None:
    operator = Operator(name, int(seed), Path(os.environ["CHAOS_DIR"]))

    def stop(*_: object) -> None:
        operator.stopping = True

    signal.signal(signal.SIGTERM, stop)
    operator.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
