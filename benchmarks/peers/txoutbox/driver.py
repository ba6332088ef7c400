"""txoutbox: its asyncpg storage, no strict ordering (no keys are used), notifications, a large batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import asyncpg
from txoutbox import OutboxMessage, Relay, RelayConfig
from txoutbox.adapters.postgres import PostgresStorage

from benchmarks.driver import Run, Task, main, payload_of

TOPIC = "bench"


def storage_on(pool: asyncpg.Pool, task: Task) -> PostgresStorage:
    return PostgresStorage(
        pool, strict_ordering=False, delete_on_ack=bool(task.option("delete")), notify_channel="outbox"
    )


class TxoutboxDriver:
    name = "txoutbox"

    def settings(self, task: Task) -> str:
        if task.action == "work":
            kept = "delete_on_ack" if task.option("delete") else "rows kept"
            return (
                f"asyncpg, strict_ordering=False, notify_channel, batch_size={task.batch}, "
                f"concurrency={task.concurrency}, {kept}"
            )
        return "PostgresStorage.insert in autocommit; many: one transaction of inserts, it has no bulk call"

    async def setup(self, task: Task) -> None:
        async with asyncpg.create_pool(task.dsn, min_size=1, max_size=1) as pool:
            await storage_on(pool, task).create_schema()

    async def producer(self, task: Task) -> Producing:
        pool = await asyncpg.create_pool(task.dsn, min_size=1, max_size=1)
        return Producing(task, pool)

    async def work(self, task: Task, run: Run) -> None:
        pool = await asyncpg.create_pool(task.dsn, min_size=4, max_size=4)
        watching = await asyncpg.connect(task.dsn)
        storage = storage_on(pool, task)

        async def noop(message: OutboxMessage) -> None:
            run.tick()

        async def wait(message: OutboxMessage) -> None:
            await asyncio.sleep(task.io)
            run.tick()

        async def record(message: OutboxMessage) -> None:
            run.record(json.loads(message.payload)["n"])

        async def unsettled() -> bool:
            return bool(
                await watching.fetchval("select exists (select 1 from outbox where status = 'pending')")
            )

        relay = Relay(
            storage,
            {"noop": noop, "io": wait, "record": record}[task.handler],
            config=RelayConfig(batch_size=task.batch, concurrency=task.concurrency),
        )
        listener = await storage.listen(relay.wake)
        running = asyncio.create_task(relay.run())
        await run.until_over(unsettled)
        relay.stop()
        await running
        await listener.close()
        await pool.close()


class Producing:
    def __init__(self, task: Task, pool: asyncpg.Pool) -> None:
        self._task = task
        self._pool = pool
        self._storage = storage_on(pool, task)

    async def one(self, number: int) -> None:
        async with self._pool.acquire() as connection:
            await self._insert(connection, number)

    async def many(self, numbers: Sequence[int]) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            for number in numbers:
                await self._insert(connection, number)

    async def _insert(self, connection: asyncpg.Connection, number: int) -> None:
        await self._storage.insert(connection, TOPIC, payload_of(number, self._task.payload))

    async def close(self) -> None:
        await self._pool.close()


if __name__ == "__main__":
    main(TxoutboxDriver())
