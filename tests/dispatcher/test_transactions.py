"""Transactional handlers: what they write and the completion of their event stand or fall together."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from pulse_outbox import Event, NewEvent, Outbox, RetryPolicy
from pulse_outbox.dispatcher import transactions
from tests.dispatcher.test_leases import TAKEN_AWAY
from tests.support.dispatching import Table, dispatching, drain
from tests.support.proxy import proxied
from tests.support.waiting import wait_until_async

KINDS = pytest.mark.parametrize("kind", ["async", "sync"])
SOON = RetryPolicy(max_attempts=3, base_delay=0.05, max_delay=0.05)
Body = Callable[[Event[Any], Any], Any]


async def effects(table: Table) -> int:
    [(number,)] = await table.execute("select count(*) from public.effect")
    return int(number)


@pytest.fixture
async def handle(outbox: Outbox, table: Table):
    """Registers a transactional handler that writes one row and then does what the test wants."""
    await table.execute("create table public.effect (event_id uuid)")

    def register(kind: str, body: Body, **options: Any) -> None:
        write = "insert into public.effect values (%s)"
        if kind == "async":

            @outbox.handler("job", transactional=True, **{"retry": SOON, **options})
            async def handle_async(event: Event[dict]) -> None:
                await event.connection.execute(write, (event.id,))
                returned = body(event, event.connection)
                if asyncio.iscoroutine(returned):
                    await returned
        else:

            @outbox.handler("job", transactional=True, **{"retry": SOON, **options})
            def handle_sync(event: Event[dict]) -> None:
                event.connection.execute(write, (event.id,))
                body(event, event.connection)

    return register


@KINDS
@pytest.mark.parametrize("completed", ["keep", "delete"])
async def test_effect_and_completion_commit_together(
    dsn, outbox: Outbox, table: Table, handle, kind: str, completed: str
):
    isolation: list[str] = []

    def look(event: Event[Any], conn: Any) -> None:
        isolation.append(conn.isolation_level.name)

    handle(kind, look, completed=completed)
    await table.execute(
        "do $$ begin execute format('alter database %I set default_transaction_isolation = serializable', "
        "current_database()); end $$"
    )
    event_id = await table.enqueue(outbox, "job")
    # The transaction that wrote the effect is the one that completed the event.
    await drain(outbox, dsn)

    if completed == "keep":
        [(same,)] = await table.execute(
            "select o.xmin = e.xmin from pulse.outbox o join public.effect e using (event_id) "
            "where event_id = %s and status = 'COMPLETED'",
            event_id,
        )
        assert same
    else:
        assert await table.count() == 0
    assert await effects(table) == 1
    assert isolation == ["READ_COMMITTED"]


@KINDS
async def test_an_error_rolls_the_effect_back(dsn, outbox: Outbox, table: Table, handle, kind: str):
    def fail(event: Event[Any], conn: Any) -> None:
        if event.attempt < 3:
            raise ValueError("not yet")

    handle(kind, fail)
    event_id = await table.enqueue(outbox, "job")
    async with dispatching(outbox, dsn):
        row = await table.until_status(event_id, "COMPLETED")

    assert row.attempts == 3
    assert await effects(table) == 1


@KINDS
async def test_a_lost_lease_rolls_the_effect_back(dsn, outbox: Outbox, table: Table, handle, kind: str):
    """Stolen in mid handler: the thief's run has its effect, this one's is as if it had never been."""
    thief = psycopg.connect(dsn, autocommit=True)

    def steal(event: Event[Any], conn: Any) -> None:
        if event.lease_seq == 1:
            thief.execute(TAKEN_AWAY, (event.id,))

    handle(kind, steal)
    event_id = await table.enqueue(outbox, "job")
    async with dispatching(outbox, dsn) as dispatcher:
        row = await table.until_status(event_id, "COMPLETED")
        assert dispatcher._tally.lost == 1
    thief.close()

    assert row.lease_seq == 2
    assert await effects(table) == 1


@KINDS
async def test_a_backend_killed_in_mid_transaction(dsn, outbox: Outbox, table: Table, handle, kind: str):
    killer = psycopg.connect(dsn, autocommit=True)

    def die(event: Event[Any], conn: Any) -> None:
        if event.attempt == 1:
            killer.execute("select pg_terminate_backend(%s)", (conn.info.backend_pid,))

    handle(kind, die)
    event_id = await table.enqueue(outbox, "job")
    async with dispatching(outbox, dsn):
        row = await table.until_status(event_id, "COMPLETED")
    killer.close()

    assert row.attempts == 2
    assert await effects(table) == 1


@KINDS
async def test_commit_whose_answer_is_lost(dsn, outbox: Outbox, table: Table, handle, kind: str):
    """FAULTS 8: it was committed, the worker can't know; it neither runs again nor becomes a failure."""
    from tests.support.proxy import proxied

    handle(kind, lambda event, conn: None)
    async with proxied(dsn) as proxy, dispatching(outbox, proxy.dsn) as dispatcher:

        async def sleeps() -> bool:
            return bool(await table.execute("select 1 from pulse.dispatcher where sleeping"))

        await wait_until_async(sleeps)
        proxy.lose_answer_to = b"COMMIT\0"
        event_id = await table.enqueue(outbox, "job")

        async def lost() -> bool:
            return proxy.lost_answers == 1 and len(dispatcher._in_flight) == 0

        await wait_until_async(lost)
        row = await table.row(event_id)

    assert (row.status, row.attempts, row.last_error) == ("COMPLETED", 1, None)
    assert await effects(table) == 1


