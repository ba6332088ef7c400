"""The database goes away, hangs, refuses: the same process lives on, and nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pulse_outbox import Dispatcher, Event, NewEvent, Outbox, RetryPolicy, embedded, schema
from tests.support.dispatching import Table, dispatching
from tests.support.proxy import proxied
from tests.support.waiting import wait_until, wait_until_async


@pytest.fixture
def server() -> Iterator[embedded.Server]:
    """A server of the test's own, to be stopped, crashed and frozen."""
    with embedded.start(port=0) as server:
        schema.migrate(server.dsn)
        yield server


@pytest.fixture
async def own_table(server: embedded.Server):
    table = Table(server.dsn)
    yield table
    await table.close()


class Runs:
    """Counts the runs of every event."""

    def __init__(self, outbox: Outbox, seconds: float = 0.0, **options: Any) -> None:
        self.of: dict[str, int] = {}
        self.seconds = seconds
        outbox.handler("job", **options)(self._handle)

    async def _handle(self, event: Event) -> None:
        self.of[str(event.id)] = self.of.get(str(event.id), 0) + 1
        await asyncio.sleep(self.seconds)


@pytest.mark.parametrize("way", ["stopped", "crashed"])
async def test_an_outage_with_jobs_in_flight(server, own_table: Table, outbox: Outbox, way: str):
    """FAULTS 10 and 11: longer than two leases. Each job runs once, results are stored afterwards, nobody is reaped."""
    runs = Runs(outbox, seconds=1.0, retry=RetryPolicy(max_attempts=1))
    async with dispatching(outbox, server.dsn, concurrency=40) as dispatcher:
        await own_table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(120)])

        async def full() -> bool:
            return len(runs.of) >= 80

        await wait_until_async(full)
        await own_table.close()
        if way == "crashed":
            server.crash()
        else:
            os.kill(server.pid, signal.SIGINT)
            await asyncio.to_thread(wait_until, lambda: not server.is_running)
        await asyncio.sleep(4)  # the outage itself: the only thing here that has to last
        assert dispatcher._is_ready() != []
        await asyncio.to_thread(server.start)
        back = time.monotonic()
        await own_table.until("status = 'COMPLETED'", 120, within=20)
        recovery = time.monotonic() - back

        async def well() -> bool:
            return dispatcher._is_ready() == []

        await wait_until_async(well)

    assert set(runs.of.values()) == {1}
    assert await own_table.count("attempts <> 1 or lapses <> 0") == 0
    assert recovery < 10


async def test_backends_terminated_at_random(dsn, outbox: Outbox, table: Table):
    """Claims, results and heartbeats are repeated: nothing runs twice for it, nothing is lost."""
    runs = Runs(outbox, seconds=0.01)
    # The outcome does not hang on it, only which backend dies when.
    dice = random.Random(7)
    async with dispatching(outbox, dsn, concurrency=20):
        await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(3000)])
        killed = 0

        async def done() -> bool:
            nonlocal killed
            pids = await table.execute(
                "select pid from pg_stat_activity "
                "where application_name like 'pulse-outbox%%' and datname = current_database()"
            )
            if pids and killed < 40:
                await table.execute("select pg_terminate_backend(%s)", dice.choice(pids)[0])
                killed += 1
                await asyncio.sleep(0.02)
            return await table.count("status = 'COMPLETED'") == 3000

        await wait_until_async(done, within=40)

    assert killed == 40
    assert set(runs.of.values()) == {1}
    assert await table.count("attempts <> 1 or lapses <> 0") == 0


async def test_a_claim_whose_answer_is_lost_in_an_outage(dsn, outbox: Outbox, table: Table):
    """FAULTS 9: even when all tries of the call are spent. A budget of one would die of being forgotten."""
    runs = Runs(outbox, retry=RetryPolicy(max_attempts=1))
    async with (
        proxied(dsn) as proxy,
        dispatching(outbox, proxy.dsn, lease=30, heartbeat=10, watchdog=10),
    ):
        proxy.lose_answer_to = b"outbox_claim"
        proxy.lose_only_rows = proxy.refuse_once_lost = True
        event_id = await table.enqueue(outbox, "job")

        async def lost() -> bool:
            return proxy.lost_answers == 1

        await wait_until_async(lost)
        proxy.cut()
        await asyncio.sleep(3)  # three tries take about two seconds
        row = await table.row(event_id)
        assert (row.status, row.attempts) == ("RUNNING", 1)
        proxy.refuse = False
        row = await table.until_status(event_id, "COMPLETED")

    assert (row.attempts, row.lease_seq, row.lapses) == (1, 1, 0)
    assert set(runs.of.values()) == {1}


