"""In a backlog one claim is sent behind the other: what that must not change."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

from pulse_outbox import Dispatcher, Event, NewEvent, Outbox, RetryPolicy
from pulse_outbox.claims import Claimed
from pulse_outbox.dispatcher import pace
from pulse_outbox.dispatcher.intake import Intake
from pulse_outbox.dispatcher.wakeup import Heard
from pulse_outbox.storage_retry import StorageRetries
from pulse_outbox.store import Asking, Store
from tests.support.asking import Around
from tests.support.dispatching import QUICK, Table, dispatching, drain
from tests.support.proxy import proxied
from tests.support.waiting import wait_until_async

BATCH = 20


@pytest.fixture
def unanswered(monkeypatch) -> list[int]:
    """How many claims are unanswered, whenever one is sent."""
    seen: list[int] = []
    real = Intake._send

    def counted(intake: Intake, call: Any) -> None:
        seen.append(len(intake._calls))
        real(intake, call)

    monkeypatch.setattr(Intake, "_send", counted)
    return seen


async def until_two(unanswered: list[int]) -> None:
    """Until one claim was sent behind another."""

    async def is_so() -> bool:
        return unanswered[-1:] == [2]

    await wait_until_async(is_so)


def runs_of(outbox: Outbox, topic: str = "mail", **options: Any) -> Counter[int]:
    """Counts the runs of each event of a topic."""
    runs: Counter[int] = Counter()

    @outbox.handler(topic, **options)
    async def handle(event: Event[dict[str, int]]) -> None:
        runs[event.payload["n"]] += 1

    return runs


async def fill(table: Table, outbox: Outbox, number: int, topic: str = "mail") -> None:
    await table.enqueue_many(outbox, [NewEvent(topic, {"n": n}) for n in range(number)])


async def test_a_backlog_is_claimed_two_at_a_time_and_run_once(dsn, outbox: Outbox, table: Table, unanswered):
    runs = runs_of(outbox)
    await fill(table, outbox, 5000)
    await drain(outbox, dsn, batch=BATCH)

    assert Counter(unanswered)[2] > 50
    assert max(unanswered) == 2
    assert runs == Counter(range(5000))
    assert await table.count("status = 'COMPLETED' and attempts = 1 and lease_seq = 1") == 5000


async def test_without_a_backlog_one_claim_waits_for_its_answer(
    dsn, outbox: Outbox, table: Table, unanswered
):
    """Nothing is gained by a second one, and it would only be one more that can be lost."""
    runs_of(outbox)
    async with dispatching(outbox, dsn, batch=BATCH):
        for n in range(5):
            await table.until_status(await table.enqueue(outbox, "mail", {"n": n}), "COMPLETED")

    assert set(unanswered) == {1}


@pytest.mark.parametrize(
    "retries", [StorageRetries(), StorageRetries.off()], ids=["tried again", "asked again"]
)
async def test_both_answers_are_lost(dsn, outbox: Outbox, table: Table, unanswered, retries):
    """FAULTS 9, twice at once: both are asked for again by their tokens, and nothing is counted twice."""
    runs = runs_of(outbox)
    await fill(table, outbox, 10_000)
    async with (
        proxied(dsn) as proxy,
        dispatching(outbox, proxy.dsn, batch=BATCH, lease=30, retries=retries),
    ):
        for lost in range(1, 4):
            await until_two(unanswered)
            proxy.lose_answer_to = b"outbox_claim"

            async def is_lost(lost: int = lost) -> bool:
                return proxy.lost_answers == lost

            await wait_until_async(is_lost)
        await table.until("status = 'COMPLETED'", 10_000, within=25)

    assert runs == Counter(range(10_000))
    assert await table.count("attempts = 1 and lease_seq = 1") == 10_000


async def test_budgets_of_one_never_wait_in_memory(dsn, outbox: Outbox, table: Table, monkeypatch):
    """The slots that are free are promised once: what the second claim finds of them stays in the database."""
    promised: list[tuple[int, int]] = []
    beyond: list[int] = []
    promises: dict[int, int] = {}
    call_of, really_send, take_in = Intake._call_of, Intake._send, Intake._take_in

    def made(intake: Intake, plan: Any, *, slots: int) -> Any:
        call = call_of(intake, plan, slots=slots)
        promises[id(call)] = slots
        return call

    def sent(intake: Intake, call: Any) -> None:
        together = sum(promises[id(call)] for call in intake._calls)
        promised.append((len(intake._calls), together - intake._slots.free))
        really_send(intake, call)

    def taken_in(intake: Intake, claims: Any, call: Any) -> None:
        beyond.append(sum(claim.max_attempts == 1 for claim in claims) - intake._slots.free)
        take_in(intake, claims, call)

    monkeypatch.setattr(Intake, "_call_of", made)
    monkeypatch.setattr(Intake, "_send", sent)
    monkeypatch.setattr(Intake, "_take_in", taken_in)

    @outbox.handler("mail")
    async def send(event: Event) -> None:
        await asyncio.sleep(0.001)

    await table.enqueue_many(
        outbox, [NewEvent("mail", {}, max_attempts=None if n % 40 else 1) for n in range(4000)]
    )
    await drain(outbox, dsn, batch=BATCH, concurrency=60)

    assert {number for number, _ in promised} == {1, 2}
    assert max(above for number, above in promised if number == 2) <= 0
    assert max(beyond) <= 0, "more of them than slots were free"
    assert await table.count("status = 'COMPLETED' and attempts = 1") == 4000


async def test_budgets_of_one_get_their_share(dsn, outbox: Outbox, table: Table):
    """With more slots than a batch there is always room for more of the others: they must not get it all."""
    runs: Counter[str] = Counter()
    others: list[int] = []

    @outbox.handler("once", retry=RetryPolicy(max_attempts=1))
    async def once(event: Event) -> None:
        runs["once"] += 1
        if runs["once"] == 1500:
            others.append(runs["many"])
        await asyncio.sleep(0.02)

    @outbox.handler("many")
    async def many(event: Event) -> None:
        runs["many"] += 1
        await asyncio.sleep(0.02)

    await table.enqueue_many(outbox, [NewEvent("many", {}) for _ in range(9000)])
    await table.enqueue_many(outbox, [NewEvent("once", {}) for _ in range(1500)])
    async with dispatching(outbox, dsn, batch=20, concurrency=600, lease=30):
        await table.until("topic = 'once' and status = 'COMPLETED'", 1500, within=30)

    assert others[0] < 1.5 * 1500


@pytest.mark.parametrize(("topics", "concurrency", "batch"), [(4, 6, 2), (20, 30, 10)])
async def test_every_topic_gets_its_share(dsn, outbox: Outbox, table: Table, topics, concurrency, batch):
    """Where not all topics fit into one claim, the second one goes on behind the first."""
    runs: Counter[str] = Counter()
    names = [f"t{n:03}" for n in range(topics)]

    async def handle(event: Event) -> None:
        runs[event.topic] += 1
        await asyncio.sleep(0.02)

    for name in names:
        outbox.handler(name)(handle)
    await table.enqueue_many(outbox, [NewEvent(names[n % topics], {}) for n in range(20_000)])
    async with dispatching(outbox, dsn, concurrency=concurrency, batch=batch, lease=30):

        async def enough() -> bool:
            return runs.total() > int(topics * 40)

        await wait_until_async(enough, within=20)

    assert max(runs.values()) - min(runs[name] for name in names) <= 6


async def test_a_handlers_limit_holds_for_both(dsn, outbox: Outbox, table: Table):
    held: list[int] = []
    dispatchers: list[Dispatcher] = []
    runs_of(outbox)

    @outbox.handler("limited", concurrency=7)
    async def limited(event: Event) -> None:
        held.append(sum(job.claim.topic == "limited" for job in dispatchers[0]._in_flight.snapshot()))

    await fill(table, outbox, 3000)
    await table.enqueue_many(outbox, [NewEvent("limited", {}) for _ in range(500)])
    async with dispatching(outbox, dsn, batch=BATCH) as dispatcher:
        dispatchers.append(dispatcher)
        await table.until("status = 'COMPLETED'", 3500, within=20)

    assert max(held) <= 7


async def test_what_both_bring_after_a_stop_goes_back(dsn, outbox: Outbox, table: Table, unanswered):
    """SIGTERM in mid backlog: nothing stays claimed, and no attempt is spent."""
    runs = runs_of(outbox)
    await fill(table, outbox, 20_000)
    async with dispatching(outbox, dsn, batch=BATCH, lease=30):
        await until_two(unanswered)
    left = await table.count("status in ('PENDING', 'RETRYING') and attempts = 0")

    assert left > 0, "control: it was stopped in the middle"
    assert await table.count("status = 'RUNNING'") == 0
    assert sum(runs.values()) + left == 20_000


async def test_an_answer_that_came_while_something_else_was_awaited_is_not_forgotten(
    dsn, outbox: Outbox, table: Table, unanswered
):
    """The dispatcher's own row is locked in the moment in which it gets busy; then it is told to stop."""
    runs_of(outbox)
    dispatcher = Dispatcher(outbox, dsn=dsn, batch=BATCH, **{**QUICK, "lease": 30})
    running = asyncio.create_task(dispatcher.run_async())
    async with await psycopg.AsyncConnection.connect(dsn) as operator:
        await wait_until_async(lambda: _sleeps(table))
        await operator.execute("lock table pulse.dispatcher in exclusive mode")
        await fill(table, outbox, 20_000)
        await asyncio.sleep(1)
        dispatcher.stop()
        await asyncio.sleep(1)
        await operator.rollback()
    async with asyncio.timeout(20):
        await running

    assert await table.count("status = 'RUNNING'") == 0


