"""Claims two at a time while there is a backlog: what the second one must not do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from pulse_outbox import Event, NewEvent, Outbox
from pulse_outbox.dispatcher.lanes import Lanes
from pulse_outbox.store import Claim, Lane, Store
from tests.support.dispatching import Table, dispatching, drain
from tests.support.waiting import wait_until_async

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def lane(seq: int) -> Lane:
    return Lane("mail", 0, 0, 0, NOON, seq, -1.0)


def claim(seq: int) -> Claim:
    values: dict[str, Any] = dict.fromkeys(Claim._fields)
    values |= {"event_id": uuid4(), "seq": seq, "topic": "mail", "next_run_at": NOON}
    return Claim(**values | {"generation": 0, "lapses": 0, "priority": 0})


def plan_of(lanes: Lanes, limit: int = 2) -> Any:
    return lanes.plan(limit, lambda topic: 10, 0.0)


def start_of(lanes: Lanes) -> int:
    [asked] = plan_of(lanes).lanes
    assert asked["next_run_at"] == NOON.isoformat()
    return int(asked["seq"])


class TestPlaces:
    def test_the_later_answer_of_an_earlier_place_leads_nowhere_back(self):
        lanes = Lanes()
        lanes.refresh([lane(1)], 0.0)
        first, second = plan_of(lanes), plan_of(lanes)

        lanes.note(second, [claim(3), claim(4)], short=False)
        lanes.note(first, [claim(1), claim(2)])

        assert start_of(lanes) == 5

    def test_an_answer_from_before_a_listing_does_not_lead_past_what_it_shows(self):
        lanes = Lanes()
        lanes.refresh([lane(5)], 0.0)
        before = plan_of(lanes)

        lanes.refresh([lane(2)], 0.0)  # 2 was committed late
        lanes.note(before, [claim(5), claim(6)])

        assert start_of(lanes) == 2

    def test_a_claim_beside_another_does_not_end_a_lane(self):
        """It may have found little because the other one had it all locked, or because it may take less."""
        lanes = Lanes()
        lanes.refresh([lane(1)], 0.0)

        lanes.note(plan_of(lanes), [], short=False)
        assert start_of(lanes) == 1

        lanes.note(plan_of(lanes), [])
        assert plan_of(lanes) is None


async def test_a_backlog_is_claimed_two_at_a_time_and_run_once(
    dsn, outbox: Outbox, table: Table, monkeypatch
):
    runs: list[int] = []
    asking = most = 0
    real = Store.claim

    async def counted(store: Store, **options: Any) -> list[Claim]:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        try:
            return await real(store, **options)
        finally:
            asking -= 1

    monkeypatch.setattr(Store, "claim", counted)

    @outbox.handler("mail")
    async def send(event: Event[dict[str, int]]) -> None:
        runs.append(event.payload["n"])

    await table.enqueue_many(outbox, [NewEvent("mail", {"n": n}) for n in range(5000)])
    await drain(outbox, dsn, batch=20)

    assert most == 2
    assert sorted(runs) == list(range(5000))
    assert await table.count("status = 'COMPLETED' and attempts = 1 and lease_seq = 1") == 5000


async def test_without_a_backlog_there_is_one_connection_for_claims(dsn, outbox: Outbox, table: Table):
    outbox.handler("mail")(lambda event: None)
    async with dispatching(outbox, dsn, batch=10):
        for _ in range(3):
            await table.until_status(await table.enqueue(outbox, "mail"), "COMPLETED")
        names = await table.execute(
            "select application_name from pg_stat_activity"
            " where datname = current_database() and application_name like 'pulse-outbox claim%%'"
        )

    assert names == [("pulse-outbox claim",)]


async def test_what_one_claim_may_bring_the_other_does_not_count_on(dsn, outbox: Outbox, table: Table):
    """Free slots are promised once: events with a budget of one must not wait in memory for a slot."""
    outbox.handler("mail")(lambda event: None)
    async with dispatching(outbox, dsn, concurrency=10, batch=6) as dispatcher:

        async def is_open() -> bool:
            return hasattr(dispatcher, "_intake")

        await wait_until_async(is_open)
        intake = dispatcher._intake
        await intake.look_again()
        first = intake._call_of(intake._lanes.guess(6))
        intake._second.call = first
        try:
            assert (first.slots, intake._call_of(first.plan).slots) == (10, 4)
            assert intake._wanted() == 4
            assert intake.is_owed
            intake._second.call = replace(first, at=first.at - 2)
            assert intake._wanted() == 6, "a connection that hangs must not keep the other one from claiming"
        finally:
            intake._second.call = None
        assert intake._wanted() == 6


async def test_a_burst_does_not_end_before_the_second_claim_has_answered(
    dsn, outbox: Outbox, table: Table, monkeypatch
):
    """Its events are neither in the listing any more nor in memory yet."""
    runs: list[int] = []
    real = Store.claim
    late = asyncio.Event()

    async def slow_beside(store: Store, **options: Any) -> list[Claim]:
        claims = await real(store, **options)
        if "beside" in store._link._conninfo and claims:  # type: ignore[attr-defined]
            late.set()
            await asyncio.sleep(1.0)
        return claims

    monkeypatch.setattr(Store, "claim", slow_beside)

    @outbox.handler("mail")
    async def send(event: Event[dict[str, int]]) -> None:
        runs.append(event.payload["n"])

    await table.enqueue_many(outbox, [NewEvent("mail", {"n": n}) for n in range(400)])
    await drain(outbox, dsn, batch=20, lease=10)

    assert late.is_set()
    assert sorted(runs) == list(range(400))
    assert await table.count("status = 'COMPLETED' and lease_seq = 1") == 400
