"""Vacuum held back: what is dead stays in the index, and no dispatcher walks over it all day."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psycopg
import pytest

from pulse_outbox import Event, NewEvent, Outbox
from pulse_outbox.dispatcher import intake
from pulse_outbox.dispatcher.lanes import KNOWN_LANES, ClaimPlan, Lanes
from pulse_outbox.store import Claimed, Lane, Listing, Store
from tests.support.dispatching import Table, dispatching, drain
from tests.support.waiting import wait_until_async

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
    """Every listing counts as costly."""
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


async def list_once_more(listings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And then no more: the next costly one would come too late for any test."""
    seen = len(listings)
    monkeypatch.setattr(intake, "LISTING_INTERVAL", 3600.0)
    monkeypatch.setattr(intake, "LISTING_SHARE", 1e-9)

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

    monkeypatch.setattr(intake, "LISTING_INTERVAL", 3600.0)
    monkeypatch.setattr(intake, "LISTING_SHARE", 1e-9)
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

    async def ask_and_dawdle(self: Store, *args: Any, **options: Any) -> Listing:
        listing = await really_ask(self, *args, **options)
        await asyncio.sleep(0.05)
        return listing

    monkeypatch.setattr(Store, "lanes", ask_and_dawdle)
    async with dispatching(outbox, dsn) as dispatcher:
        for _ in range(5):
            await table.until_status(await table.enqueue(outbox, "job"), "COMPLETED")
        assert not dispatcher._intake._listing_is_costly


def claim(topic: str, due: datetime = NOON, priority: int = 0, max_attempts: int = 5) -> Any:
    return SimpleNamespace(
        topic=topic,
        generation=0,
        lapses=0,
        priority=priority,
        next_run_at=due,
        seq=1,
        event_id=UUID(int=0),
        max_attempts=max_attempts,
    )


def note(lanes: Lanes, plan: ClaimPlan, *claims: Any, left_behind: Sequence[Lane] = ()) -> None:
    lanes.note(plan, Claimed(claims, left_behind))


def some(plan: ClaimPlan | None) -> ClaimPlan:
    assert plan is not None
    return plan


def test_a_guess_asks_the_lanes_that_are_known_in_turn():
    lanes = Lanes()
    plan = some(lanes.guess(10, 0.0))
    for topic in ("a", "b", "c"):
        note(lanes, plan, claim(topic))
    note(lanes, plan, claim("a", NOON + timedelta(minutes=1), priority=5))

    again = lanes.guess_again(10, {"a": 100, "b": 1, "c": 0}.__getitem__, 0.0)

    assert again is not None
    assert again.quotas == {"a": 4, "b": 1}, "the same share for each, no more than it has room for"
    assert [(lane["topic"], lane["priority"], lane["quota"]) for lane in again.lanes or []] == [
        ("b", 0, 1),
        ("a", 5, 4),
        ("a", 0, 4),
    ]
    assert (again.lanes or [])[1]["next_run_at"] == "2030-01-01T12:00:59+00:00"


def test_a_listing_shows_up_to_when_all_is_known():
    """A guess must not walk again over what died since the last claim. But transactions may have been open then."""
    lanes = Lanes()
    note(lanes, some(lanes.guess(10, 0.0)), claim("a"), claim("b"))
    waiting = Lane("b", 0, 0, 0, NOON, 7, due_in=-60)

    lanes.refresh(Listing([waiting], NOON + timedelta(minutes=1), 0.0), now=1.0)

    again = some(lanes.guess_again(10, lambda topic: 10, 0.0))
    assert {lane["next_run_at"] for lane in again.lanes or []} == {"2030-01-01T12:00:59+00:00"}
    plan = some(lanes.plan(10, lambda topic: 10, 2.0))
    assert [(lane["topic"], lane["next_run_at"], lane["seq"]) for lane in plan.lanes or []] == [
        ("b", "2030-01-01T12:00:00+00:00", 7)
    ]
    lanes.guess_again(10, lambda topic: 10, 1.5)
    both = some(lanes.plan(10, lambda topic: 10, 2.0, also_known=True))
    assert [(lane["topic"], lane["next_run_at"], lane["quota"]) for lane in both.lanes or []] == [
        ("a", "2030-01-01T12:00:59+00:00", 5),
        ("b", "2030-01-01T12:00:00+00:00", 10),
    ]


def test_what_longer_transactions_committed_is_looked_for_once_a_second():
    """It lies behind all that was claimed and listed since they began, and behind all that has died since then."""
    lanes = Lanes()
    note(lanes, some(lanes.guess(10, 0.0)), claim("a"))
    looks = []
    for now in (5.0, 5.5, 5.9, 6.1, 6.5):
        [lane] = some(lanes.guess_again(10, lambda topic: 10, now)).lanes or []
        looks.append(lane["next_run_at"][11:19])

    assert looks == ["11:59:50", "11:59:59", "11:59:59", "11:59:50", "11:59:59"]


def test_known_lanes_are_asked_beside_a_backlog_whatever_was_listed():
    """One that had an event for later, and one that had no more than was claimed, may have got new ones since."""
    lanes = Lanes()
    note(lanes, some(lanes.guess(10, 0.0)), claim("later"), claim("short"))
    listed = [
        Lane("backlog", 0, 0, 0, NOON, 1, due_in=-60),
        Lane("later", 0, 0, 0, NOON + timedelta(hours=1), 2, due_in=3600),
        Lane("short", 0, 0, 0, NOON, 3, due_in=-60),
    ]
    lanes.refresh(Listing(listed, NOON, 0.0), now=1.0)
    note(lanes, some(lanes.plan(30, lambda topic: 10, 2.0)), *[claim("backlog")] * 10)

    plan = some(lanes.plan(30, lambda topic: 10, 2.0, also_known=True))

    assert {lane["topic"] for lane in plan.lanes or []} == {"backlog", "later", "short"}


