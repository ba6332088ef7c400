"""Leases: kept while the process lives, whatever its loop does; worthless once somebody else has them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from uuid import uuid4

import pytest
import structlog

from pulse_outbox import Dispatcher, Event, NewEvent, Outbox, RetryPolicy
from pulse_outbox.dispatcher.jobs import Asked
from tests.support.dispatching import Table, dispatching
from tests.support.proxy import proxied
from tests.support.waiting import wait_until, wait_until_async

TAKEN_AWAY = """
update pulse.outbox
   set status = 'PENDING', lease_until = null, locked_by = null, claim_token = null, next_run_at = clock_timestamp()
 where event_id = %s
"""


async def test_an_async_handler_may_block_the_loop_for_three_leases(dsn, outbox: Outbox, table: Table):
    """FAULTS 23: one run, the lease kept by the heart's own thread, although another dispatcher is watching."""
    runs = []
    other = Outbox()
    other.handler("blocks")(lambda event: runs.append("elsewhere"))

    with contextlib.ExitStack() as elsewhere:

        @outbox.handler("blocks")
        async def blocks(event: Event) -> None:
            runs.append("here")
            elsewhere.enter_context(_Elsewhere(other, dsn))  # not before: it would take the event
            time.sleep(4.5)

        event_id = await table.enqueue(outbox, "blocks")
        async with dispatching(outbox, dsn):
            row = await table.until_status(event_id, "COMPLETED", within=20)

    assert runs == ["here"]
    assert (row.attempts, row.lapses, row.lease_seq) == (1, 0, 1)


async def test_a_long_handler_keeps_its_lease(dsn, outbox: Outbox, table: Table):
    """FAULTS 23 and 28: it may run for many leases, a sync one also in C; here for three."""
    runs = []

    @outbox.handler("sync")
    def sync(event: Event) -> None:
        runs.append((event.topic, event.attempt))
        ctypes.CDLL(None).usleep(4_500_000)

    @outbox.handler("async")
    async def asynchronous(event: Event) -> None:
        runs.append((event.topic, event.attempt))
        await asyncio.sleep(4.5)

    ids = [await table.enqueue(outbox, topic) for topic in ("sync", "async")]
    async with dispatching(outbox, dsn), dispatching(outbox, dsn):
        rows = [await table.until_status(event_id, "COMPLETED", within=20) for event_id in ids]

    assert sorted(runs) == [("async", 1), ("sync", 1)]
    assert [(row.attempts, row.lapses, row.lease_seq) for row in rows] == [(1, 0, 1)] * 2


async def test_a_deadlocked_loop_gives_back_what_has_not_started(dsn, outbox: Outbox, table: Table):
    """And the loop, once it wakes, does not start what is no longer its own."""
    runs: list[str] = []
    elsewhere: list[str] = []
    blockers: list[str] = []
    dispatchers: list[Dispatcher] = []
    gate = threading.Event()

    @outbox.handler("job")
    async def job(event: Event[dict]) -> None:
        runs.append(event.payload["name"])
        if not blockers and dispatchers and dispatchers[0]._slots.waiting:
            blockers.append(event.payload["name"])
            gate.wait(20)

    other = Outbox()
    other.handler("job")(lambda event: elsewhere.append(event.payload["name"]))

    async with dispatching(outbox, dsn, concurrency=1) as dispatcher:
        dispatchers.append(dispatcher)
        # So many quick jobs that the dispatcher claims ahead; the first one behind which others wait blocks.
        events = [NewEvent("job", {"name": str(number)}) for number in range(401)]
        await table.enqueue_many(outbox, events)
        watcher = _Watcher(dsn)
        blocked = asyncio.get_running_loop().run_in_executor(None, watcher.until_released, gate)
        released = await blocked
        with _Elsewhere(other, dsn):
            await table.until("status = 'COMPLETED'", 401)

    assert released, "control: something had been claimed ahead of the blocker"
    assert [runs.count(name) for name in blockers] == [1]
    both = runs + elsewhere
    assert sorted(both) == sorted(event.payload["name"] for event in events)  # type: ignore[index]
    assert await table.count("attempts <> 1 or lapses <> 0") == 0
    assert len(dispatcher._in_flight) == 0


