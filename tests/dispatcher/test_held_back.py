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
from pulse_outbox.dispatcher.lanes import KNOWN_LANES, ClaimPlan, Lanes
from tests.support.dispatching import Table, dispatching

DEAD = 20_000
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


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
    """Every listing counts as costly, from the second claim on."""
    monkeypatch.setattr(intake, "COSTLY_LISTING", -1.0)


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


def list_hardly_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the next listing that counts as costly, another one would come too late for any test."""
    monkeypatch.setattr(intake, "LISTING_INTERVAL", 3600.0)
    monkeypatch.setattr(intake, "LISTING_SHARE", 1e-9)


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
    dsn: str, table: Table, costly, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
):
    list_hardly_ever(monkeypatch)
    running: list[int] = []
    most: list[int] = []

    @outbox.handler("job", concurrency=2)
    async def job(event: Event[dict[str, Any]]) -> None:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()

    async with dispatching(outbox, dsn):
        for round_ in range(1, 11):
            await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(3)])
            await table.until("status = 'COMPLETED'", 3 * round_)

    assert max(most) == 2


async def test_what_comes_while_a_handler_is_at_its_limit_runs_right_after_it(
    dsn: str, table: Table, costly, listings: list[int], outbox: Outbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(intake, "FIRST_NAP", 60.0)
    first_may_end = asyncio.Event()

    @outbox.handler("job", concurrency=1)
    async def job(event: Event[dict[str, int]]) -> None:
        if event.payload["number"] == 1:
            await first_may_end.wait()

    async with dispatching(outbox, dsn, poll=60):
        await table.until_status(await table.enqueue(outbox, "job", {"number": 0}), "COMPLETED")
        await table.until_status(await table.enqueue(outbox, "job", {"number": 1}), "RUNNING")
        seen = len(listings)
        list_hardly_ever(monkeypatch)
        while len(listings) == seen:
            await asyncio.sleep(0.01)

        second = await table.enqueue(outbox, "job", {"number": 2})
        await asyncio.sleep(0.2)  # the wake-up has come, and there was no place
        first_may_end.set()
        await table.until_status(second, "COMPLETED")


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


def test_lanes_of_a_handler_at_its_limit_are_not_guessed_from():
    lanes = Lanes()
    lanes.note(some(lanes.guess(10)), [claim("a"), claim("b")])

    assert not lanes.at_limit({"a": 1, "b": 1}.__getitem__)
    assert lanes.at_limit({"a": 1, "b": 0}.__getitem__)
    assert lanes.guess_again(10, {"a": 0, "b": 0}.__getitem__) is None


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
