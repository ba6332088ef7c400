"""Vacuum held back: what is dead stays in the index, and no dispatcher walks over it all day."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import psycopg
import pytest

from pulse_outbox import Event, NewEvent, Outbox
from pulse_outbox.dispatcher import intake, pace
from pulse_outbox.store import Asking, Listing, Store
from tests.support.asking import Around
from tests.support.dispatching import Table, dispatching, drain
from tests.support.waiting import wait_until_async

DEAD = 20_000


async def insert(table: Table, number: int) -> list[UUID]:
    """Events of an hour ago that were committed just now, without a word to anybody."""
    rows = await table.execute(
        """
        insert into pulse.outbox (event_id, topic, payload, idempotency_key, next_run_at)
        select made.id, 'job', '{}', made.id::text, clock_timestamp() - interval '1 hour'
          from (select gen_random_uuid() as id from generate_series(1, %s)) as made
        returning event_id
        """,
        number,
    )
    return [event_id for (event_id,) in rows]


@pytest.fixture
async def held_back(dsn: str, table: Table):
    """A dispatcher's table after many jobs, and a reader whose snapshot is older than all of them."""
    async with await psycopg.AsyncConnection.connect(dsn) as reader:
        await reader.execute("set transaction isolation level repeatable read")
        await reader.execute("select from pulse.outbox limit 1")
        await insert(table, DEAD)
        await table.execute("update pulse.outbox set status = 'COMPLETED', completed_at = clock_timestamp()")
        yield


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every listing counts as costly."""
    monkeypatch.setattr(pace, "COSTLY_LISTING", -1.0)


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for every listing that was made."""
    made: list[int] = []
    really_list = intake.Intake._list

    async def list_and_count(self: intake.Intake) -> None:
        await really_list(self)
        made.append(len(made))

    monkeypatch.setattr(intake.Intake, "_list", list_and_count)
    return made