async def test_packets_that_vanish(dsn, outbox: Outbox, table: Table, monkeypatch):
    """FAULTS 12: every call ends by its own deadline, and a new connection takes over."""
    monkeypatch.setattr(Dispatcher._new_store, "__defaults__", (timedelta(seconds=1),))
    runs = Runs(outbox, seconds=0.5)
    async with proxied(dsn) as proxy, dispatching(outbox, proxy.dsn, concurrency=5):
        await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(20)])
        await table.until("status = 'COMPLETED'", 5)
        # Every connection that exists is dead from now on, without a word; new ones work.
        assert proxy.freeze("pulse-outbox") >= 4
        started = time.monotonic()
        await table.until("status = 'COMPLETED'", 20, within=30)
        took = time.monotonic() - started

    assert took < 12
    assert await table.count("attempts <> 1") == 0
    assert set(runs.of.values()) == {1}


async def test_frozen_backends(server, own_table: Table, outbox: Outbox):
    """SIGSTOP to every backend for longer than a lease, then SIGCONT."""
    runs = Runs(outbox, seconds=0.2)
    async with dispatching(outbox, server.dsn, concurrency=5):
        await own_table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(50)])
        await own_table.until("status = 'COMPLETED'", 10)
        pids = [
            pid
            for (pid,) in await own_table.execute(
                "select pid from pg_stat_activity where application_name like 'pulse-outbox%%'"
            )
        ]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(3)  # two leases
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await own_table.until("status = 'COMPLETED'", 50, within=20)

    assert set(runs.of.values()) == {1}
    assert await own_table.count("attempts <> 1 or lapses <> 0") == 0


async def test_too_many_connections(server, own_table: Table, outbox: Outbox):
    """FAULTS 13: in the middle of work nothing lapses; what was lost is made again when there is room."""
    runs = Runs(outbox, seconds=0.3)
    hogs: list[psycopg.AsyncConnection[Any]] = []

    async def take_all() -> None:
        while True:
            try:
                hogs.append(await psycopg.AsyncConnection.connect(server.dsn, autocommit=True))
            except psycopg.OperationalError:
                return

    async with dispatching(outbox, server.dsn, concurrency=5):
        await own_table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(30)])
        await own_table.until("status = 'COMPLETED'", 5)
        await take_all()
        # One after the other loses its connection, and there is no room for a new one …
        await own_table.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name in ('pulse-outbox claim', 'pulse-outbox settle')"
        )
        await take_all()
        await asyncio.sleep(2.5)  # … for longer than a lease
        for hog in hogs:
            await hog.close()
        await own_table.until("status = 'COMPLETED'", 30, within=20)

    assert set(runs.of.values()) == {1}
    assert await own_table.count("attempts <> 1 or lapses <> 0") == 0


async def test_read_only_and_back(dsn, outbox: Outbox, table: Table):
    """FAULTS 11: a standby after a failover refuses writes with 25006; connections to it are thrown away."""
    runs = Runs(outbox)
    read_only = (
        "do $$ begin execute format('alter database %I set default_transaction_read_only = {}', "
        "current_database()); end $$"
    )
    async with dispatching(outbox, dsn) as dispatcher:
        await table.enqueue(outbox, "job")
        await table.until("status = 'COMPLETED'", 1)
        await table.execute(read_only.format("on"))
        await table.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name like 'pulse-outbox%' and datname = current_database()"
        )
        await table.enqueue(outbox, "job")

        async def complains() -> bool:
            return {"claim", "heartbeat"} <= dispatcher._condition.complaints.keys()

        await wait_until_async(complains)
        await table.execute(read_only.format("off"))
        await table.until("status = 'COMPLETED'", 2)

    assert set(runs.of.values()) == {1}
    assert await table.count("attempts <> 1") == 0
