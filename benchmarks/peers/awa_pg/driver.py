"""awa-pg: queue storage (its default), its default claim batch of 512, COPY for bulk."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import awa

from benchmarks.driver import Run, Task, main, payload_of

QUEUE = "bench"


@dataclass
class BenchJob:
    n: int
    pad: str = ""


def url_of(task: Task) -> str:
    # Its parser wants a host before it looks at the socket's folder.
    return task.dsn.replace("@/", "@localhost/")


def job_of(number: int, size: int) -> BenchJob:
    return BenchJob(**payload_of(number, size))


class AwaDriver:
    name = "awa-pg"

    def settings(self, task: Task) -> str:
        if task.action == "work":
            return f"queue storage, max_workers={workers_of(task)}, claim_batch_size={task.batch}"
        return "AsyncClient.insert; many: enqueue_many_copy"

    async def setup(self, task: Task) -> None:
        client = awa.AsyncClient(url_of(task))
        await client.migrate()
        await client.install_queue_storage()  # its default engine since 0.6; without it COPY is refused
        await client.close()

    async def producer(self, task: Task) -> Producing:
        return Producing(task, awa.AsyncClient(url_of(task), max_connections=2))

    async def work(self, task: Task, run: Run) -> None:
        client = awa.AsyncClient(url_of(task), max_connections=20)

        async def noop(job: Any) -> None:
            run.tick()

        async def wait(job: Any) -> None:
            await asyncio.sleep(task.io)
            run.tick()

        async def record(job: Any) -> None:
            run.record(job.args.n)

        client.task(BenchJob, queue=QUEUE)({"noop": noop, "io": wait, "record": record}[task.handler])

        async def unsettled() -> bool:
            # Where it notes what has completed: its own queue_stats takes seconds.
            transaction = await client.transaction()
            row = await transaction.fetch_one(
                "select coalesce(sum(completed_count), 0)::bigint as n from awa.receipt_completion_batches"
            )
            await transaction.rollback()
            return bool(row["n"] < task.count)

        await client.start([{"name": QUEUE, "max_workers": workers_of(task), "claim_batch_size": task.batch}])
        await run.until_over(unsettled)
        await client.shutdown(timeout_ms=2000)


def workers_of(task: Task) -> int:
    # It claims no more than it has workers free: with fewer its batches stay small.
    return task.concurrency if task.handler == "io" else max(task.concurrency, task.batch)


class Producing:
    def __init__(self, task: Task, client: Any) -> None:
        self._task = task
        self._client = client

    async def one(self, number: int) -> None:
        await self._client.insert(job_of(number, self._task.payload), queue=QUEUE)

    async def many(self, numbers: Sequence[int]) -> None:
        await self._client.enqueue_many_copy(
            [job_of(number, self._task.payload) for number in numbers], queue=QUEUE
        )

    async def close(self) -> None:
        await self._client.close()


if __name__ == "__main__":
    main(AwaDriver())
