"""pulse-outbox, through its public API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import psycopg
import structlog

from benchmarks.driver import Run, Task, main, payload_of
from pulse_outbox import Dispatcher, Event, NewEvent, Outbox, RetryPolicy, TerminalHandlerError
from pulse_outbox.dispatcher.heap import quiet_collector
from pulse_outbox.dispatcher.timers import make_exact
from pulse_outbox.schema import migrate

TOPIC = "bench"


class Ours:
    name = "pulse-outbox"

    def settings(self, task: Task) -> str:
        if task.action == "work":
            kept = "rows deleted when completed" if task.option("delete") else "completed rows kept"
            return f"concurrency={task.concurrency}, batch={task.batch}, {kept}, all else default"
        return "enqueue in autocommit; many: enqueue_many of a stream in one transaction"

    async def setup(self, task: Task) -> None:
        migrate(task.dsn)

    async def producer(self, task: Task) -> Producing:
        return Producing(task)

    async def work(self, task: Task, run: Run) -> None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        dispatcher = Dispatcher(
            outbox_for(task, run),
            dsn=task.dsn,
            concurrency=task.concurrency,
            batch=task.batch,
            notify=task.option("notify", True),
            poll=task.option("poll", 5),
        )
        running = asyncio.create_task(dispatcher.run_async())
        async with await psycopg.AsyncConnection.connect(task.dsn, autocommit=True) as watching:

            async def unsettled() -> bool:
                cursor = await watching.execute("select exists (select from pulse.running())")
                [row] = await cursor.fetchall()
                return bool(row[0])

            with quiet_collector():  # as `Dispatcher.run` does
                await run.until_over(unsettled)
        dispatcher.stop()
        await running


def topics_of(task: Task) -> list[str]:
    return [TOPIC, *(f"{TOPIC}-{number}" for number in range(1, task.option("topics", 1)))]


def outbox_for(task: Task, run: Run) -> Outbox:
    outbox = Outbox(max_payload_bytes=200_000_000)

    async def noop(event: Event[dict[str, Any]]) -> None:
        run.tick()

    async def wait(event: Event[dict[str, Any]]) -> None:
        await asyncio.sleep(task.io)
        run.tick()

    def plain(event: Event[dict[str, Any]]) -> None:
        run.tick_in_thread()

    async def record(event: Event[dict[str, Any]]) -> None:
        run.record(event.payload["n"])

    async def fail(event: Event[dict[str, Any]]) -> None:
        match run.should_fail(event.payload["n"]):
            case "transient":
                raise ConnectionError("the other side is away")
            case "terminal":
                run.tick()
                raise TerminalHandlerError("never")
            case _:
                run.tick()

    handler = {"noop": noop, "io": wait, "sync": plain, "record": record, "fail": fail}[task.handler]
    for topic in topics_of(task):
        outbox.handler(
            topic,
            completed="delete" if task.option("delete") else "keep",
            retry=RetryPolicy(base_delay=0.1, max_delay=0.1),
            timeout=task.option("timeout", 30),
        )(handler)
    return outbox


class Producing:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._outbox = Outbox(max_payload_bytes=200_000_000)
        self._connection = psycopg.connect(task.dsn, autocommit=True)
        self._keys = task.option("keys")
        self._topics = topics_of(task)

    async def one(self, number: int) -> None:
        self._outbox.enqueue(
            self._connection,
            self._topics[number % len(self._topics)],
            payload_of(number, self._task.payload),
            ordering_key=self._key(number),
            outside_transaction=True,
        )

    async def many(self, numbers: Sequence[int]) -> None:
        size = self._task.payload
        with self._connection.transaction():
            self._outbox.enqueue_many(
                self._connection,
                (
                    NewEvent(TOPIC, payload_of(number, size), ordering_key=self._key(number))
                    for number in numbers
                ),
                stream=True,
            )

    def _key(self, number: int) -> str | None:
        return f"key-{number % self._keys}" if self._keys else None

    async def close(self) -> None:
        self._connection.close()


def run(performing: Coroutine[Any, Any, None]) -> None:
    """In an event loop as `Dispatcher.run` has it."""
    with asyncio.Runner() as runner:
        make_exact(runner.get_loop())
        runner.run(performing)


if __name__ == "__main__":
    main(Ours(), runner=run)
