"""The end of a process: by signal, by force, by nobody's leave."""

from __future__ import annotations

import asyncio
import signal
import time

import psycopg
import pytest

from pulse_outbox import Dispatcher, Event, NewEvent, Outbox, RetryPolicy
from tests.support.dispatching import QUICK, Table, dispatching, drain
from tests.support.proxy import proxied
from tests.support.waiting import wait_until, wait_until_async
from tests.support.worker import outbox as theirs
from tests.support.worker import working


def rows(dsn: str, condition: str = "true") -> list[tuple]:
    with psycopg.connect(dsn) as conn:
        return conn.execute(
            f"select event_id::text, status::text, attempts, lapses, lease_seq from pulse.outbox where {condition}"
        ).fetchall()


def enqueue(dsn: str, *events: NewEvent) -> None:
    with psycopg.connect(dsn) as conn:
        theirs.enqueue_many(conn, events)


@pytest.mark.parametrize("topic", ["sleeps in a thread", "once"])
def test_sigterm_in_mid_batch(dsn, topic: str):
    """FAULTS 34: what runs finishes, under heartbeats; what has not started has lost no attempt."""
    enqueue(dsn, *[NewEvent(topic, {"seconds": 1}) for _ in range(30)])
    with working(dsn, concurrency=4) as worker:
        for _ in range(4):
            worker.next()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
        started = worker.started()

    found = rows(dsn)
    assert len(started) == 4
    assert {row[0] for row in found if row[1] == "COMPLETED"} == started
    assert all(row[2:4] == (1, 0) for row in found if row[1] == "COMPLETED")
    assert all(row[1:4] == ("PENDING", 0, 0) for row in found if row[0] not in started)
    assert "Traceback" not in worker.text


def test_sigterm_under_full_load(dsn):
    """Thousands of short jobs, claimed ahead: whatever was not started is as it was."""
    enqueue(dsn, *[NewEvent("sleeps", {"seconds": 0.002}) for _ in range(6000)])
    with working(dsn, concurrency=50) as worker:
        for _ in range(500):
            worker.next()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
        started = worker.started()

    found = rows(dsn)
    assert 200 < len(started) < 6000, "control: the signal came in the middle"
    assert {row[0] for row in found if row[1] == "COMPLETED"} == started
    assert {row[1:4] for row in found if row[0] not in started} == {("PENDING", 0, 0)}


def test_leases_are_kept_while_draining(dsn):
    """The grace is longer than a lease, and another dispatcher is watching."""
    enqueue(dsn, NewEvent("sleeps", {"seconds": 4}))
    with working(dsn, topics=["sleeps"]) as worker:
        worker.next()
        worker.process.send_signal(signal.SIGTERM)
        with working(dsn, topics=["sleeps"]) as other:
            assert worker.wait() == 0
            assert other.started() == set()

    assert [row[1:] for row in rows(dsn)] == [("COMPLETED", 1, 0, 1)]


def test_a_second_signal_ends_at_once(dsn):
    enqueue(dsn, NewEvent("sleeps", {"seconds": 60}))
    with working(dsn, grace=60) as worker:
        worker.next()
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "outbox.stopping" in worker.text)
        started = time.monotonic()
        worker.process.send_signal(signal.SIGINT)
        assert worker.wait() == 1
        assert time.monotonic() - started < 2


@pytest.mark.parametrize("topic", ["ignores cancellation", "sleeps in a thread", "leaks a task"])
def test_what_cannot_be_stopped_does_not_keep_the_process(dsn, topic: str):
    """FAULTS 24: the drain has a deadline, then the process ends by force."""
    enqueue(dsn, NewEvent(topic, {"seconds": 600}))
    with working(dsn, grace=0.5) as worker:
        worker.next()
        started = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        worker.wait(within=20)
        took = time.monotonic() - started

    assert took < 12, worker.text
    [(_, status, *_)] = rows(dsn)
    assert status == ("COMPLETED" if topic == "leaks a task" else "RUNNING"), "a lease that will run out"


def test_sigkill_costs_a_lease_and_a_tick(dsn):
    """FAULTS 1: a living dispatcher has the job back within lease + one watchdog tick, and some."""
    enqueue(dsn, NewEvent("sleeps", {"seconds": 60}), NewEvent("sleeps", {"seconds": 60}))
    with working(dsn, topics=["leaks a task"]) as watching, working(dsn) as worker:
        worker.next()
        worker.process.kill()
        killed = time.monotonic()
        wait_until(lambda: len(rows(dsn, "status = 'RETRYING' and claim_token is null")) == 2, within=10)
        took = time.monotonic() - killed
        assert watching.process.poll() is None

    assert took < QUICK["lease"] + 2 * QUICK["watchdog"] + 1
    assert {row[1:4] for row in rows(dsn)} == {("RETRYING", 0, 1)}, "in company: the attempt comes back"


