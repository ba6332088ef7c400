"""Who gets the slots: every topic its share, nobody more than about 100 ms of work ahead."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from pulse_outbox import Dispatcher, Event, NewEvent, Outbox, RetryPolicy
from pulse_outbox.claims import Claimed
from pulse_outbox.dispatcher import pace
from pulse_outbox.dispatcher.children import ChildSuspects
from pulse_outbox.dispatcher.jobs import InFlight
from pulse_outbox.dispatcher.lanes import LaneKey
from pulse_outbox.store import Asking, Listing, Store
from tests.support.asking import Around
from tests.support.dispatching import Table, dispatching, drain
from tests.support.waiting import wait_until_async


async def test_a_hot_topic_does_not_starve_a_quiet_one(dsn, outbox: Outbox, table: Table):
    """FAULTS 30: 20,000 due in one topic, and a single event of another waits no longer than a few claims."""
    waits: list[float] = []

    @outbox.handler("hot")
    async def hot(event: Event) -> None:
        await asyncio.sleep(0.002)

    @outbox.handler("quiet")
    async def quiet(event: Event[dict]) -> None:
        waits.append(time.monotonic() - event.payload["at"])

    await table.enqueue_many(outbox, [NewEvent("hot", {}) for _ in range(20_000)])
    async with dispatching(outbox, dsn, concurrency=10):
        for number in range(10):
            await table.enqueue(outbox, "quiet", {"at": time.monotonic()})

            async def ran(number: int = number) -> bool:
                return len(waits) > number

            await wait_until_async(ran)
        left = await table.count("topic = 'hot' and status = 'PENDING'")

    assert left > 0, "control: the hot topic was busy all the time"
    assert max(waits) < 1.0


async def test_a_topic_that_wakes_the_intake_all_the_time_does_not_starve_a_quiet_one(
    dsn, outbox: Outbox, table: Table
):
    """So does one whose jobs give the turn to the next of their keys: other lanes must be looked at all the same."""
    dispatchers: list[Dispatcher] = []
    is_hot = asyncio.Event()

    @outbox.handler("hot")
    async def hot(event: Event) -> None:
        dispatchers[0]._intake.expect(0)
        is_hot.set()
        await asyncio.sleep(0.002)

    outbox.handler("quiet")(lambda event: None)
    await table.enqueue_many(outbox, [NewEvent("hot", {}) for _ in range(20_000)])
    async with dispatching(outbox, dsn, concurrency=10) as dispatcher:
        dispatchers.append(dispatcher)
        await is_hot.wait()
        await table.enqueue(outbox, "quiet", priority=9)
        await table.until("topic = 'quiet' and status = 'COMPLETED'", 1, within=30)
        left = await table.count("topic = 'hot' and status = 'PENDING'")

    assert left > 0


async def test_one_slot_goes_round_the_topics(dsn, outbox: Outbox, table: Table):
    """With fewer slots than topics everyone gets a turn."""
    order: list[str] = []

    async def note(event: Event) -> None:
        order.append(event.topic)
        await asyncio.sleep(0.002)

    for topic in "abc":
        outbox.handler(topic)(note)
    await table.enqueue_many(outbox, [NewEvent(topic, {}) for topic in "abc" for _ in range(30)])
    await drain(outbox, dsn, concurrency=1, batch=1)

    assert len(order) == 90
    first = order[:45]
    assert all(first.count(topic) >= 8 for topic in "abc"), order


async def test_wake_ups_change_nothing_about_the_shares_of_backlogs(dsn, outbox: Outbox, table: Table):
    """A guess gives all that it gets to whoever comes first: it is for when nothing is known to wait."""
    ran: Counter[str] = Counter()

    async def note(event: Event) -> None:
        ran[event.topic] += 1
        await asyncio.sleep(0.02)

    for topic in "abc":
        outbox.handler(topic)(note)
    await table.enqueue_many(outbox, [NewEvent(topic, {}) for topic in "abc" for _ in range(300)])
    async with dispatching(outbox, dsn, concurrency=6) as dispatcher:
        while ran.total() < 450:
            if hasattr(dispatcher, "_intake"):
                dispatcher._intake.wake()
            await asyncio.sleep(0.005)

    assert min(ran.values()) > 120, ran


async def test_slow_jobs_are_not_hoarded(dsn, outbox: Outbox, table: Table):
    """A hundred jobs of half a second at concurrency 10: next to none is claimed before it can start."""
    running = 0

    @outbox.handler("slow")
    async def slow(event: Event) -> None:
        nonlocal running
        running += 1
        await asyncio.sleep(0.5)
        running -= 1

    await table.enqueue_many(outbox, [NewEvent("slow", {}) for _ in range(60)])
    most = 0
    async with dispatching(outbox, dsn, concurrency=10) as dispatcher:

        async def done() -> bool:
            nonlocal most
            if hasattr(dispatcher, "_slots"):
                most = max(most, dispatcher._slots.waiting)
            return await table.count("status = 'COMPLETED'") == 60

        await wait_until_async(done)

    # They end together, so for a moment they look quicker than they are.
    assert most <= 20, "claimed and not started"


async def test_nothing_is_hoarded_when_quick_jobs_are_followed_by_slow_ones(
    dsn, outbox: Outbox, table: Table
):
    """The rate of the quick ones says nothing about the slow ones; a second dispatcher shares those."""
    ran_by: list[str] = []

    def make(name: str) -> Outbox:
        made = Outbox()

        @made.handler("quick", completed="delete")
        async def quick(event: Event) -> None:
            pass

        @made.handler("slow")
        async def slow(event: Event) -> None:
            ran_by.append(name)
            await asyncio.sleep(0.5)

        return made

    async with (
        dispatching(make("one"), dsn, concurrency=10) as one,
        dispatching(make("two"), dsn, concurrency=10, topics=("slow",)),
    ):
        await table.enqueue_many(outbox, [NewEvent("quick", {}) for _ in range(5000)])
        await table.until("topic = 'quick'", 0, within=20)
        await table.enqueue_many(outbox, [NewEvent("slow", {}) for _ in range(100)])
        started = time.monotonic()
        await table.until("status = 'COMPLETED'", 100, within=30)
        took = time.monotonic() - started
        assert one._tally.released > 0, "control: more had been claimed than could start"

    assert ran_by.count("two") >= 30, f"{ran_by.count('two')} of 100, {took:.1f} s"


async def test_what_a_sweep_finds_dead_is_no_work_of_this_process(dsn, outbox: Outbox, table: Table):
    """Its own jobs are no quicker for it, so no more of them may be claimed ahead."""
    outbox.handler("once", retry=RetryPolicy(max_attempts=1))(lambda event: None)

    @outbox.handler("slow")
    async def slow(event: Event) -> None:
        await asyncio.sleep(1)

    await table.enqueue_many(outbox, [NewEvent("once", {}) for _ in range(1000)])
    await table.execute(
        "select count(*) from pulse.outbox_claim(%s, 'other', '{once}', 1000, p_lease => '0 s', p_budgets => '{1}')",
        uuid4(),
    )
    await table.enqueue_many(outbox, [NewEvent("slow", {}) for _ in range(200)])
    most = 0
    async with dispatching(outbox, dsn, concurrency=5) as dispatcher:
        await table.until("status = 'DEAD_LETTERED'", 1000)
        swept_at = time.monotonic()
        while time.monotonic() < swept_at + 1.5:
            most = max(most, dispatcher._slots.waiting)
            await asyncio.sleep(0.01)
        assert dispatcher._tally.dead == 1000, "control: it was this one that found them"

    assert most <= 10


async def test_a_budget_of_one_is_never_claimed_ahead(dsn, outbox: Outbox, table: Table):
    """It must not wait in the memory of a process that may die; its neighbours may."""
    claimed_ahead = 0

    @outbox.handler("once", retry=RetryPolicy(max_attempts=1))
    async def once(event: Event) -> None:
        await asyncio.sleep(0.001)

    @outbox.handler("often")
    async def often(event: Event) -> None:
        await asyncio.sleep(0.001)

    await table.enqueue_many(
        outbox, [NewEvent(topic, {}) for _ in range(300) for topic in ("once", "often", "often")]
    )
    ahead_of_others = 0
    async with dispatching(outbox, dsn, concurrency=3) as dispatcher:

        async def done() -> bool:
            nonlocal claimed_ahead, ahead_of_others
            if hasattr(dispatcher, "_slots"):
                waiting = list(dispatcher._slots._queue)
                idle = 3 - dispatcher._slots.running
                once_waiting = sum(job.claim.max_attempts == 1 for job in waiting)
                claimed_ahead = max(claimed_ahead, once_waiting - idle)
                ahead_of_others = max(ahead_of_others, len(waiting) - once_waiting)
            return await table.count("status = 'COMPLETED'") == 900

        await wait_until_async(done, within=30)

    assert claimed_ahead <= 0
    assert ahead_of_others > 0, "control: others are claimed ahead"


@pytest.mark.parametrize(
    "urgent",
    [
        NewEvent("a.once", {}),
        NewEvent("z.once", {}),
        NewEvent("often-0", {"urgent": True}, max_attempts=1, priority=5),
        NewEvent("a.often", {"urgent": True}, max_attempts=1),
    ],
    ids=["by its handler", "by its handler, last", "by its producer", "by its producer, another topic"],
)
@pytest.mark.parametrize("topics", [1, 7])
async def test_a_budget_of_one_gets_its_turn_beside_a_backlog(
    dsn, outbox: Outbox, table: Table, urgent: NewEvent, topics: int
):
    """No slot is ever free while others are claimed ahead, and it is claimed for a free slot only."""
    ran = 0

    async def once(event: Event) -> None:
        nonlocal ran
        ran += 1

    async def often(event: Event[dict[str, Any]]) -> None:
        nonlocal ran
        await asyncio.sleep(0.005)
        ran += "urgent" in event.payload

    for topic in ("a.once", "z.once"):
        outbox.handler(topic, retry=RetryPolicy(max_attempts=1))(once)
    for topic in ("a.often", *(f"often-{number}" for number in range(topics))):
        outbox.handler(topic)(often)

    await table.enqueue_many(outbox, [NewEvent(f"often-{n % topics}", {}) for n in range(15_000)])
    async with dispatching(outbox, dsn, concurrency=10) as dispatcher:
        await wait_until_async(lambda: _true(dispatcher._tally.completed > 1000))
        assert dispatcher._slots.free == 0, "control: no slot is free"
        await table.enqueue_many(outbox, [urgent] * 30)
        await wait_until_async(lambda: _true(ran == 30))

        assert await table.count("status = 'PENDING'") > 10_000, "control: there was a backlog all the time"


async def _true(is_so: bool) -> bool:
    return is_so


async def test_generations_and_topics_of_others_are_left_alone(dsn, outbox: Outbox, table: Table):
    """A rolling deploy: old workers touch neither new topics nor other generations; attempts stay 0."""
    ran = []

    @outbox.handler("order.paid")
    async def paid(event: Event) -> None:
        ran.append(event.generation)

    outbox.handler("mail.sent")(lambda event: ran.append(-1))
    new = Outbox()
    new.handler("order.refunded")(lambda event: None)
    await table.enqueue(new, "order.refunded")
    await table.enqueue(outbox, "mail.sent")
    for generation in (0, 1, 2, 3):
        await table.enqueue(outbox, "order.paid", generation=generation)
    await drain(outbox, dsn, generations=(2,), topics=("order.*",))

    assert sorted(ran) == [0, 2]
    assert await table.count("status = 'PENDING' and attempts = 0 and lease_seq = 0") == 4
    assert await table.count("status = 'COMPLETED'") == 2


async def test_an_older_generation_does_not_starve_a_newer_one(dsn, outbox: Outbox, table: Table):
    """Within a topic and priority the due time decides, whatever the generation."""
    order = []

    @outbox.handler("job")
    async def job(event: Event) -> None:
        order.append(event.generation)

    await table.enqueue(outbox, "job", generation=1)
    await table.enqueue_many(outbox, [NewEvent("job", {}, generation=0) for _ in range(200)])
    await drain(outbox, dsn, concurrency=1, batch=5)

    assert order.index(1) < 10


async def test_priorities_within_a_topic(dsn, outbox: Outbox, table: Table):
    order = []
    outbox.handler("job")(lambda event: order.append(event.payload["priority"]))
    await table.enqueue_many(
        outbox,
        [NewEvent("job", {"priority": p}, priority=p) for p in (0, 3, -9, 9, 5, 0, 9)],
    )
    await drain(outbox, dsn, concurrency=1)

    assert order == [9, 9, 5, 3, 0, 0, -9]


async def test_pausing_gives_back_what_was_claimed_ahead(dsn, outbox: Outbox, table: Table):
    """FAULTS 43: no claim after the commit; what waits in memory goes back, what runs finishes."""
    gate = asyncio.Event()
    started = 0

    @outbox.handler("job")
    async def job(event: Event) -> None:
        nonlocal started
        started += 1
        if started > 300:
            await gate.wait()

    await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(2000)])
    async with dispatching(outbox, dsn, concurrency=10) as dispatcher:

        async def all_slots_wait() -> bool:
            return started == 310 and dispatcher._slots.waiting > 0

        await wait_until_async(all_slots_wait)
        await table.execute("select pulse.outbox_pause('job', 'test', 'test')")
        await table.until("status = 'RUNNING'", 10)
        gate.set()
        await table.until("status = 'RUNNING'", 0)
        assert started == 310
        assert await table.count("status = 'PENDING' and attempts = 0") == 1690
        await table.execute("select pulse.outbox_resume('job', 'test')")
        await table.until("status = 'COMPLETED'", 2000)


async def test_what_others_have_locked_is_not_asked_for_again_and_again(
    dsn, outbox: Outbox, table: Table, monkeypatch
):
    """A listing shows it as due, and every claim finds nothing: the naps grow all the same."""
    claims = 0
    real = Store.claim

    async def slow(claiming: Asking[Claimed]) -> Claimed:
        nonlocal claims
        claims += 1
        await asyncio.sleep(0.02)  # a database that is not next door: as long as the first nap
        return await claiming

    monkeypatch.setattr(Store, "claim", lambda store, **options: Around(real(store, **options), slow))
    outbox.handler("mail")(lambda event: None)
    await table.enqueue_many(outbox, [NewEvent("mail", {}) for _ in range(10)])
    async with await psycopg.AsyncConnection.connect(dsn) as somebody:
        await somebody.execute("select 1 from pulse.outbox for update")
        async with dispatching(outbox, dsn, poll=5):
            await asyncio.sleep(2)
            while_locked = claims
            await somebody.rollback()
            await table.until("status = 'COMPLETED'", 10)

    assert 2 <= while_locked <= 12


def test_places_are_kept_for_a_claim_whose_answer_was_lost():
    """It may have taken as much as it asked for, and nobody else may have these places until that is known."""
    in_flight = InFlight()
    token = uuid4()

    in_flight.ask(token, [("mail", 3)])
    in_flight.ask(token, [("mail", 3)])  # sent once more
    assert in_flight.of_topic("mail") == 3

    assert in_flight.answered(token)
    assert in_flight.of_topic("mail") == 0


def test_places_that_nobody_keeps_any_more_are_announced():
    """An event of a handler at its limit waits for them, and nothing else may wake the intake."""
    freed: list[int] = []
    in_flight = InFlight(freed=lambda: freed.append(in_flight.of_topic("mail")))
    outbox = Outbox()
    outbox.handler("mail", concurrency=1)(lambda event: None)
    nothing: Any = None
    suspects = ChildSuspects(
        nothing,
        target="",
        dsn="",
        schema="",
        settings=Dispatcher(outbox, dsn="dbname=none").settings,
        handlers=outbox.handlers,
        in_flight=in_flight,
        settler=nothing,
        deliver=nothing,
        condition=nothing,
        tally=nothing,
    )

    for _ in range(3):
        suspects.due([LaneKey("mail", 0, 1, 0)])
    assert (in_flight.of_topic("mail"), freed) == (1, []), "kept, and told once more is nothing new"
    suspects.due([])

    assert freed == [0]


async def test_jobs_that_end_are_no_reason_to_list_the_lanes_again(
    dsn: str, table: Table, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
):
    """While an event waits for its handler, every end of another one might have made room for it."""
    listings: list[int] = []
    really_ask = Store.lanes
    may_end = [asyncio.Event() for _ in range(40)]
    ended: list[int] = []

    def ask_and_count(self: Store, *args: Any, **options: Any) -> Asking[Listing]:
        listings.append(1)
        return really_ask(self, *args, **options)

    @outbox.handler("slow", concurrency=1)
    async def slow(event: Event[dict[str, int]]) -> None:
        await may_end[-1].wait()

    @outbox.handler("job")
    async def job(event: Event[dict[str, int]]) -> None:
        await may_end[event.payload["number"]].wait()
        ended.append(event.payload["number"])

    monkeypatch.setattr(Store, "lanes", ask_and_count)
    monkeypatch.setattr(pace, "LISTING_INTERVAL_MIN", 1.0)
    async with dispatching(outbox, dsn, poll=5):
        await table.enqueue_many(outbox, [NewEvent("slow", {}), NewEvent("slow", {})])
        await table.enqueue_many(outbox, [NewEvent("job", {"number": number}) for number in range(39)])
        await table.until("status = 'RUNNING'", 40)
        before = len(listings)
        for number in range(39):
            may_end[number].set()
            while len(ended) <= number:
                await asyncio.sleep(0.01)
        made = len(listings) - before
        may_end[-1].set()
        await table.until("status = 'COMPLETED'", 41)

    assert made < 10


async def test_a_quiet_topic_is_asked_for_between_two_listings(
    dsn: str, table: Table, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
):
    """Beside a backlog: a listing that takes a few milliseconds comes only every half second."""
    order = ""
    really_ask = Store.lanes

    async def slow(asking: Asking[Listing]) -> Listing:
        nonlocal order
        order += "L"
        return (await asking)._replace(took=0.009)

    def ask_slowly(self: Store, *args: Any, **options: Any) -> Any:
        return Around(really_ask(self, *args, **options), slow)

    @outbox.handler("hot")
    async def hot(event: Event) -> None:
        await asyncio.sleep(0.01)

    @outbox.handler("quiet")
    async def quiet(event: Event) -> None:
        nonlocal order
        order += "q"

    monkeypatch.setattr(Store, "lanes", ask_slowly)
    await table.enqueue_many(outbox, [NewEvent("hot", {}) for _ in range(6000)])
    async with dispatching(outbox, dsn, concurrency=20):
        for number in range(5):
            await table.enqueue(outbox, "quiet")

            async def ran(number: int = number) -> bool:
                return order.count("q") > number

            await wait_until_async(ran)
        assert await table.count("topic = 'hot' and status = 'PENDING'") > 0

    assert "qq" in order, "each was enqueued when the one before it had run"
