"""In a backlog a claim does not wait for the disk: what it took does, before any of it starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import psycopg

from pulse_outbox import Outbox
from pulse_outbox.link import Link
from pulse_outbox.store import Store
from tests.dispatcher.test_backlog import BATCH, fill, runs_of
from tests.support.dispatching import Table, dispatching
from tests.support.waiting import wait_until_async

MANY = 2000


async def let_flush(table: Table, outbox: Outbox, runs: Counter[int]) -> None:
    """A backlog that is worked off, so that flushes are ready."""
    while not await table.execute("select is_called from pulse.flushed where is_called"):
        await fill(table, outbox, 10 * BATCH)
        await table.until("status <> 'COMPLETED'", 0)
    await table.execute("truncate pulse.outbox")
    runs.clear()


@asynccontextmanager
async def flushes_that_hang(
    dsn: str, table: Table, outbox: Outbox, runs: Counter[int]
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """As if the disk hung, for whoever sets the sequence, until what this gives is called."""
    await let_flush(table, outbox, runs)
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await conn.execute("alter sequence pulse.flushed cache 1")
        yield conn.rollback
        await conn.rollback()


async def fill_and_hold_back(table: Table, outbox: Outbox) -> list[int]:
    """A backlog; which events were claimed and wait for their flush."""

    async def are_held_back() -> list[int]:
        rows = await table.execute(
            "select (o.payload ->> 'n')::integer"
            "  from pulse.batch b join pulse.outbox o on o.event_id = any (b.event_ids)"
        )
        return [n for (n,) in rows]

    await fill(table, outbox, MANY)
    await wait_until_async(are_held_back)
    return await are_held_back()


async def test_only_the_claim_itself_does_not_wait(dsn, outbox: Outbox, table: Table):
    """What is written after it on the same connection is as durable as ever."""
    await fill(table, outbox, 6)
    link = Link(dsn)
    store = Store(link)
    claims = await store.claim(limit=3, topics=["mail"], unflushed=True)
    setting = await link.rows(b"select pg_catalog.current_setting('synchronous_commit')", ())
    others = await store.claim(limit=3, topics=["mail"])
    await store.close()

    assert (len(claims), len(others)) == (3, 3)
    assert setting == [("on",)]


async def test_nothing_starts_before_it_is_on_disk(dsn, outbox: Outbox, table: Table):
    """A server that crashes forgets such a claim, and gives the same events and numbers to somebody else."""
    runs = runs_of(outbox)
    async with (
        dispatching(outbox, dsn, batch=BATCH, concurrency=BATCH),
        flushes_that_hang(dsn, table, outbox, runs) as free,
    ):
        held_back = await fill_and_hold_back(table, outbox)
        await table.until("status = 'COMPLETED'", runs.total())
        assert runs.keys().isdisjoint(held_back)
        await free()
        await table.until("status = 'COMPLETED'", MANY)

    assert runs == Counter(range(MANY))
    assert await table.count("attempts = 1 and lease_seq = 1") == MANY


async def test_what_is_not_on_disk_for_certain_is_given_back(dsn, outbox: Outbox, table: Table):
    """The connection of flushes is lost: nobody knows whether the server has crashed in between."""
    runs = runs_of(outbox)
    async with (
        dispatching(outbox, dsn, batch=BATCH, concurrency=BATCH),
        flushes_that_hang(dsn, table, outbox, runs) as free,
    ):
        held_back = await fill_and_hold_back(table, outbox)
        await table.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pulse-outbox flush'"
        )
        await free()
        await table.until("status = 'COMPLETED'", MANY)

    assert runs == Counter(range(MANY))
    assert await table.count("attempts = 1 and lapses = 0") == MANY
    again = await table.execute("select (payload ->> 'n')::integer from pulse.outbox where lease_seq = 2")
    assert {n for (n,) in again} >= {*held_back}


async def test_a_process_that_ends_gives_them_back_at_once(dsn, outbox: Outbox, table: Table):
    """However long the disk hangs: others need not wait for the leases."""
    runs = runs_of(outbox)
    async with AsyncExitStack() as stack:
        async with dispatching(outbox, dsn, batch=BATCH, concurrency=BATCH, lease=30):
            await stack.enter_async_context(flushes_that_hang(dsn, table, outbox, runs))
            held_back = await fill_and_hold_back(table, outbox)

        assert await table.count("status = 'RUNNING'") == 0
        assert await table.count("status = 'PENDING' and lease_seq = 1 and attempts = 0") >= len(held_back)
    assert runs.keys().isdisjoint(held_back)


async def test_flushes_that_fail_on_a_sound_connection(dsn, outbox: Outbox, table: Table):
    """A right that is missing, a sequence that was not restored: claims wait for the disk themselves."""
    runs = runs_of(outbox)
    async with dispatching(outbox, dsn, batch=BATCH, concurrency=BATCH):
        await let_flush(table, outbox, runs)
        await table.execute("alter function pulse.outbox_flush rename to gone")
        await fill(table, outbox, MANY)
        await table.until("status = 'COMPLETED'", MANY)

    assert runs == Counter(range(MANY))
    [(given_back,)] = await table.execute("select sum(lease_seq - 1) from pulse.outbox")
    assert given_back < MANY


async def test_a_pause_takes_back_what_waits_for_its_flush(dsn, outbox: Outbox, table: Table):
    """Like all else that was claimed ahead."""
    runs = runs_of(outbox)
    async with (
        dispatching(outbox, dsn, batch=BATCH, concurrency=BATCH),
        flushes_that_hang(dsn, table, outbox, runs) as free,
    ):
        held_back = await fill_and_hold_back(table, outbox)
        await table.execute("select pulse.outbox_pause('mail', 'why', 'operator')")
        await table.until("status = 'RUNNING'", 0)
        await free()
        await fill(table, outbox, 3, "mail")
        assert runs.keys().isdisjoint(held_back)
        await table.execute("select pulse.outbox_resume('mail', 'operator')")
        await table.until("status = 'COMPLETED'", MANY + 3)

    assert await table.count("attempts = 1") == MANY + 3