@pytest.mark.parametrize("leases", [0.8, 2.5])
async def test_a_claim_that_a_blocked_loop_does_not_read_is_kept(
    dsn, outbox: Outbox, table: Table, leases: float
):
    """Its answer came while a handler blocked the loop: a budget of one would be spent without a run."""
    await table.execute(
        """
        create function public.slow() returns trigger language plpgsql as $$
        begin perform pg_sleep(0.5); return new; end $$;
        create trigger slow before update on pulse.outbox for each row
          when (new.topic = 'victim' and new.status = 'RUNNING' and old.status = 'PENDING')
          execute function public.slow();
        """
    )
    victims: list[int] = []
    outbox.handler("victim", retry=RetryPolicy(max_attempts=1))(lambda event: victims.append(event.attempt))

    async def claim_is_under_way(query: str) -> bool:
        [(count,)] = await table.execute(query)
        return bool(count)

    @outbox.handler("blocks")
    async def blocks(event: Event) -> None:
        await table.enqueue(outbox, "victim")
        query = "select count(*) from pg_stat_activity where wait_event = 'PgSleep' and query like '%%outbox_claim%%'"
        await wait_until_async(lambda: claim_is_under_way(query))
        time.sleep(leases * 1.5)

    await table.enqueue(outbox, "blocks")
    other = Outbox()
    other.handler("nothing")(lambda event: None)
    with _Elsewhere(other, dsn):  # a watchdog that is awake
        async with dispatching(outbox, dsn):
            await table.until("status = 'COMPLETED'", 2, within=20)

    assert victims == [1]
    assert await table.count("lapses <> 0") == 0


def test_a_claim_is_read_or_withdrawn_but_never_both():
    """The heart takes its time between a look at the loop and giving back: meanwhile the loop may have gone on."""
    asked = Asked()
    read, withdrawn = uuid4(), uuid4()
    asked.ask(read)
    asked.ask(withdrawn)

    assert asked.answered(read)
    assert not asked.withdraw(read)
    assert asked.withdraw(withdrawn)
    asked.ask(withdrawn)  # sent once more, because its answer was lost
    assert asked.withdraw(withdrawn)
    assert not asked.answered(withdrawn)
    assert asked.unanswered() == []


class _Watcher:
    """Looks at the table from a thread, while the test's own loop stands still."""

    def __init__(self, dsn: str) -> None:
        import psycopg

        self._conn = psycopg.connect(dsn, autocommit=True)

    def until_released(self, gate: threading.Event) -> int:
        """Opens the gate when something was given back; how many."""
        try:

            def released() -> int:
                [(count,)] = self._conn.execute(
                    "select count(*) from pulse.outbox where status = 'PENDING' and lease_seq = 1 and attempts = 0"
                ).fetchall()
                return int(count)

            return wait_until(released, within=15)
        finally:
            gate.set()
            self._conn.close()


class _Elsewhere:
    """A dispatcher in a thread and a loop of its own, as if it were another process."""

    def __init__(self, outbox: Outbox, dsn: str) -> None:
        self._outbox, self._dsn = outbox, dsn
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        async with dispatching(self._outbox, self._dsn):
            await asyncio.to_thread(self._stop.wait)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(20)


