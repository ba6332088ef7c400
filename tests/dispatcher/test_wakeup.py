"""Wake-ups: quick with a notification, sufficient without one."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest
import structlog
from psycopg.conninfo import make_conninfo

from pulse_outbox import Event, NewEvent, Outbox
from pulse_outbox.dispatcher import intake, pace, wakeup
from pulse_outbox.dispatcher.wakeup import Heard, commits_of
from tests.support.dispatching import Table, dispatching
from tests.support.proxy import proxied
from tests.support.waiting import wait_until_async


def heard(*topics: str) -> list[Heard]:
    """Notifications of one commit."""
    return [Heard(topic, 1) for topic in topics]


class Arrivals:
    """A handler that notes when it was called."""

    def __init__(self, outbox: Outbox, *topics: str) -> None:
        self.at: list[float] = []
        self._came = asyncio.Event()
        for topic in topics or ("job",):
            outbox.handler(topic)(self._handle)

    async def _handle(self, event: Event) -> None:
        self.at.append(time.monotonic())
        self._came.set()

    async def latency(self, outbox: Outbox, table: Table, topic: str = "job", *, within: float = 10) -> float:
        """Seconds from the commit of one event to its handler."""
        self._came.clear()
        await table.execute("select 1")
        started = time.monotonic()
        await table.enqueue(outbox, topic)
        async with asyncio.timeout(within):
            await self._came.wait()
        return self.at[-1] - started


async def asleep(table: Table) -> None:
    """Until the dispatcher says that it must be woken, and has no more short naps before it."""

    async def sleeping() -> bool:
        return bool(await table.execute("select 1 from pulse.dispatcher where sleeping"))

    await wait_until_async(sleeping)


async def has_prepared(claims: intake.Intake, topic: str = "job") -> None:
    """Until it sleeps, with a claim at hand."""

    async def so() -> bool:
        return claims._is_asleep and topic in claims._prepared

    await wait_until_async(so)


async def test_an_idle_dispatcher_runs_a_new_job_at_once(dsn, outbox: Outbox, table: Table):
    """With a poll interval of a minute only the notification can have done it."""
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        await asleep(table)

        async def deeply_asleep() -> bool:
            return dispatcher._intake._nap > 2

        await wait_until_async(deeply_asleep)
        latencies = [await arrivals.latency(outbox, table) for _ in range(20)]

    assert sorted(latencies)[10] < 0.05
    assert max(latencies) < 0.3


async def test_a_notification_sends_the_claim_itself(dsn, outbox: Outbox, table: Table):
    """It was made before the dispatcher fell asleep: no other task has to run first."""
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        await arrivals.latency(outbox, table)
        await asleep(table)
        claims = dispatcher._intake
        await has_prepared(claims)
        before = time.monotonic()
        claims.wake(heard("job"))
        [call] = claims._calls
        assert call.is_under_way
        assert before <= call.at <= time.monotonic(), "leases begin when it is sent, not when it was made"
        claims.wake(heard("job"))
        assert list(claims._calls) == [call], "one claim, however many notifications"

        await has_prepared(claims)
        for _ in range(5):
            await arrivals.latency(outbox, table)

    assert len(arrivals.at) == 6
    assert await table.count("status = 'COMPLETED' and attempts = 1 and lease_seq = 1") == 6


async def test_a_claim_that_was_made_is_not_sent_while_claims_are_held(dsn, outbox: Outbox, table: Table):
    """A suspect runs alone, or the process ends."""
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        await arrivals.latency(outbox, table)
        await asleep(table)
        claims = dispatcher._intake
        await has_prepared(claims)
        assert await claims.hold("test")
        await table.enqueue(outbox, "job")
        claims.wake(heard("job"))
        assert not claims._calls
        claims.let_go("test")
        await table.until("status = 'COMPLETED'", 2)

    assert len(arrivals.at) == 2


async def test_a_claim_that_was_made_for_other_slots_is_not_sent(dsn, outbox: Outbox, table: Table):
    """Jobs have ended since, and more can start: it would take too few. Or too many with a budget of one."""
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        await arrivals.latency(outbox, table)
        await asleep(table)
        claims = dispatcher._intake
        await has_prepared(claims)
        claims._prepared["job"].slots -= 1
        claims.wake(heard("job"))
        assert not claims._calls
        await table.enqueue(outbox, "job")
        await table.until("status = 'COMPLETED'", 2)

    assert len(arrivals.at) == 2


async def test_a_notification_asks_for_its_own_topic(dsn, outbox: Outbox, table: Table):
    """Else every event of another topic than the last one would wait for a listing and a second claim."""
    arrivals = Arrivals(outbox, "a", "b", "c")
    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        for topic in "abc":
            await arrivals.latency(outbox, table, topic)
        claims = dispatcher._intake
        await asleep(table)
        for topic in "abcba":
            await has_prepared(claims, topic)
            assert set(claims._prepared) == {"a", "b", "c"}
            claims.wake(heard(topic))
            [call] = claims._calls
            assert [lane["topic"] for lane in call.plan.lanes or ()] == [topic]
        await has_prepared(claims, "a")

        claims.wake(heard("a", "b"))
        assert not claims._calls, "two of them: a listing shows which"


async def test_what_others_serve_wakes_nobody_here(dsn, outbox: Outbox, table: Table):
    """Many dispatchers share one channel, each with topics of its own."""
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        await arrivals.latency(outbox, table)
        await asleep(table)
        claims = dispatcher._intake
        await has_prepared(claims)
        claims.wake(heard("somebody.else"))

        assert claims._is_asleep
        assert not claims._stirred.is_set()
        claims.wake(heard("somebody.else", ""))
        assert claims._stirred.is_set(), "nobody knows what that was about"


async def test_a_claim_at_hand_keeps_to_its_handlers_limit(dsn, outbox: Outbox, table: Table):
    """And is not sent where the limit is used up."""
    running = asyncio.Semaphore(0)
    end = asyncio.Event()

    @outbox.handler("narrow", concurrency=2)
    async def narrow(event: Event) -> None:
        running.release()
        await end.wait()

    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        for _ in range(2):
            await table.enqueue(outbox, "narrow")
            async with asyncio.timeout(10):
                await running.acquire()
        claims = dispatcher._intake
        assert not any(map(claims._fits, claims._prepared.values()))
        for _ in range(3):
            await table.enqueue(outbox, "narrow")
        assert await table.count("status = 'RUNNING'") == 2
        end.set()
        await table.until("status = 'COMPLETED'", 5)

        # One made before the last answer was read has one place less, until the next nap.
        async def fits() -> bool:
            return claims._is_asleep and any(map(claims._fits, claims._prepared.values()))

        await wait_until_async(fits)
        assert claims._prepared["narrow"].plan.limit == 2


async def test_a_claim_at_hand_is_made_anew_when_its_lane_has_moved_on(
    dsn, outbox: Outbox, table: Table, monkeypatch
):
    """It would walk over all that has died since. Others, that nobody asked for, are kept for a while."""
    monkeypatch.setattr(intake, "PREPARED_FOR", 60.0)
    arrivals = Arrivals(outbox, "a", "b")
    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        for topic in "ab":
            await arrivals.latency(outbox, table, topic)
        claims = dispatcher._intake
        await has_prepared(claims, "a")
        before = dict(claims._prepared)
        await table.execute(
            "insert into pulse.outbox (event_id, topic, payload, idempotency_key)"
            " select id, 'b', '{}', id::text from gen_random_uuid() as id"
        )
        claims.wake(heard(""))  # so that it is found in another way
        await table.until("status = 'COMPLETED'", 3)
        await has_prepared(claims, "b")

        assert claims._prepared["a"] is before["a"]
        assert claims._prepared["b"] is not before["b"]
        monkeypatch.setattr(intake, "PREPARED_FOR", 0.0)
        await arrivals.latency(outbox, table, "b")
        await has_prepared(claims, "a")
        assert claims._prepared["a"] is not before["a"], "too old"


async def test_an_event_of_a_topic_that_never_had_one_is_found_at_once(dsn, outbox: Outbox, table: Table):
    """No lane that is known can be meant: asking them first would be a waste."""
    arrivals = Arrivals(outbox, "a", "new")
    async with dispatching(outbox, dsn, poll=60):
        await arrivals.latency(outbox, table, "a")
        await asleep(table)

        assert await arrivals.latency(outbox, table, "new") < 1


async def test_without_notify_polling_is_enough(dsn, outbox: Outbox, table: Table):
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=0.3, notify=False) as dispatcher:

        async def deeply_asleep() -> bool:
            return hasattr(dispatcher, "_intake") and dispatcher._intake._nap >= 0.3

        await wait_until_async(deeply_asleep)
        assert await table.execute("select 1 from pulse.dispatcher where sleeping") == []
        latency = await arrivals.latency(outbox, table)

    assert latency < 0.3 + 0.3


async def test_lost_notifications_cost_one_poll_interval(dsn, outbox: Outbox, table: Table):
    """The queue of notifications is nobody's promise: here nobody notifies although somebody listens."""
    arrivals = Arrivals(outbox)
    await table.execute(
        "create or replace function pulse.outbox_wake(p_topics text[]) returns void language sql as 'select'"
    )
    async with dispatching(outbox, dsn, poll=0.5) as dispatcher:

        async def deeply_asleep() -> bool:
            return hasattr(dispatcher, "_intake") and dispatcher._intake._nap >= 0.5

        await wait_until_async(deeply_asleep)
        latency = await arrivals.latency(outbox, table)

    assert latency < 0.5 + 0.3


