"""Transactional handlers: their own writes and the event's completion commit together, or not at all."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pulse_outbox.store import connection_string

if TYPE_CHECKING:
    from collections.abc import Callable

    from pulse_outbox.dispatcher.jobs import Job
    from pulse_outbox.events import Event

POOL_SIZE = 10
LOCKED_PATIENCE = 5.0
LOCKED_PAUSE = 0.05


class LeaseLost(Exception):
    """The event is no longer this claim's: what the handler wrote must not be kept."""


class Transactions:
    """A bounded pool of connections, and the transaction around a handler.

    READ COMMITTED, as the fence needs it: the completion sees what others have done to the row meanwhile.
    """

    def __init__(self, dsn: str, *, schema: str, size: int = POOL_SIZE) -> None:
        conninfo = connection_string(dsn, "pulse-outbox handlers")
        options: dict[str, Any] = {
            "min_size": 0,
            "max_size": size,
            "open": False,
            "kwargs": {"prepare_threshold": None},
            "configure": None,
        }
        self._complete = sql.SQL("select answer from {}(array[%s]::uuid[], array[%s]::uuid[], %s)").format(
            sql.Identifier(schema, "outbox_complete")
        )
        self._async_pool = AsyncConnectionPool(conninfo, **options)
        self._pool = ConnectionPool(conninfo, **options)

    async def open(self) -> None:
        """Makes the pools ready; connections are opened when the first handler needs one."""
        await self._async_pool.open()
        self._pool.open()

    async def close(self) -> None:
        """Closes what is idle; what a stuck handler holds is not waited for."""
        await self._async_pool.close(timeout=1)
        await asyncio.to_thread(self._pool.close, 1)

    async def run_async(self, job: Job, build: Callable[[Any], Event[Any]]) -> None:
        """Runs an async handler and completes its event in one transaction."""
        async with self._async_pool.connection() as conn:
            await conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            async with conn.transaction():
                await job.handler.function(build(conn))
                give_up_at = time.monotonic() + LOCKED_PATIENCE
                while self._is_locked(
                    await (await conn.execute(self._complete, _of(job))).fetchall(), give_up_at
                ):
                    await asyncio.sleep(LOCKED_PAUSE)

    def run_sync(self, job: Job, build: Callable[[Any], Event[Any]]) -> None:
        """Runs a sync handler, in whatever thread this is, and completes its event in one transaction."""
        with self._pool.connection() as conn:
            conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            with conn.transaction():
                job.handler.function(build(conn))
                give_up_at = time.monotonic() + LOCKED_PATIENCE
                while self._is_locked(conn.execute(self._complete, _of(job)).fetchall(), give_up_at):
                    time.sleep(LOCKED_PAUSE)

    def _is_locked(self, answers: list[tuple[Any, ...]], give_up_at: float) -> bool:
        """False: it is completed. True: a heartbeat or an operator has the row for the moment."""
        if not answers:
            return False
        [(answer,)] = answers
        if answer == "locked" and time.monotonic() < give_up_at:
            return True
        raise LeaseLost(answer)


def _of(job: Job) -> tuple[Any, ...]:
    return job.claim.event_id, job.claim.token, job.handler.completed == "delete"