async def _sleeps(table: Table) -> bool:
    return bool(await table.execute("select 1 from pulse.dispatcher where sleeping"))


async def test_a_burst_does_not_end_before_the_second_claim_has_answered(
    dsn, outbox: Outbox, table: Table, monkeypatch
):
    """Its events are neither in a listing any more nor in memory yet."""
    runs = runs_of(outbox)
    claim = Store.claim
    late: list[int] = []

    async def slow(claiming: Asking[Claimed]) -> Claimed:
        claims = await claiming
        if claims:
            late.append(len(claims))
            await asyncio.sleep(0.5)
        return claims

    def second_is_slow(store: Store, **options: Any) -> Any:
        claiming = claim(store, **options)
        return Around(claiming, slow) if options["slots"] == 0 else claiming

    monkeypatch.setattr(Store, "claim", second_is_slow)
    await fill(table, outbox, 120)
    await drain(outbox, dsn, batch=BATCH, lease=10)

    assert late, "control: there was a second one"
    assert runs == Counter(range(120))


async def test_a_listing_is_sent_behind_the_claims(dsn, outbox: Outbox, table: Table, monkeypatch):
    """So they do not stop for it. But no claim is sent behind the listing: should that take long, or fail, or the
    process end, its rows would wait for nothing."""
    runs = runs_of(outbox)
    unanswered: list[int] = []
    behind: list[int] = []
    is_asked = False
    ask, take, send = Intake._ask_for_lanes, Intake._take_listing, Intake._send

    def asked(intake: Intake) -> Any:
        nonlocal is_asked
        is_asked = True
        unanswered.append(len(intake._calls))
        return ask(intake)

    async def taken(intake: Intake, listing: Any) -> None:
        nonlocal is_asked
        await take(intake, listing)
        is_asked = False

    def sent(intake: Intake, call: Any) -> None:
        behind.append(is_asked)
        send(intake, call)

    monkeypatch.setattr(Intake, "_ask_for_lanes", asked)
    monkeypatch.setattr(Intake, "_take_listing", taken)
    monkeypatch.setattr(Intake, "_send", sent)
    monkeypatch.setattr(pace, "LISTING_INTERVAL_MIN", 0.005)
    await fill(table, outbox, 10_000)
    async with dispatching(outbox, dsn, batch=BATCH, concurrency=500, lease=30):
        await table.until("status = 'COMPLETED'", 10_000, within=25)

    assert unanswered.count(2) > 3
    assert not any(behind)
    assert runs == Counter(range(10_000))
    assert await table.count("attempts = 1 and lease_seq = 1") == 10_000


