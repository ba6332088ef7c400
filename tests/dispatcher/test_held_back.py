"""Vacuum held back: what is dead stays in the index, and no dispatcher walks over it all day."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psycopg
import pytest

from pulse_outbox import Event, NewEvent, Outbox
from pulse_outbox.dispatcher import intake
from pulse_outbox.dispatcher.lanes import KNOWN_LANES, LOOK_BACK, ClaimPlan, Lanes
from tests.support.dispatching import Table, dispatching

DEAD = 20_000
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
async def held_back(dsn: str, table: Table):
    """A dispatcher's table after many jobs, and a reader whose snapshot is older than all of them."""
    async with await psycopg.AsyncConnection.connect(dsn) as reader:
        await reader.execute("set transaction isolation level repeatable read")
        await reader.execute("select from pulse.outbox limit 1")
        await table.execute(
            """
            insert into pulse.outbox (event_id, topic, payload, idempotency_key, next_run_at)
            select made.id, 'job', '{}', made.id::text, clock_timestamp() - interval '1 hour'
              from (select gen_random_uuid() as id from generate_series(1, %s)) as made
            """,
            DEAD,
        )
        await table.execute("update pulse.outbox set status = 'COMPLETED', completed_at = clock_timestamp()")
        yield


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "COSTLY_LISTING", 0.0002)


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
        async with await psycopg.AsyncConnection.connect(dsn) as slow, slow.transaction():
            late = await outbox.enqueue_async(slow, "job", {})
            await asyncio.sleep(LOOK_BACK.total_seconds() + 0.2)
            await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")
        first = await table.enqueue(outbox, "rare")
        await table.until_status(late, "COMPLETED")
        await table.until_status(first, "COMPLETED")


async def test_limits_of_handlers_hold(dsn: str, table: Table, held_back, costly, outbox: Outbox):
    running: list[int] = []
    most: list[int] = []

    @outbox.handler("job", concurrency=2)
    async def job(event: Event[dict[str, Any]]) -> None:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()

    async with dispatching(outbox, dsn):
        for _ in range(20):
            await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(3)])
            await asyncio.sleep(0.02)
        await table.until("status = 'COMPLETED'", DEAD + 60)

    assert max(most) == 2


def claim(topic: str, due: datetime = NOON, priority: int = 0) -> Any:
    return SimpleNamespace(
        topic=topic, generation=0, lapses=0, priority=priority, next_run_at=due, seq=1, event_id=UUID(int=0)
    )


def some(plan: ClaimPlan | None) -> ClaimPlan:
    assert plan is not None
    return plan


def test_a_guess_asks_the_lanes_that_are_known_in_turn():
    lanes = Lanes()
    plan = some(lanes.guess(10))
    for topic in ("a", "b", "c"):
        lanes.note(plan, [claim(topic)])
    lanes.note(plan, [claim("a", NOON + timedelta(minutes=1), priority=5)])

    again = lanes.guess_again(10, {"a": 100, "b": 1, "c": 0}.__getitem__)

    assert again is not None
    assert again.quotas == {"a": 4, "b": 1}, "the same share for each, no more than it has room for"
    assert [(lane["topic"], lane["priority"], lane["quota"]) for lane in again.lanes or []] == [
        ("b", 0, 1),
        ("a", 5, 4),
        ("a", 0, 4),
    ]
    assert (again.lanes or [])[1]["next_run_at"] == "2030-01-01T12:00:59+00:00"


def test_a_guess_that_got_all_it_asked_for_goes_on_from_there():
    lanes = Lanes()
    lanes.note(some(lanes.guess(2)), [claim("a"), claim("b")])
    assert lanes.plan(10, lambda topic: 10, 1.0) is not None

    few, enough = Lanes(), Lanes()
    for known in (few, enough):
        known.note(some(known.guess(10)), [claim("a")])
        assert known.plan(10, lambda topic: 10, 1.0) is None
    guess = enough.guess_again(10, {"a": 1}.__getitem__)
    assert guess is not None
    enough.note(guess, [claim("a", NOON + timedelta(minutes=1))])
    few.note(some(few.guess_again(10, {"a": 2}.__getitem__)), [claim("a")])

    more = enough.plan(10, lambda topic: 10, 1.0)
    assert more is not None
    assert [(lane["next_run_at"], lane["seq"]) for lane in more.lanes or []] == [
        ("2030-01-01T12:01:00+00:00", 2)
    ]
    assert few.plan(10, lambda topic: 10, 1.0) is None


def test_a_guess_knows_no_more_lanes_than_it_can_ask():
    lanes = Lanes()
    assert lanes.guess_again(10, lambda topic: 10) is None
    plan = some(lanes.guess(10))
    for number in range(KNOWN_LANES + 5):
        lanes.note(plan, [claim(f"topic-{number}")])

    again = lanes.guess_again(100, lambda topic: 10)

    assert again is not None
    assert len(again.lanes or []) == KNOWN_LANES
    assert (again.lanes or [])[0]["topic"] == "topic-5"