async def test_an_old_run_cannot_settle_or_extend_a_new_claim(dsn, outbox: Outbox, table: Table):
    """FAULTS 6: the same process claims its own job again while the old run goes on."""
    runs: list[int] = []
    gates = [asyncio.Event(), asyncio.Event()]

    @outbox.handler("job", retry=RetryPolicy(max_attempts=9))
    async def job(event: Event) -> None:
        runs.append(event.lease_seq)
        await gates[event.lease_seq - 1].wait()

    event_id = await table.enqueue(outbox, "job")

    async def started(number: int) -> None:
        async def reached() -> bool:
            return len(runs) == number

        await wait_until_async(reached)

    async with dispatching(outbox, dsn) as dispatcher:
        await started(1)
        await table.execute(TAKEN_AWAY, event_id)
        await started(2)
        before = await table.row(event_id)

        # Both runs are in flight; the heart extends the new lease and finds that the old one is lost.
        async def extended() -> bool:
            return bool((await table.row(event_id)).lease_until > before.lease_until)

        await wait_until_async(extended)
        gates[0].set()

        async def old_one_is_over() -> bool:
            return len(dispatcher._in_flight) == 1

        await wait_until_async(old_one_is_over)
        row = await table.row(event_id)
        assert (row.status, row.claim_token) == ("RUNNING", before.claim_token)
        gates[1].set()
        row = await table.until_status(event_id, "COMPLETED")

    assert runs == [1, 2]
    assert row.claim_token == before.claim_token
    assert dispatcher._tally.lost == 1


async def test_a_stale_result_does_not_touch_a_replayed_event(dsn, outbox: Outbox, table: Table):
    """FAULTS 7: after a replay attempts start again at 0, and the old run's result still matches nothing."""
    gate = asyncio.Event()
    started = asyncio.Event()

    @outbox.handler("job")
    async def job(event: Event) -> None:
        started.set()
        await gate.wait()

    event_id = await table.enqueue(outbox, "job")
    async with dispatching(outbox, dsn) as dispatcher:
        await started.wait()
        await table.execute(
            "update pulse.outbox set status = 'DEAD_LETTERED', completed_at = now(), "
            "lease_until = null, locked_by = null"
        )
        await table.execute("select pulse.outbox_pause(null, 'so that nobody claims it', 'test')")
        await table.execute("select pulse.outbox_replay(%s, 0, 'somebody')", event_id)
        gate.set()

        async def refused() -> bool:
            return dispatcher._tally.lost == 1

        await wait_until_async(refused)

    row = await table.row(event_id)
    assert (row.status, row.attempts, row.claim_token) == ("PENDING", 0, None)


async def test_a_hung_heartbeat_connection_loses_no_lease(dsn, outbox: Outbox, table: Table):
    """FAULTS 12 and 13: the heart gives a silent connection up while there is time for another try."""
    runs = []

    @outbox.handler("long")
    async def long(event: Event) -> None:
        runs.append(event.attempt)
        await asyncio.sleep(6)

    watching = Outbox()
    watching.handler("something else")(lambda event: None)
    event_id = await table.enqueue(outbox, "long")
    times = {"lease": 3, "heartbeat": 1, "watchdog": 1}
    async with (
        proxied(dsn) as proxy,
        dispatching(outbox, proxy.dsn, **times),
        dispatching(watching, dsn, **times),
    ):
        await table.until("status = 'RUNNING' and lease_until > created_at + interval '3.5 seconds'", 1)
        assert proxy.freeze("pulse-outbox heart") == 1
        row = await table.until_status(event_id, "COMPLETED", within=15)

    assert runs == [1]
    assert (row.attempts, row.lapses, row.lease_seq) == (1, 0, 1)


