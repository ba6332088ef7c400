"""pgque: a log. A ticker cuts it into batches, a consumer reads one at a time and acknowledges it as a whole.

The ticker is what pg_cron would call, every 10 ms, the shortest period that its guide calls ordinary. Its Consumer
waits after each batch for a notification; receive and ack, which it is made of, don't, and are the faster of the two.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pgque
import psycopg

from benchmarks.driver import Run, Task, main, payload_of

QUEUE, CONSUMER, KIND = "bench", "worker", "job"
TICK_MS = 10
LOADED_BATCH = 1000


class PgqueDriver:
    name = "pgque-py"

    def settings(self, task: Task) -> str:
        if task.action == "work":
            return f"receive and ack in a loop, a tick every {TICK_MS} ms, whole batches, one message after the other"
        return "send in autocommit; many: send_batch"

    async def setup(self, task: Task) -> None:
        with psycopg.connect(task.dsn, autocommit=True) as conn:
            conn.execute(Path(os.environ["BENCH_NEEDS"], "pgque.sql").read_bytes())
            conn.execute("select pgque.create_queue(%s)", [QUEUE])
            conn.execute("select pgque.subscribe(%s, %s)", [QUEUE, CONSUMER])
            conn.execute("select pgque.set_queue_config(%s, 'ticker_max_lag', %s)", [QUEUE, f"{TICK_MS} ms"])
            conn.execute("select pgque.set_tick_period_ms(%s)", [TICK_MS])

    async def producer(self, task: Task) -> Producing:
        return Producing(task)

    async def work(self, task: Task, run: Run) -> None:
        if task.handler == "io":
            raise SystemExit("not measured: its consumer runs one message after the other")
        stop = threading.Event()
        behind = threading.Event()
        handle = handler_of(task, run)
        threads = [
            threading.Thread(target=or_die, args=(tick, task.dsn, stop), daemon=True),
            threading.Thread(target=or_die, args=(consume, task.dsn, stop, behind, handle), daemon=True),
        ]
        for thread in threads:
            thread.start()

        async def unsettled() -> bool:
            return behind.is_set()

        await run.until_over(unsettled)
        stop.set()
        for thread in threads:
            await asyncio.to_thread(thread.join, 2)


def handler_of(task: Task, run: Run) -> Callable[[Any], None]:
    if task.handler == "record":
        return lambda message: run.record(json.loads(message.payload)["n"])
    return lambda message: run.tick()


def or_die(loop: Callable[..., None], *arguments: Any) -> None:
    """Runs a loop in its thread; its failure is the driver's, which would wait for ever otherwise."""
    try:
        loop(*arguments)
    except Exception:
        traceback.print_exc()
        os._exit(1)


def tick(dsn: str, stop: threading.Event) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        while not stop.is_set():
            conn.execute("call pgque.ticker_loop()")  # about a second


def consume(dsn: str, stop: threading.Event, behind: threading.Event, handle: Callable[[Any], None]) -> None:
    with pgque.connect(dsn, autocommit=True) as client:
        client.conn.execute(f"listen pgque_{QUEUE}")
        while not stop.is_set():
            behind.set()  # until this batch is acknowledged
            with client.conn.transaction():
                messages = client.receive(QUEUE, CONSUMER, 2_147_483_647)
                for message in messages:
                    handle(message)
                if messages:
                    client.ack(messages[0].batch_id)
            behind.clear()
            if not messages:  # nothing there, or a batch without events, behind which there may be another
                for _ in client.conn.notifies(timeout=TICK_MS / 1000, stop_after=1):
                    pass


class Producing:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._client = pgque.connect(task.dsn, autocommit=True)

    async def one(self, number: int) -> None:
        self._client.send(QUEUE, payload_of(number, self._task.payload), type=KIND)

    async def many(self, numbers: Sequence[int]) -> None:
        if not self._task.option("load"):
            return self._send(numbers)
        # Before a drain: in batches, as the ticker would have cut them.
        for start in range(0, len(numbers), LOADED_BATCH):
            self._send(numbers[start : start + LOADED_BATCH])
            self._client.ticker(QUEUE)

    def _send(self, numbers: Sequence[int]) -> None:
        self._client.send_batch(QUEUE, KIND, [payload_of(number, self._task.payload) for number in numbers])

    async def close(self) -> None:
        self._client.close()


if __name__ == "__main__":
    main(PgqueDriver())