async def test_nothing_is_said_between_a_claim_and_its_answer(dsn, outbox: Outbox, table: Table, unanswered):
    """That many notifications come, a locked table lets nobody say: what was claimed meanwhile must not wait for it."""
    runs = runs_of(outbox)
    await fill(table, outbox, 3000)
    async with dispatching(outbox, dsn, batch=BATCH, lease=1.5) as dispatcher:
        await until_two(unanswered)
        async with await psycopg.AsyncConnection.connect(dsn) as somebody:
            await somebody.execute("lock table pulse.dispatcher in exclusive mode")
            dispatcher._intake.listening(True)
            dispatcher._intake.wake([Heard("", number) for number in range(1000)])

            async def is_deaf() -> bool:
                return dispatcher._intake._deaf

            await wait_until_async(is_deaf)

            async def all_is_done() -> bool:
                return not len(dispatcher._in_flight)

            await wait_until_async(all_is_done)
            assert await table.count("status = 'RUNNING'") == 0
        await table.until("status = 'COMPLETED'", 3000, within=20)

    assert runs == Counter(range(3000))
    assert await table.count("attempts = 1 and lease_seq = 1 and lapses = 0") == 3000


async def test_who_waits_for_claims_to_end_does_not_wait_for_a_lost_one(
    dsn, outbox: Outbox, table: Table, monkeypatch
):
    """Nobody has asked for its answer yet, since the one before it is tried again."""
    runs_of(outbox)
    await fill(table, outbox, 1000)
    both_are_out = asyncio.Event()
    real = Intake._send

    def send(intake: Intake, call: Any) -> None:
        if not both_are_out.is_set():
            proxy.frozen = intake._backlog
        real(intake, call)
        if proxy.frozen and len(intake._calls) == 2:
            proxy.frozen, proxy.refuse = False, True
            proxy.cut()
            both_are_out.set()

    monkeypatch.setattr(Intake, "_send", send)
    async with (
        proxied(dsn) as proxy,
        dispatching(outbox, proxy.dsn, batch=BATCH, lease=30, retries=StorageRetries.off()) as dispatcher,
    ):
        await both_are_out.wait()
        intake = dispatcher._intake

        async def second_is_lost() -> bool:
            return intake._calls[1].claim.is_lost

        await wait_until_async(second_is_lost)
        async with asyncio.timeout(10):
            assert not await intake.hold("test", patience=60)
        intake.let_go("test")
        proxy.refuse = False
        await table.until("status = 'COMPLETED'", 1000, within=25)