async def test_it_sleeps_until_the_next_job_is_due(dsn, outbox: Outbox, table: Table):
    """Not until the next poll: a delayed job starts when it is due, and not a moment before."""
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=60, notify=False) as dispatcher:

        async def running() -> bool:
            return hasattr(dispatcher, "_intake")

        await wait_until_async(running)
        started = time.monotonic()
        await table.enqueue(outbox, "job", delay=1.2)

        async def came() -> bool:
            return bool(arrivals.at)

        await wait_until_async(came)

    assert 1.15 < arrivals.at[0] - started < 1.6


async def test_a_terminated_listener_is_made_again(dsn, outbox: Outbox, table: Table):
    arrivals = Arrivals(outbox)
    with structlog.testing.capture_logs() as lines:
        async with dispatching(outbox, dsn, poll=60):
            await asleep(table)
            [(old,)] = await _listener(table)
            await table.execute("select pg_terminate_backend(%s)", old)

            async def another() -> bool:
                return any(pid != old for (pid,) in await _listener(table))

            await wait_until_async(another)
            assert await arrivals.latency(outbox, table) < 0.3

    said = [line["event"] for line in lines if line.get("loop") == "listen"]
    assert said == ["outbox.loop_failed", "outbox.loop_recovered"]


async def test_a_silent_listener_is_noticed_and_made_again(dsn, outbox: Outbox, table: Table, monkeypatch):
    """FAULTS 18: packets vanish without a word. Nothing but an answer shows that a connection lives."""
    monkeypatch.setattr("pulse_outbox.dispatcher.wakeup.CHECK_INTERVAL", 0.5)
    monkeypatch.setattr("pulse_outbox.dispatcher.wakeup.CHECK_TIMEOUT", 0.5)
    arrivals = Arrivals(outbox)
    async with proxied(dsn) as proxy, dispatching(outbox, dsn, poll=60, listen_dsn=proxy.dsn):
        await asleep(table)
        assert await arrivals.latency(outbox, table) < 0.3, "control: it listens through the proxy"
        [(old,)] = await _listener(table)
        assert proxy.freeze("pulse-outbox listen") == 1

        async def another() -> bool:
            return any(pid != old for (pid,) in await _listener(table))

        await wait_until_async(another)
        assert await arrivals.latency(outbox, table) < 0.3


