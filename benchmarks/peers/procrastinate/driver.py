"""procrastinate: its psycopg connector, many subworkers. It fetches one job at a time; there is no batch to set."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import psycopg
from procrastinate import App, PsycopgConnector

from benchmarks.driver import Run, Task, main, payload_of

# More of them only wait for each other: its subworkers share one fetch.
MOST_SUBWORKERS = 100


def app_on(task: Task, size: int) -> App:
    return App(connector=PsycopgConnector(conninfo=task.dsn, min_size=size, max_size=size))


class ProcrastinateDriver:
    name = "procrastinate"

    def settings(self, task: Task) -> str:
        if task.action == "work":
            kept = "delete_jobs=always" if task.option("delete") else "jobs kept"
            return f"psycopg, concurrency={concurrency_of(task)}, listen_notify, {kept}"
        return "psycopg, defer_async; many: batch_defer_async"

    async def setup(self, task: Task) -> None:
        app = app_on(task, 1)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    async def producer(self, task: Task) -> Producing:
        app = app_on(task, 1)
        await app.open_async()
        return Producing(task, app)

    async def work(self, task: Task, run: Run) -> None:
        app = app_on(task, 10)

        async def noop(n: int, pad: str = "") -> None:
            run.tick()

        async def wait(n: int, pad: str = "") -> None:
            await asyncio.sleep(task.io)
            run.tick()

        async def record(n: int, pad: str = "") -> None:
            run.record(n)

        app.task(name="bench")({"noop": noop, "io": wait, "record": record}[task.handler])
        async with (
            app.open_async(),
            await psycopg.AsyncConnection.connect(task.dsn, autocommit=True) as watching,
        ):

            async def unsettled() -> bool:
                cursor = await watching.execute(
                    "select exists (select 1 from procrastinate_jobs where status in ('todo', 'doing'))"
                )
                [row] = await cursor.fetchall()
                return bool(row[0])

            running = asyncio.create_task(
                app.run_worker_async(
                    concurrency=concurrency_of(task),
                    install_signal_handlers=False,
                    delete_jobs="always" if task.option("delete") else "never",
                )
            )
            await run.until_over(unsettled)
            running.cancel()
            await asyncio.wait([running])


def concurrency_of(task: Task) -> int:
    return task.concurrency if task.handler == "io" else min(task.concurrency, MOST_SUBWORKERS)


class Producing:
    def __init__(self, task: Task, app: App) -> None:
        self._task = task
        self._app = app
        self._deferrer = app.configure_task("bench")

    async def one(self, number: int) -> None:
        await self._deferrer.defer_async(**self._payload(number))

    async def many(self, numbers: Sequence[int]) -> None:
        await self._deferrer.batch_defer_async(*map(self._payload, numbers))

    def _payload(self, number: int) -> dict[str, Any]:
        return payload_of(number, self._task.payload)

    async def close(self) -> None:
        await self._app.close_async()


if __name__ == "__main__":
    main(ProcrastinateDriver())