async def test_a_claim_that_is_asked_again_has_not_become_younger(
    dsn, outbox: Outbox, table: Table, monkeypatch
):
    """The first try may have been the one that took the leases."""
    runs = runs_of(outbox)
    sent: list[tuple[Any, float]] = []
    send = Intake._send

    def noted(intake: Intake, call: Any) -> None:
        send(intake, call)
        sent.append((call, call.at))

    monkeypatch.setattr(Intake, "_send", noted)
    await fill(table, outbox, 3)
    async with (
        proxied(dsn) as proxy,
        dispatching(outbox, proxy.dsn, lease=30, retries=StorageRetries.off(), poll=0.1),
    ):
        await table.until("status = 'COMPLETED'", 3)
        proxy.lose_answer_to = b"outbox_claim"
        proxy.lose_only_rows = True
        await fill(table, outbox, 3)
        await table.until("status = 'COMPLETED'", 6)

    assert proxy.lost_answers == 1
    assert len({call.token for call, _ in sent}) < len(sent), "control: one was sent again"
    assert all(call.at == at for call, at in sent)
    assert set(runs.values()) == {2}


async def test_a_new_topic_is_seen_beside_a_backlog(dsn, outbox: Outbox, table: Table, unanswered):
    """Claims that follow each other must leave room for a look at what else there is."""
    waits: list[float] = []
    runs_of(outbox)

    @outbox.handler("quiet")
    async def quiet(event: Event[dict[str, float]]) -> None:
        waits.append(time.monotonic() - event.payload["at"])

    await fill(table, outbox, 40_000)
    async with dispatching(outbox, dsn, batch=BATCH):
        for number in range(10):
            await table.enqueue(outbox, "quiet", {"at": time.monotonic()})

            async def ran(number: int = number) -> bool:
                return len(waits) > number

            await wait_until_async(ran)
        left = await table.count("topic = 'mail' and status = 'PENDING'")

    assert left > 0, "control: the other topic was busy all the time"
    assert max(unanswered) == 2
    assert max(waits) < 1.0


async def test_the_database_goes_away_for_good_while_two_are_unanswered(
    dsn, outbox: Outbox, table: Table, unanswered, caplog
):
    """It ends in time, and no task is left that nobody asked for its error."""
    runs_of(outbox)
    await fill(table, outbox, 20_000)
    async with proxied(dsn) as proxy:
        dispatcher = Dispatcher(outbox, dsn=proxy.dsn, batch=BATCH, **{**QUICK, "grace": 1})
        running = asyncio.create_task(dispatcher.run_async())

        await until_two(unanswered)
        proxy.refuse = True
        proxy.cut()
        await asyncio.sleep(0.3)
        dispatcher.stop()
        async with asyncio.timeout(15):
            await running

    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


async def test_a_pause_holds_for_what_was_to_come(dsn, outbox: Outbox, table: Table, unanswered):
    """FAULTS 43: no claim after the commit of the pause, not by one that was planned before it either."""
    runs_of(outbox)
    await fill(table, outbox, 40_000)
    async with dispatching(outbox, dsn, batch=BATCH):
        await until_two(unanswered)
        async with await psycopg.AsyncConnection.connect(dsn) as operator:
            await operator.execute("select pulse.outbox_pause('mail', 'test', 'test')")
        [(paused_at,)] = await table.execute("select clock_timestamp()")
        await table.until("status = 'RUNNING'", 0)

    assert await table.count("status = 'PENDING'") > 0, "control"
    assert await table.count("claimed_at > %s", paused_at) == 0
