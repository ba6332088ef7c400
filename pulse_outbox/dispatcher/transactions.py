"""Transactional handlers: their own writes and the event's completion commit together, or not at all."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from pulse_outbox.dispatcher.deadlines import Deadlines
from pulse_outbox.dispatcher.settling import LOCKED_PAUSE
from pulse_outbox.failures import TerminalHandlerError
from pulse_outbox.link import CALL_TIMEOUT, connection_string, shut_down
from pulse_outbox.storage_retry import loses_connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from pulse_outbox.dispatcher.jobs import Job
    from pulse_outbox.events import Event
    from pulse_outbox.store import Clock

    Build = Callable[[Any], Event[Any]]

POOL_SIZE = 10
PATIENCE = 5.0
"""How long to wait for a connection, or for a row that somebody else has locked, in seconds."""
DEADLINE = CALL_TIMEOUT.total_seconds()
_DEADLINES = Deadlines()
_IS_READ_ONLY = "select current_setting('transaction_read_only')"


class NotStarted(Exception):
    """The handler was never called: there was no connection to be had."""


class LeaseLost(Exception):
    """The event is no longer this claim's: what the handler wrote must not be kept."""


class HandlerTransaction:
    """One handler and the completion of its event, in one transaction of a connection, or in a savepoint of it.

    Whatever is ours to wait for, before the handler and after it, has a deadline: a server that does not answer is cut
    off. The handler's own statements have none.
    """

    def __init__(self, schema: str, clock: Clock | None = None) -> None:
        self._clock = clock
        self._complete = sql.SQL(
            "select answer from {}(array[%s]::uuid[], array[%s]::uuid[], %s::boolean, %s::timestamptz)"
        ).format(sql.Identifier(schema, "outbox_complete"))

    async def run_async(self, conn: psycopg.AsyncConnection[Any], job: Job, build: Build) -> None:
        """Runs an async handler and completes its event."""
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(DEADLINE, shut_down, conn)
        begun = False
        try:
            async with conn.transaction():
                begun = True
                deadline.cancel()
                try:
                    await job.handler.function(build(conn))
                except psycopg.Rollback as error:
                    raise _rolled_back() from error
                finally:
                    # Also when it raised: then the rollback is ours to wait for.
                    deadline = loop.call_later(DEADLINE, shut_down, conn)
                give_up_at = time.monotonic() + PATIENCE
                # A cursor of its own: the handler may have given the connection another row factory.
                cursor = conn.cursor(row_factory=tuple_row)
                while True:
                    await cursor.execute(self._complete, self._values(job))
                    if not _is_locked(await cursor.fetchall(), give_up_at):
                        break
                    await asyncio.sleep(LOCKED_PAUSE)
        except psycopg.Error as error:
            if not begun:
                raise NotStarted("its transaction could not begin") from error
            raise
        finally:
            deadline.cancel()

    def run_sync(self, conn: psycopg.Connection[Any], job: Job, build: Build) -> None:
        """Runs a sync handler, in whatever thread this is, and completes its event."""
        deadline = _DEADLINES.start(conn, DEADLINE)
        begun = False
        try:
            with conn.transaction():
                begun = True
                _DEADLINES.stop(deadline)
                try:
                    _refuse_awaitable(job.handler.function(build(conn)))
                except psycopg.Rollback as error:
                    raise _rolled_back() from error
                finally:
                    deadline = _DEADLINES.start(conn, DEADLINE)
                give_up_at = time.monotonic() + PATIENCE
                cursor = conn.cursor(row_factory=tuple_row)
                while _is_locked(
                    cursor.execute(self._complete, self._values(job)).fetchall(),
                    give_up_at,
                ):
                    time.sleep(LOCKED_PAUSE)
        except psycopg.Error as error:
            if not begun:
                raise NotStarted("its transaction could not begin") from error
            raise
        finally:
            _DEADLINES.stop(deadline)

    def _values(self, job: Job) -> tuple[Any, ...]:
        now = self._clock() if self._clock is not None else None  # without one the database's rules
        return job.claim.event_id, job.claim.token, job.handler.completed == "delete", now


def _rolled_back() -> RuntimeError:
    # The transaction would end without a word, and the event with neither a completion nor a failure.
    return RuntimeError(
        "the handler rolled its transaction back (psycopg.Rollback), so its event is not completed: "
        "undo a part of the work in a `connection.transaction()` of its own, or raise what went wrong"
    )