def test_lanes_of_a_handler_at_its_limit_are_not_guessed_from():
    lanes = Lanes()
    note(lanes, some(lanes.guess(10, 0.0)), claim("a"), claim("b"))

    assert not lanes.at_limit({"a": 1, "b": 1}.__getitem__)
    assert lanes.at_limit({"a": 1, "b": 0}.__getitem__)
    assert lanes.guess_again(10, {"a": 0, "b": 0}.__getitem__, 0.0) is None


def test_a_guess_that_got_all_it_asked_for_goes_on_from_there():
    lanes = Lanes()
    note(lanes, some(lanes.guess(2, 0.0)), claim("a"), claim("b"))
    assert lanes.plan(10, lambda topic: 10, 1.0) is not None

    few, enough = Lanes(), Lanes()
    for known in (few, enough):
        note(known, some(known.guess(10, 0.0)), claim("a"))
        assert known.plan(10, lambda topic: 10, 1.0) is None
    guess = enough.guess_again(10, {"a": 1}.__getitem__, 0.0)
    assert guess is not None
    note(enough, guess, claim("a", NOON + timedelta(minutes=1)))
    note(few, some(few.guess_again(10, {"a": 2}.__getitem__, 0.0)), claim("a"))

    more = enough.plan(10, lambda topic: 10, 1.0)
    assert more is not None
    assert [(lane["next_run_at"], lane["seq"]) for lane in more.lanes or []] == [
        ("2030-01-01T12:01:00+00:00", 2)
    ]
    assert few.plan(10, lambda topic: 10, 1.0) is None


def test_a_guess_knows_no_more_lanes_than_it_can_ask():
    lanes = Lanes()
    assert lanes.guess_again(10, lambda topic: 10, 0.0) is None
    plan = some(lanes.guess(10, 0.0))
    for number in range(KNOWN_LANES + 5):
        note(lanes, plan, claim(f"topic-{number}"))

    again = lanes.guess_again(100, lambda topic: 10, 0.0)

    assert again is not None
    assert len(again.lanes or []) == KNOWN_LANES
    assert (again.lanes or [])[0]["topic"] == "topic-5"


def test_a_budget_of_one_that_was_left_behind_is_waited_for_and_asked_for_first():
    """Its lane goes on where it stands, as soon as a slot is free."""
    lanes = Lanes()
    listed = [Lane("mail", 0, 0, 0, NOON, 1, due_in=-60)]
    lanes.refresh(Listing(listed, NOON, 0.0), now=1.0)
    behind = Lane("mail", 0, 0, 0, NOON + timedelta(seconds=3), 7, due_in=0.0)
    note(
        lanes,
        some(lanes.plan(10, lambda topic: 10, 2.0)),
        claim("mail", NOON + timedelta(seconds=9)),
        left_behind=[behind],
    )

    assert lanes.wait_for_slot(lambda topic: 1)
    assert not lanes.wait_for_slot(lambda topic: 0), "its handler is at its limit: a slot would not help"
    [lane] = some(lanes.plan(10, lambda topic: 10, 2.0)).lanes or []
    assert (lane["next_run_at"], lane["seq"]) == ("2030-01-01T12:00:03+00:00", 7)


def test_budgets_of_one_are_waited_for_until_their_lane_has_none():
    behind = Lane("mail", 0, 0, 0, NOON, 7, due_in=0.0)

    def waiting() -> Lanes:
        lanes = Lanes()
        note(lanes, some(lanes.guess(1, 0.0)), left_behind=[behind])
        return lanes

    def asked(lanes: Lanes, *claims: Any, limit: int = 1) -> bool:
        note(lanes, some(lanes.plan(limit, lambda topic: 10, 2.0)), *claims)
        return lanes.wait_for_slot(lambda topic: 1)

    assert asked(waiting(), claim("mail", max_attempts=1)), "there may be more"
    assert asked(waiting(), claim("other")), "another topic had the slot"
    assert not asked(waiting(), claim("mail")), "they are over, others of the lane come"
    assert not asked(waiting(), limit=5), "it is empty"
    lanes = waiting()
    lanes.refresh(Listing([behind], NOON, 0.0), now=1.0)
    assert lanes.wait_for_slot(lambda topic: 1)
    lanes.refresh(Listing([], NOON, 0.0), now=1.0)
    assert not lanes.wait_for_slot(lambda topic: 1), "somebody else has taken it"
    lanes = waiting()
    lanes.refresh(Listing([behind._replace(due_in=3600)], NOON, 0.0), now=1.0)
    assert not lanes.wait_for_slot(lambda topic: 1), "and the lane has something for later"


def test_a_topic_that_was_left_out_for_a_while_gets_its_turn():
    """Whoever was first most recently is last."""
    lanes = Lanes()
    lanes.refresh(
        Listing([Lane(topic, 0, 0, 0, NOON, 1, due_in=-60) for topic in ("a", "b", "c")], NOON, 0.0), now=1.0
    )
    firsts = []
    for room in ({"a": 0, "b": 9, "c": 0}, {"a": 9, "b": 9, "c": 0}) * 3:
        plan = some(lanes.plan(1, room.__getitem__, 2.0))
        firsts.append((plan.lanes or [])[0]["topic"])

    assert firsts == ["b", "a"] * 3