@KINDS
async def test_a_row_that_stays_locked(dsn, outbox: Outbox, table: Table, handle, kind: str, monkeypatch):
    """FAULTS 41: an operator holds the row; the effects wait for it or are rolled back, never kept alone."""
    monkeypatch.setattr("pulse_outbox.dispatcher.transactions.PATIENCE", 0.5)
    locked = asyncio.Event()
    loop = asyncio.get_running_loop()
    operator = psycopg.connect(dsn)

    def lock(event: Event[Any], conn: Any) -> None:
        if not locked.is_set():
            operator.execute("select 1 from pulse.outbox where event_id = %s for update", (event.id,))
            loop.call_soon_threadsafe(locked.set)

    handle(kind, lock)
    event_id = await table.enqueue(outbox, "job")
    async with dispatching(outbox, dsn):
        await locked.wait()

        async def rolled_back() -> bool:
            [(idle,)] = await table.execute(
                "select count(*) from pg_stat_activity where application_name = 'pulse-outbox handlers' "
                "and datname = current_database() and state = 'idle'"
            )
            return bool(idle)

        await wait_until_async(rolled_back)
        assert await effects(table) == 0
        operator.rollback()
        row = await table.until_status(event_id, "COMPLETED")
    operator.close()

    assert row.lapses == 0, "whoever locks a row makes no suspect of its job"
    assert await effects(table) == 1


@KINDS
async def test_more_jobs_than_connections(dsn, outbox: Outbox, table: Table, handle, kind: str, monkeypatch):
    """Jobs wait in the database for a connection, not in the process until its patience ends."""
    monkeypatch.setattr("pulse_outbox.dispatcher.transactions.PATIENCE", 0.3)

    def work(event: Event[Any], conn: Any) -> Any:
        if kind == "async":
            return asyncio.sleep(0.2)
        time.sleep(0.2)
        return None

    handle(kind, work)
    await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(60)])
    async with dispatching(outbox, dsn, concurrency=50):
        await table.until("status = 'COMPLETED'", 60)

    assert await table.count("attempts > 1 or lapses > 0") == 0
    assert await effects(table) == 60


@KINDS
async def test_dead_connections_in_the_pool_cost_no_attempt(
    dsn, outbox: Outbox, table: Table, handle, kind: str
):
    handle(kind, lambda event, conn: None)
    async with dispatching(outbox, dsn):
        await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(30)])
        await table.until("status = 'COMPLETED'", 30)
        await table.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pulse-outbox handlers' "
            "and datname = current_database()"
        )
        await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(30)])
        await table.until("status = 'COMPLETED'", 60)

    assert await table.count("attempts > 1 or lapses > 0") == 0


@KINDS
async def test_a_connection_that_dies_before_the_transaction_begins(
    dsn, outbox: Outbox, table: Table, handle, kind: str
):
    """The handler was never called, so it costs no attempt, not even the only one."""
    from tests.support.proxy import proxied

    handle(kind, lambda event, conn: None, retry=RetryPolicy(max_attempts=1))
    async with proxied(dsn) as proxy, dispatching(outbox, proxy.dsn):
        proxy.lose_answer_to = b"BEGIN"
        event_id = await table.enqueue(outbox, "job")
        row = await table.until_status(event_id, "COMPLETED")

    assert proxy.lost_answers == 1
    assert (row.attempts, row.lease_seq) == (1, 2)
    assert await effects(table) == 1