def _refuse_awaitable(returned: object) -> None:
    if not inspect.isawaitable(returned):
        return
    if inspect.iscoroutine(returned):
        returned.close()
    raise TerminalHandlerError(
        "the handler is no `async def` but returns something to await, so it did not run: "
        "a decorator around an async handler must be `async def` itself"
    )


def _is_locked(answers: list[tuple[Any, ...]], give_up_at: float) -> bool:
    """False: it is completed. True: a heartbeat or an operator has the row for the moment."""
    if not answers:
        return False
    [(answer,)] = answers
    if answer != "locked":
        raise LeaseLost
    if time.monotonic() >= give_up_at:
        raise TimeoutError(
            "the event's row stayed locked by somebody else; what the handler wrote is rolled back"
        )
    return True


class Transactions:
    """A bounded pool of connections for transactional handlers.

    READ COMMITTED, as the fence needs it: the completion sees what others have done to the row meanwhile.
    """

    def __init__(self, dsn: str, *, schema: str, size: int = POOL_SIZE, clock: Clock | None = None) -> None:
        conninfo = connection_string(dsn, "pulse-outbox handlers")
        options: dict[str, Any] = {
            "min_size": 0,
            "max_size": size,
            "open": False,
            "kwargs": {"prepare_threshold": None},
        }
        self._transaction = HandlerTransaction(schema, clock)
        # Looked at before it is lent: a connection that died in the pool, or that leads to a server which is
        # read-only since a failover, would cost a handler its attempt.
        self._async_pool = AsyncConnectionPool(conninfo, check=_check_async, **options)
        self._pool = ConnectionPool(conninfo, check=_check, **options)

    async def open(self) -> None:
        """Makes the pools ready; connections are opened when the first handler needs one."""
        await self._async_pool.open()
        self._pool.open()

    async def close(self) -> None:
        """Closes what is idle; what a stuck handler holds is not waited for."""
        await self._async_pool.close(timeout=1)
        await asyncio.to_thread(self._pool.close, 1)

    async def run_async(self, job: Job, build: Build) -> None:
        """Runs an async handler and completes its event in one transaction."""
        try:
            conn = await self._async_pool.getconn(timeout=PATIENCE)
        except (PoolTimeout, psycopg.Error) as error:
            raise NotStarted("no connection for its transaction") from error
        try:
            await self._transaction.run_async(conn, job, build)
        except (psycopg.Error, NotStarted) as error:
            if _is_spent(error):
                await conn.close()
            raise
        finally:
            conn.row_factory = tuple_row
            await self._async_pool.putconn(conn)

    def run_sync(self, job: Job, build: Build) -> None:
        """Runs a sync handler, in whatever thread this is, and completes its event in one transaction."""
        try:
            conn = self._pool.getconn(timeout=PATIENCE)
        except (PoolTimeout, psycopg.Error) as error:
            raise NotStarted("no connection for its transaction") from error
        try:
            self._transaction.run_sync(conn, job, build)
        except (psycopg.Error, NotStarted) as error:
            if _is_spent(error):
                conn.close()
            raise
        finally:
            conn.row_factory = tuple_row
            self._pool.putconn(conn)


def _is_spent(error: psycopg.Error | NotStarted) -> bool:
    """Whether the pool should not have this connection back."""
    return isinstance(error, NotStarted) or loses_connection(error)


async def _check_async(conn: psycopg.AsyncConnection[Any]) -> None:
    deadline = asyncio.get_running_loop().call_later(DEADLINE, shut_down, conn)
    try:
        await conn.set_autocommit(True)
        cursor = conn.cursor(row_factory=tuple_row)
        if await (await cursor.execute(_IS_READ_ONLY)).fetchone() != ("off",):
            await conn.close()  # or the pool would keep it
            raise psycopg.OperationalError("the server is read-only")
        await conn.set_autocommit(False)
        await conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)  # whatever the last handler set
    finally:
        deadline.cancel()


def _check(conn: psycopg.Connection[Any]) -> None:
    deadline = _DEADLINES.start(conn, DEADLINE)
    try:
        conn.autocommit = True
        if conn.cursor(row_factory=tuple_row).execute(_IS_READ_ONLY).fetchone() != ("off",):
            conn.close()
            raise psycopg.OperationalError("the server is read-only")
        conn.autocommit = False
        conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    finally:
        _DEADLINES.stop(deadline)