async def _listener(table: Table) -> list[tuple[int]]:
    """The process ids of those who listen, as soon as somebody does."""

    async def listening() -> list[tuple[int]]:
        return await table.execute(_LISTENERS)

    return await wait_until_async(listening)


_LISTENERS = (
    "select pid from pg_stat_activity "
    "where application_name = 'pulse-outbox listen' and datname = current_database() and state = 'idle'"
)


async def test_producers_do_not_notify_while_dispatchers_are_busy(dsn, outbox: Outbox, table: Table):
    """FAULTS 19: where many commits notify, the row says so, and the first job after the load is still quick."""
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=60):
        await asleep(table)
        enough = asyncio.Event()

        async def produce() -> None:
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as producer:
                while not enough.is_set():
                    await outbox.enqueue_async(producer, "job", {}, outside_transaction=True)

        async def busy() -> bool:
            return bool(await table.execute("select 1 from pulse.dispatcher where not sleeping"))

        producers = [asyncio.create_task(produce()) for _ in range(4)]
        await wait_until_async(busy)
        enough.set()
        await asyncio.gather(*producers)
        # At any moment of falling asleep, which is when a wake-up may cross.
        latencies = [await arrivals.latency(outbox, table) for _ in range(30)]
        await asleep(table)
        latencies.append(await arrivals.latency(outbox, table))

    assert max(latencies) < 0.3