async def test_a_read_only_connection_does_not_stay_in_the_pool(
    dsn, outbox: Outbox, table: Table, handle, monkeypatch
):
    """FAULTS 11: after a failover the old server's connections are of no more use, though they live."""
    monkeypatch.setattr("pulse_outbox.dispatcher.transactions.PATIENCE", 0.5)
    handle(
        "async", lambda event, conn: None, retry=RetryPolicy(max_attempts=9, base_delay=0.05, max_delay=0.05)
    )
    read_only = (
        "do $$ begin execute format('alter database %I set default_transaction_read_only = {}', "
        "current_database()); end $$"
    )
    async with dispatching(outbox, dsn):
        await table.enqueue(outbox, "job")
        await table.until("status = 'COMPLETED'", 1)
        writer = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        await writer.execute(read_only.format("on").encode())
        # The pool's connections are replaced by ones that were opened on the read-only side.
        await writer.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pulse-outbox handlers' "
            "and datname = current_database()"
        )
        event_id = await outbox.enqueue_async(writer, "job", {}, outside_transaction=True)

        async def tried() -> bool:
            return bool((await table.row(event_id)).status == "RUNNING")

        await wait_until_async(tried)
        await asyncio.sleep(0.2)  # long enough for the handler, had it been given the connection
        await writer.execute("set default_transaction_read_only = off")
        await writer.execute(read_only.format("off").encode())
        await writer.close()
        row = await table.until_status(event_id, "COMPLETED")

    assert (row.attempts, row.last_error) == (1, None)


@KINDS
@pytest.mark.parametrize("step", ["look", "begin"])
async def test_a_server_that_does_not_answer_is_not_waited_for(
    dsn, outbox: Outbox, table: Table, handle, monkeypatch, kind: str, step: str
):
    """Neither when a connection is looked at nor when its transaction begins; no attempt is spent on it.

    The handler's own timeout counts from its beginning: it must not fail for a wait that was not its own.
    """
    monkeypatch.setattr(transactions, "DEADLINE", 1.5)
    if step == "begin":  # as if the connection had died right after it was looked at
        monkeypatch.setattr(transactions, "_check", None)
        monkeypatch.setattr(transactions, "_check_async", None)
    handle(kind, lambda event, conn: None, timeout=1)
    async with proxied(dsn) as proxy, dispatching(outbox, proxy.dsn, lease=6, heartbeat=2):
        first = await table.enqueue(outbox, "job")
        await table.until_status(first, "COMPLETED")
        assert proxy.freeze("pulse-outbox handlers") == 1
        second = await table.enqueue(outbox, "job")
        row = await table.until_status(second, "COMPLETED", within=15)

    assert (row.attempts, row.lapses, row.last_error) == (1, 0, None)
    assert await effects(table) == 2


@KINDS
async def test_a_failed_handler_does_not_wait_for_a_silent_server_either(
    dsn, outbox: Outbox, table: Table, handle, monkeypatch, kind: str
):
    """Its rollback gets no answer; its slot, its connection and its lease are not held for that."""
    async with proxied(dsn) as proxy:

        def fail(event: Event[Any], conn: Any) -> None:
            monkeypatch.undo()
            if event.attempt == 1:
                monkeypatch.setattr(transactions, "DEADLINE", 0.5)
                assert proxy.freeze("pulse-outbox handlers") == 1
                raise ValueError("the gateway says no")

        handle(kind, fail)
        async with dispatching(outbox, proxy.dsn):
            event_id = await table.enqueue(outbox, "job")
            row = await table.until_status(event_id, "COMPLETED", within=15)

    assert (row.attempts, row.lapses) == (2, 0)
    assert await effects(table) == 1


@KINDS
async def test_a_handler_that_rolls_back_has_failed(dsn, outbox: Outbox, table: Table, handle, kind: str):
    """psycopg ends the block without an exception then; nothing was completed, so it is tried again."""

    def roll_back(event: Event[Any], conn: Any) -> None:
        raise psycopg.Rollback

    handle(kind, roll_back)
    event_id = await table.enqueue(outbox, "job")
    async with dispatching(outbox, dsn) as dispatcher:
        row = await table.until_status(event_id, "DEAD_LETTERED")
        assert dispatcher._tally.completed == 0

    assert (row.attempts, row.lapses) == (3, 0)
    assert "rolled its transaction back" in row.last_error
    assert await effects(table) == 0


async def test_an_async_handler_in_a_plain_wrapper_is_refused(dsn, outbox: Outbox, table: Table):
    """The wrapper's coroutine can't be awaited beside a sync connection; unawaited, its event would be lost."""

    async def handle(event: Event[Any]) -> None:
        raise AssertionError("not reached")

    @outbox.handler("job", transactional=True)
    @functools.wraps(handle)
    def wrapper(event: Event[Any]) -> Any:
        return handle(event)

    event_id = await table.enqueue(outbox, "job")
    async with dispatching(outbox, dsn):
        row = await table.until_status(event_id, "DEAD_LETTERED")

    assert row.attempts == 1
    assert "must be `async def` itself" in row.last_error