async def test_a_lease_that_ran_out_unnoticed_is_not_run(dsn, outbox: Outbox, table: Table):
    """The claim's answer came after its lease: others may have run the job, so it is asked for, not started."""
    runs = []

    @outbox.handler("job")
    async def job(event: Event) -> None:
        runs.append(event.lease_seq)

    async with proxied(dsn) as proxy, dispatching(outbox, proxy.dsn) as dispatcher:
        proxy.lose_answer_to = b"outbox_claim"
        proxy.lose_only_rows = proxy.refuse_once_lost = True
        event_id = await table.enqueue(outbox, "job")

        async def lost() -> bool:
            return proxy.lost_answers == 1

        await wait_until_async(lost)
        row = await table.row(event_id)
        assert (row.status, row.attempts) == ("RUNNING", 1)

        # Somebody else reaps it and runs it, while this dispatcher can't reach the database.
        await table.execute(
            "update pulse.outbox set status = 'COMPLETED', completed_at = now(), lease_until = null, locked_by = null, "
            "claim_token = null"
        )
        proxy.refuse = False
        again = await table.enqueue(outbox, "job")
        await table.until_status(again, "COMPLETED")
        assert len(dispatcher._in_flight) == 0

    assert runs == [1], "only the second event ran here"


async def test_what_a_claim_took_does_not_lapse_while_its_answer_can_not_be_had(
    dsn, outbox: Outbox, table: Table
):
    """The answer is lost, and no connection can be made to ask for it again: the heart has one, and gives it back."""
    runs = []

    @outbox.handler("job")
    async def job(event: Event) -> None:
        runs.append(event.lease_seq)

    times = {"lease": 3, "heartbeat": 1, "watchdog": 1}
    async with proxied(dsn) as proxy, dispatching(outbox, proxy.dsn, **times):

        async def has_a_connection() -> bool:
            return bool(await table.execute("select 1 from pulse.dispatcher"))

        await wait_until_async(has_a_connection)
        proxy.lose_answer_to = b"outbox_claim"
        proxy.lose_only_rows = proxy.refuse_once_lost = True
        event_id = await table.enqueue(outbox, "job", max_attempts=1)

        async def lost() -> bool:
            return proxy.lost_answers == 1

        await wait_until_async(lost)
        await table.until("status = 'PENDING' and attempts = 0 and lease_seq = 1", 1, within=15)
        proxy.refuse = False
        row = await table.until_status(event_id, "COMPLETED", within=15)

    assert (row.attempts, row.lapses, len(runs)) == (1, 0, 1)


async def test_who_dies_of_a_lapsed_lease_is_logged_as_every_dead_letter(dsn, outbox: Outbox, table: Table):
    outbox.handler("job")(lambda event: None)
    event_id = await table.enqueue(outbox, "job", max_attempts=1)
    await table.execute(
        "select * from pulse.outbox_claim(gen_random_uuid(), 'gone', '{job}', 1, interval '0')"
    )
    with structlog.testing.capture_logs() as lines:
        async with dispatching(outbox, dsn) as dispatcher:
            await table.until_status(event_id, "DEAD_LETTERED")
            await wait_until_async(lambda: asyncio.sleep(0, result=dispatcher._tally.dead == 1))

    [died] = [line for line in lines if line["event"] == "outbox.dead_lettered"]
    assert (died["event_id"], died["topic"], died["rule"]) == (str(event_id), "job", "lease.expired")
    assert (died["attempt"], died["max_attempts"], died["error"]) == (1, 1, "worker lease expired")


async def test_a_stuck_suspect_stops_nobody_else(dsn, outbox: Outbox, table: Table):
    """Settled at its timeout, its thread goes on: the dispatcher must not wait for it with everything held."""
    release = threading.Event()

    @outbox.handler("stuck", timeout=0.3, retry=RetryPolicy(max_attempts=1))
    def stuck(event: Event) -> None:
        release.wait(30)

    @outbox.handler("other")
    async def other(event: Event) -> None:
        return None

    await table.enqueue(outbox, "stuck")
    await table.execute("update pulse.outbox set lapses = 1")
    try:
        async with dispatching(outbox, dsn):
            await table.until("topic = 'stuck' and status = 'DEAD_LETTERED'", 1)
            await table.enqueue(outbox, "other")
            await table.until("topic = 'other' and status = 'COMPLETED'", 1)
            release.set()
    finally:
        release.set()