async def test_many_events_of_few_commits_are_still_notified(dsn, outbox: Outbox, table: Table):
    """A notification for each commit costs next to nothing then, and each saves a few milliseconds of polling."""
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        await asleep(table)
        for n in range(1, 51):
            await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(20)])

            async def ran(n: int = n) -> bool:
                return len(arrivals.at) == 20 * n

            await wait_until_async(ran)
            await asyncio.sleep(0.01)  # the pace: fewer than 100 commits a second
        assert await table.execute("select 1 from pulse.dispatcher where not sleeping") == []
        assert not dispatcher._intake._deaf


async def test_a_dispatcher_does_not_stay_deaf_under_a_load_of_few_commits(
    dsn, outbox: Outbox, table: Table, monkeypatch
):
    """It has no time to fall asleep, and would be polling for ever since there were many notifications once."""
    monkeypatch.setattr(intake, "DEAF_LONGEST", 0.3)
    arrivals = Arrivals(outbox)
    enough = asyncio.Event()

    async def produce() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as producer:
            while not enough.is_set():
                async with producer.transaction():
                    await outbox.enqueue_many_async(producer, [NewEvent("job", {}) for _ in range(10)])
                await asyncio.sleep(0.01)  # the pace: too quick to fall asleep, and fewer than 100 a second

    async with dispatching(outbox, dsn, poll=60) as dispatcher:
        producing = asyncio.create_task(produce())

        async def deaf() -> bool:
            if hasattr(dispatcher, "_intake"):
                dispatcher._intake.wake([Heard("", number) for number in range(100)])
            return bool(await table.execute("select 1 from pulse.dispatcher where not sleeping"))

        await wait_until_async(deaf)
        await asleep(table)
        enough.set()
        await producing

    assert arrivals.at


def test_what_was_loud_long_ago_is_not_loud():
    noise = pace.Noise()
    noise.is_listening = True
    noise.heard(1000, 10.0)

    assert noise.is_loud(10.1)
    assert not noise.is_loud(20.0)


@pytest.mark.parametrize("notify", [False, True], ids=["told not to", "its connection is refused"])
async def test_where_nobody_listens_a_load_is_polled_quickly(dsn, outbox: Outbox, table: Table, notify: bool):
    """Nobody is heard then, so the events themselves say how much goes on."""
    arrivals = Arrivals(outbox)
    nowhere = make_conninfo(dsn, host="127.0.0.1", port=1)
    async with dispatching(outbox, dsn, poll=60, notify=notify, listen_dsn=nowhere) as dispatcher:
        await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(500)])
        await table.until("status = 'COMPLETED'", 500)

        assert dispatcher._intake._deaf
    assert len(arrivals.at) == 500


