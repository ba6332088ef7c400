"""pgqueuer: a single asyncpg connection for the manager, a large batch, its own autovacuum settings.

What its guide to tuning asks for: a batch well above the default of 10 for short jobs, one direct connection for the
manager, `pgq autovac`. Durability stays `durable`, its default: the others are not durable.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.driver import Run, Task, main, payload_of

ENTRYPOINT = "bench"


class PgQueuerDriver:
    name = "pgqueuer"

    def settings(self, task: Task) -> str:
        if task.action == "work":
            limit = limit_of(task)
            return (
                f"asyncpg, uvloop, batch_size={batch_of(task)}, max_concurrent_tasks={limit or 'no limit'}, "
                "pgq autovac"
            )
        return "asyncpg, Queries.enqueue; many: lists"

    async def setup(self, task: Task) -> None:
        connection = await asyncpg.connect(task.dsn)
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()
        await connection.close()

    async def producer(self, task: Task) -> Producing:
        return Producing(task, await asyncpg.connect(task.dsn))

    async def work(self, task: Task, run: Run) -> None:
        connection = await asyncpg.connect(task.dsn)
        watching = await asyncpg.connect(task.dsn)
        pgq = PgQueuer(AsyncpgDriver(connection))

        @pgq.entrypoint(ENTRYPOINT)  # type: ignore[untyped-decorator]  # it is not installed where mypy runs
        async def handle(job: Job) -> None:
            match task.handler:
                case "noop":
                    run.tick()
                case "io":
                    await asyncio.sleep(task.io)
                    run.tick()
                case "record":
                    run.record(json.loads(job.payload or b"{}")["n"])

        async def unsettled() -> bool:
            return bool(await watching.fetchval("select exists (select 1 from pgqueuer)"))

        running = asyncio.create_task(
            pgq.run(
                batch_size=batch_of(task),
                max_concurrent_tasks=limit_of(task),
                dequeue_timeout=timedelta(seconds=5),
            )
        )
        await run.until_over(unsettled)
        pgq.shutdown.set()
        await running


def batch_of(task: Task) -> int:
    return min(task.batch, task.concurrency // 2) if task.handler == "io" else task.batch


def limit_of(task: Task) -> int | None:
    # No-op handlers need no limit, and the documentation has none in its benchmark.
    return task.concurrency if task.handler == "io" else None


class Producing:
    def __init__(self, task: Task, connection: asyncpg.Connection) -> None:
        self._task = task
        self._connection = connection
        self._queries = Queries(AsyncpgDriver(connection))

    async def one(self, number: int) -> None:
        await self._queries.enqueue(ENTRYPOINT, self._payload(number))

    async def many(self, numbers: Sequence[int]) -> None:
        await self._queries.enqueue(
            [ENTRYPOINT] * len(numbers), [self._payload(number) for number in numbers], [0] * len(numbers)
        )

    def _payload(self, number: int) -> bytes:
        return json.dumps(payload_of(number, self._task.payload)).encode()

    async def close(self) -> None:
        await self._connection.close()


if __name__ == "__main__":
    main(PgQueuerDriver(), runner=uvloop.run)