def test_sigkill_between_the_effect_and_its_result(dsn):
    """FAULTS 2: it runs again with the same idempotency key, and the record of what was handled makes it one effect."""
    with psycopg.connect(dsn) as conn:
        conn.execute("create table public.effect (idempotency_key text)")
    enqueue(dsn, NewEvent("dies after its effect", {}))
    with working(dsn) as worker:
        worker.next()
        assert worker.wait() == -signal.SIGKILL
    with working(dsn) as again:
        assert again.next()["seq"] == 2
        wait_until(lambda: rows(dsn)[0][1] == "COMPLETED")
    with psycopg.connect(dsn) as conn:
        effects = conn.execute("select idempotency_key from public.effect").fetchall()

    assert effects == [(rows(dsn)[0][0],)]


def test_the_only_dispatcher_killed_and_started_again(dsn):
    """Nobody swept meanwhile: the first sweep holds off for a lease, the one after that reaps."""
    enqueue(dsn, NewEvent("sleeps", {"seconds": 0.1}))
    with working(dsn) as worker:
        worker.next()
        worker.process.kill()
        worker.wait()
    time_of_death = time.monotonic()
    with working(dsn) as again:
        again.next()
        took = time.monotonic() - time_of_death
        wait_until(lambda: rows(dsn)[0][1] == "COMPLETED")

    assert took < 2 * QUICK["lease"] + 2 * QUICK["watchdog"] + 2.5, "start of Python included"


def test_stopped_past_its_lease_and_continued(dsn):
    """SIGSTOP, another runs its jobs, SIGCONT: nothing stale is written, nothing that waited starts."""
    enqueue(dsn, *[NewEvent("sleeps", {"seconds": 0.3}) for _ in range(40)])
    with working(dsn, concurrency=4) as worker:
        for _ in range(8):
            worker.next()
        wait_until(lambda: len(rows(dsn, "status = 'COMPLETED'")) >= 4)
        worker.process.send_signal(signal.SIGSTOP)
        with working(dsn, concurrency=40) as other:
            wait_until(lambda: not rows(dsn, "status = 'PENDING'"), within=15)
            wait_until(lambda: all(row[1] == "COMPLETED" for row in rows(dsn)), within=20)
            settled = rows(dsn)
            worker.process.send_signal(signal.SIGCONT)
            wait_until(lambda: "outbox.lease_lost" in worker.text or worker.process.poll() is not None)
            worker.process.send_signal(signal.SIGTERM)
            assert worker.wait() == 0
            theirs_ran = other.started()
            mine = worker.started()

    assert sorted(rows(dsn)) == sorted(settled), "no stale write was accepted"
    assert len(mine & theirs_ran) <= 4, "only what ran when it was stopped ran twice"


def test_exit_in_a_task_of_a_handler_is_that_attempt_alone(dsn):
    """asyncio lets SystemExit out of any task end the loop; here it is one failed attempt."""
    enqueue(dsn, NewEvent("exits in a task", {}))
    with working(dsn) as worker:
        wait_until(lambda: rows(dsn, "status = 'DEAD_LETTERED'"), within=10)
        enqueue(dsn, NewEvent("sleeps", {"seconds": 0}))
        worker.next()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0


async def test_a_claim_under_way_when_it_is_told_to_stop(dsn, outbox: Outbox, table: Table):
    """Its rows come too late to be run: they go back with their attempt, a budget of one does not die."""
    runs = []

    @outbox.handler("job", retry=RetryPolicy(max_attempts=1))
    async def job(event: Event) -> None:
        runs.append(event.id)

    # A claim that takes a second on the server.
    await table.execute(
        """
        create function public.slow() returns trigger language plpgsql as $$
        begin if new.status = 'RUNNING' then perform pg_sleep(1); end if; return new; end $$;
        create trigger slow before update on pulse.outbox for each row execute function public.slow();
        """
    )
    event_id = await table.enqueue(outbox, "job")
    async with dispatching(outbox, dsn, concurrency=4, lease=6, heartbeat=2) as dispatcher:

        async def claims() -> bool:
            return hasattr(dispatcher, "_intake") and bool(dispatcher._intake._calls)

        await wait_until_async(claims)
        dispatcher.stop()
    row = await table.row(event_id)

    assert runs == []
    assert (row.status, row.attempts, row.lapses) == ("PENDING", 0, 0)


async def test_what_was_claimed_ahead_goes_back_before_a_slot_is_free(dsn, outbox: Outbox, table: Table):
    """Slots that fall free while draining start nothing of what waited when the stop came."""
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

        async def slots_are_full_and_more_waits() -> bool:
            return started == 310 and dispatcher._slots.waiting > 0

        await wait_until_async(slots_are_full_and_more_waits)
        dispatcher.stop()

        async def stopping() -> bool:
            return bool(dispatcher._intake._holds)

        await wait_until_async(stopping)
        gate.set()

    assert started == 310
    assert await table.count("status = 'COMPLETED' and attempts = 1") == 310
    assert await table.count("status = 'PENDING' and attempts = 0") == 1690