@pytest.mark.parametrize("gap", [0.001, 0.02, 0.05, 0.1, 0.2])
async def test_a_wake_up_that_crosses_with_falling_asleep(dsn, outbox: Outbox, table: Table, gap: float):
    arrivals = Arrivals(outbox)
    async with dispatching(outbox, dsn, poll=60):
        await asleep(table)
        latencies = []
        for _ in range(10):
            latencies.append(await arrivals.latency(outbox, table))
            await asyncio.sleep(gap)

    assert max(latencies) < 0.3


@pytest.mark.parametrize("interval", [0.0, 0.001])
async def test_no_notification_is_lost_while_the_listener_is_asked_whether_it_lives(
    dsn, table: Table, monkeypatch, interval: float
):
    """It comes with the answer, behind it, or between the two: each way is another reader's."""
    monkeypatch.setattr(wakeup, "CHECK_INTERVAL", interval)
    came = asyncio.Event()
    up = asyncio.Event()
    listening = asyncio.create_task(
        wakeup.listen(
            dsn,
            schema="pulse",
            wake=lambda _: came.set(),
            connected=lambda is_up: up.set() if is_up else None,
        )
    )
    try:
        async with asyncio.timeout(20):
            await up.wait()
            for _ in range(300):
                came.clear()
                await table.execute("select pg_notify('pulse_outbox_wake', '')")
                await came.wait()
    finally:
        listening.cancel()
        await asyncio.wait({listening})


def test_commits_are_counted_and_not_the_topics_that_they_name():
    """A transaction of sixty topics makes no more noise than one of a single topic."""
    assert commits_of([]) == 0
    assert commits_of(heard(*map(str, range(60)))) == 1
    assert commits_of(heard("a", "a", "a")) == 3, "one commit names no topic twice"
    assert commits_of([Heard("a", 1), Heard("b", 2), Heard("c", 2), Heard("a", 1)]) == 3


@pytest.mark.parametrize("encoding", ["latin1", "utf8"])
async def test_topics_are_heard_whatever_encoding_the_application_wants(
    dsn, outbox: Outbox, table: Table, encoding: str
):
    """Also those that this encoding could not hold and that only others serve."""
    arrivals = Arrivals(outbox, "zahlung.ausgeführt")
    async with dispatching(outbox, make_conninfo(dsn, client_encoding=encoding), poll=60):
        await arrivals.latency(outbox, table, "zahlung.ausgeführt")
        await asleep(table)
        await table.execute("select pg_notify('pulse_outbox_wake', '支付')")

        assert await arrivals.latency(outbox, table, "zahlung.ausgeführt") < 1


async def test_events_that_never_run_here_force_no_listings(dsn, outbox: Outbox, table: Table, monkeypatch):
    """Their topics stay unknown: where listings are costly, or all slots are busy, each would cost one."""
    listings = 0
    ask = intake.Intake._ask_for_lanes

    def counting(self):
        nonlocal listings
        listings += 1
        return ask(self)

    monkeypatch.setattr(intake.Intake, "_ask_for_lanes", counting)
    end, begun = asyncio.Event(), asyncio.Event()

    @outbox.handler("busy")
    async def busy(event: Event) -> None:
        begun.set()
        await end.wait()

    @outbox.handler("unknown")
    async def unknown(event: Event) -> None: ...

    async with dispatching(outbox, dsn, poll=60, concurrency=1) as dispatcher:
        await table.enqueue(outbox, "busy")
        async with asyncio.timeout(10):
            await begun.wait()

        async def waits_for_room() -> bool:
            return dispatcher._intake._needs_room

        await wait_until_async(waits_for_room)
        before = listings
        for _ in range(50):
            dispatcher._intake.wake(heard("unknown"))
            await asyncio.sleep(0.002)
        full = listings - before
        end.set()
        await table.until("status = 'COMPLETED'", 1)
        await asleep(table)
        claims = dispatcher._intake
        claims._looks.are_costly = True
        claims._looks._listed_at = time.monotonic()
        claims._is_asleep = True
        claims.wake(heard("unknown"))
        costly = claims._looks._listed_at

    assert full <= 1
    assert costly > 0, "no listing is forced"