async def list_once_more(listings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And then no more: the next costly one would come too late for any test."""
    seen = len(listings)
    monkeypatch.setattr(pace, "LISTING_INTERVAL", 3600.0)
    monkeypatch.setattr(pace, "LISTING_SHARE", 1e-9)

    async def listed() -> bool:
        return len(listings) > seen

    await wait_until_async(listed)


async def entries_read(table: Table) -> int:
    [(read,)] = await table.execute(
        "select idx_tup_read from pg_stat_user_indexes where indexrelname = 'outbox_due'"
    )
    return int(read)


async def test_events_that_come_one_by_one(dsn: str, table: Table, held_back, costly, outbox: Outbox):
    @outbox.handler("job")
    async def job(event: Event[dict[str, Any]]) -> None: ...

    async with dispatching(outbox, dsn):
        await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")
        for _ in range(30):
            await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")

    # Each event was claimed, and the dispatcher went to sleep after it: sixty looks, of which few may be listings.
    assert await entries_read(table) < 15 * DEAD


async def test_what_a_guess_can_not_find_is_found_when_polling(
    dsn: str, table: Table, held_back, costly, outbox: Outbox
):
    for topic in ("job", "rare"):

        @outbox.handler(topic)
        async def job(event: Event[dict[str, Any]]) -> None: ...

    async with dispatching(outbox, dsn, poll=0.5):
        await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")
        [late] = await insert(table, 1)
        first = await table.enqueue(outbox, "rare")
        await table.until_status(late, "COMPLETED")
        await table.until_status(first, "COMPLETED")


async def test_limits_of_handlers_hold(
    dsn: str, table: Table, costly, listings: list[int], outbox: Outbox, monkeypatch: pytest.MonkeyPatch
):
    running: list[int] = []
    most: list[int] = []

    @outbox.handler("job", concurrency=2)
    async def job(event: Event[dict[str, Any]]) -> None:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()

    async with dispatching(outbox, dsn, poll=60):
        for round_ in range(1, 11):
            await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(3)])
            await table.until("status = 'COMPLETED'", 3 * round_)
            if round_ == 1:
                await list_once_more(listings, monkeypatch)

    assert max(most) == 2


async def test_what_comes_while_a_handler_is_at_its_limit_runs_right_after_it(
    dsn: str, table: Table, costly, listings: list[int], outbox: Outbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(intake, "COSTLY_NAP", 60.0)
    first_may_end = asyncio.Event()

    @outbox.handler("job", concurrency=1)
    async def job(event: Event[dict[str, int]]) -> None:
        if event.payload["number"] == 1:
            await first_may_end.wait()

    async with dispatching(outbox, dsn, poll=60):
        await table.until_status(await table.enqueue(outbox, "job", {"number": 0}), "COMPLETED")
        await table.until_status(await table.enqueue(outbox, "job", {"number": 1}), "RUNNING")
        await list_once_more(listings, monkeypatch)
        second = await table.enqueue(outbox, "job", {"number": 2})
        await asyncio.sleep(0.2)  # the wake-up has come, and there was no place
        first_may_end.set()
        await table.until_status(second, "COMPLETED")


async def test_what_was_enqueued_for_later_starts_without_a_listing(
    dsn: str, table: Table, costly, listings: list[int], outbox: Outbox, monkeypatch: pytest.MonkeyPatch
):
    @outbox.handler("job")
    async def job(event: Event[dict[str, Any]]) -> None: ...

    async with dispatching(outbox, dsn, poll=60):
        await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")
        await list_once_more(listings, monkeypatch)
        monkeypatch.setattr(intake, "FIRST_NAP", 60.0)
        await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")
        later = [await table.enqueue(outbox, "job", delay=delay) for delay in (0.5, 1)]
        for event_id in later:
            await table.until_status(event_id, "COMPLETED")


async def test_another_topics_backlog_does_not_hide_what_is_known(
    dsn: str, table: Table, costly, listings: list[int], outbox: Outbox, monkeypatch: pytest.MonkeyPatch
):
    @outbox.handler("slow")
    async def slow(event: Event[dict[str, Any]]) -> None:
        await asyncio.sleep(0.05)

    @outbox.handler("job")
    async def job(event: Event[dict[str, Any]]) -> None: ...

    async with dispatching(outbox, dsn, poll=60, concurrency=5, batch=5):
        await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")
        await table.enqueue_many(outbox, [NewEvent("slow", {}) for _ in range(300)])
        await list_once_more(listings, monkeypatch)
        await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")
        assert await table.count("status = 'PENDING'") > 0


async def test_a_burst_ends_at_once(dsn: str, costly, outbox: Outbox, monkeypatch: pytest.MonkeyPatch):
    @outbox.handler("job")
    async def job(event: Event[dict[str, Any]]) -> None: ...

    monkeypatch.setattr(pace, "LISTING_INTERVAL", 3600.0)
    monkeypatch.setattr(pace, "LISTING_SHARE", 1e-9)
    with psycopg.connect(dsn) as conn:
        outbox.enqueue_many(conn, [NewEvent("job", {}) for _ in range(3)])

    await drain(outbox, dsn, within=10, poll=60)

    with psycopg.connect(dsn) as conn:
        assert conn.execute("select count(*) from pulse.outbox where status = 'COMPLETED'").fetchone() == (3,)


async def test_only_the_servers_own_time_makes_a_listing_costly(
    dsn: str, table: Table, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
):
    """Else a handler that blocks the event loop would."""

    @outbox.handler("job")
    async def job(event: Event[dict[str, Any]]) -> None: ...

    really_ask = Store.lanes

    async def dawdle(asking: Asking[Listing]) -> Listing:
        listing = await asking
        await asyncio.sleep(0.05)
        return listing

    def ask_and_dawdle(self: Store, *args: Any, **options: Any) -> Any:
        return Around(really_ask(self, *args, **options), dawdle)

    monkeypatch.setattr(Store, "lanes", ask_and_dawdle)
    async with dispatching(outbox, dsn) as dispatcher:
        for _ in range(5):
            await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")
        assert not dispatcher._intake._looks.are_costly