async def test_stopping_while_a_suspect_runs(dsn, outbox: Outbox, table: Table):
    """The suspect's end must not open the gates that the stop has closed."""
    started = []

    @outbox.handler("job")
    async def job(event: Event[dict]) -> None:
        started.append(event.payload["name"])
        await asyncio.sleep(0.5)

    await table.enqueue(outbox, "job", {"name": "suspect"})
    await table.execute("update pulse.outbox set lapses = 1")
    async with dispatching(outbox, dsn, concurrency=2) as dispatcher:

        async def runs() -> bool:
            return bool(started)

        await wait_until_async(runs)
        await table.enqueue_many(outbox, [NewEvent("job", {"name": "other"}) for _ in range(20)])
        dispatcher.stop()

    assert started == ["suspect"]
    assert await table.count("status = 'PENDING' and attempts = 0") == 20
    assert await table.count("status = 'COMPLETED'") == 1


async def test_burst_stays_for_what_its_own_jobs_make_due(dsn, outbox: Outbox, table: Table):
    """The next event of a key, and an event that a handler has enqueued, are due when their predecessor has ended."""
    done = []

    @outbox.handler("first", transactional=True)
    async def first(event: Event[int]) -> None:
        done.append(event.payload)
        if event.payload == 1:
            await outbox.enqueue_async(event.connection, "second", 2)

    @outbox.handler("second")
    async def second(event: Event[int]) -> None:
        done.append(event.payload)

    for _ in range(4):  # whoever looks too early is not always caught
        done.clear()
        await table.enqueue(outbox, "first", 1)
        await drain(outbox, dsn)
        await table.enqueue(outbox, "first", 3, ordering_key="k")
        await table.enqueue(outbox, "second", 4, ordering_key="k")
        await drain(outbox, dsn)

        assert done == [1, 2, 3, 4]


async def test_burst_ends_when_nothing_is_due(dsn, outbox: Outbox, table: Table):
    """Retries that fall due later do not keep it; what is due does, however many claims it takes."""
    done = []

    @outbox.handler("job", concurrency=2)
    async def job(event: Event[dict]) -> None:
        done.append(event.id)
        if event.payload.get("fails"):
            raise ValueError("later")

    @outbox.handler("fails", retry=RetryPolicy(base_delay=3600, jitter="none"))
    async def fails(event: Event) -> None:
        raise ValueError("in an hour")

    await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(100)])
    await table.enqueue(outbox, "fails")
    await table.enqueue(outbox, "job", delay=3600)
    await drain(outbox, dsn)

    assert len(done) == 100
    assert await table.count("status = 'COMPLETED'") == 100
    assert await table.count("status = 'RETRYING'") == 1
    assert await table.count("status = 'PENDING'") == 1
    assert await table.execute("select * from pulse.dispatcher") == []


async def test_a_hung_server_does_not_keep_the_process(dsn, outbox: Outbox, table: Table):
    """FAULTS 12: packets vanish, and SIGTERM still ends it; the job comes back when its lease has run out."""
    async with proxied(dsn) as proxy:
        enqueue(dsn, NewEvent("sleeps", {"seconds": 1}))
        with working(proxy.dsn, grace=1) as worker:
            await asyncio.to_thread(worker.next)
            proxy.frozen = True
            started = time.monotonic()
            worker.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(worker.wait, 40)
            took = time.monotonic() - started

    assert took < 25, worker.text


async def test_told_to_stop_while_it_can_not_start(dsn):
    """A database that does not answer at the start keeps nobody from ending the process."""
    async with proxied(dsn) as proxy:
        proxy.frozen = True
        with working(proxy.dsn) as worker:
            await asyncio.to_thread(wait_until, lambda: len(proxy._starts) > 0, within=15)
            worker.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(worker.wait, 15)

    assert "AttributeError" not in worker.text


@pytest.mark.parametrize("signals", [1, 2])
def test_a_blocked_loop_does_not_keep_the_process(dsn, signals: int):
    """Signals are not the event loop's business: a handler may have stopped it for good."""
    enqueue(dsn, NewEvent("blocks the loop", {"seconds": 60}))
    with working(dsn, grace=0.5) as worker:
        worker.next()
        for _ in range(signals):
            worker.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)  # two signals at once are one

        assert worker.wait(within=15 if signals == 1 else 3) == 1


async def test_an_obedient_handler_goes_back_when_the_grace_is_over(dsn, outbox: Outbox, table: Table):
    """A deploy in the middle of a long job must not make a suspect of it."""

    @outbox.handler("long")
    async def long(event: Event) -> None:
        await asyncio.sleep(60)

    await table.enqueue(outbox, "long")
    async with dispatching(outbox, dsn, grace=0.2):
        await table.until("status = 'RUNNING'", 1)

    assert await table.count("status = 'PENDING' and attempts = 0 and lapses = 0") == 1


async def test_cancelled_it_gives_back_what_it_holds(dsn, outbox: Outbox, table: Table):
    """As a task group or a web application's shutdown does it: nothing is left to lapse, whatever its budget."""

    @outbox.handler("job")
    async def waits(event: Event) -> None:
        await asyncio.sleep(600)

    await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(5)])
    running = asyncio.create_task(Dispatcher(outbox, dsn=dsn, **QUICK, concurrency=2).run_async())
    await table.until("status = 'RUNNING'", 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert await table.count("status = 'PENDING' and attempts = 0 and lapses = 0") == 5
    assert await table.execute("select 1 from pulse.dispatcher") == []
