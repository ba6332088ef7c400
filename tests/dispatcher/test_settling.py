"""Results: kept until the database accepts or refuses them, and no row holds up another."""

from __future__ import annotations

import asyncio

import pytest

from pulse_outbox import Event, NewEvent, Outbox, RetryPolicy
from pulse_outbox.dispatcher import settling
from tests.support.dispatching import Table, dispatching
from tests.support.proxy import proxied
from tests.support.waiting import wait_until_async

REFUSING = """
create function public.refuse() returns trigger language plpgsql as $$
begin
  if new.status <> 'RUNNING' then
    raise exception 'on purpose' using errcode = '{}';
  end if;
  return new;
end $$;
create trigger refuse before update on pulse.outbox for each row execute function public.refuse();
"""


@pytest.mark.parametrize(
    "sqlstate",
    [
        "53100",  # disk full
        "25006",  # read-only after a failover
        "40001",
        "40P01",
        "57014",  # cancelled by an administrator, or statement_timeout
        "XX000",  # internal error
        "42501",  # rights missing for a moment
        "42883",  # a function missing, as during a restore
        "58030",  # I/O error
    ],
)
async def test_a_result_that_cannot_be_stored_now_is_kept(dsn, outbox: Outbox, table: Table, sqlstate: str):
    """FAULTS 14: back off and go on, no attempt burnt, no second run; its lease is kept meanwhile."""
    runs = []

    @outbox.handler("job", retry=RetryPolicy(max_attempts=2, base_delay=0.01, max_delay=0.01))
    async def job(event: Event[dict]) -> None:
        runs.append(event.payload["name"])
        if event.payload["name"] == "fails":
            raise ValueError

    await table.execute(REFUSING.format(sqlstate))
    await table.enqueue(outbox, "job", {"name": "succeeds"})
    await table.enqueue(outbox, "job", {"name": "fails"})
    async with dispatching(outbox, dsn) as dispatcher:

        async def complains() -> bool:
            return "settle" in dispatcher._condition.complaints

        await wait_until_async(complains)
        assert sorted(runs) == ["fails", "succeeds"]
        assert dispatcher._is_ready() != []
        await table.execute("drop trigger refuse on pulse.outbox")
        await table.until("status = 'COMPLETED'", 1)
        await table.until("status = 'DEAD_LETTERED'", 1)

        async def well() -> bool:
            return dispatcher._is_ready() == []

        await wait_until_async(well)

    assert sorted(runs) == ["fails", "fails", "succeeds"]
    assert await table.count("lapses > 0") == 0


async def test_only_what_the_database_refuses_for_good_is_given_up(dsn, outbox: Outbox, table: Table):
    """One row that can't be written (here by a constraint of somebody's own) harms no other of its batch."""
    outbox.handler("job")(lambda event: None)
    ids = await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(20)])
    await table.execute(
        f"alter table pulse.outbox add constraint odd check (event_id <> '{ids[7]}' or status <> 'COMPLETED')"
    )
    async with dispatching(outbox, dsn):
        await table.until("status = 'COMPLETED'", 19)


async def test_a_locked_row_holds_up_no_other(dsn, outbox: Outbox, table: Table, connect):
    """FAULTS 41: an operator in an open transaction; his row settles when he is done, its lease kept."""
    gate = asyncio.Event()

    @outbox.handler("job")
    async def job(event: Event) -> None:
        await gate.wait()

    ids = await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(20)])
    async with dispatching(outbox, dsn):
        await table.until("status = 'RUNNING'", 20)
        operator = connect()
        operator.execute("select 1 from pulse.outbox where event_id = %s for update", (ids[3],))
        gate.set()
        await table.until("status = 'COMPLETED'", 19)
        assert (await table.row(ids[3])).status == "RUNNING"
        operator.rollback()
        row = await table.until_status(ids[3], "COMPLETED")

    assert (row.attempts, row.lapses) == (1, 0)


async def test_results_that_come_in_handfuls_wait_for_each_other(
    dsn, outbox: Outbox, table: Table, monkeypatch
):
    """Each write is a commit: one for every few jobs would cost more than the jobs."""
    gates = [asyncio.Event() for _ in range(60)]
    monkeypatch.setattr(settling, "GATHER", 0.3)

    @outbox.handler("job")
    async def job(event: Event[dict]) -> None:
        await gates[event.payload["n"]].wait()

    await table.enqueue_many(outbox, [NewEvent("job", {"n": n}) for n in range(len(gates))])
    async with dispatching(outbox, dsn):
        await table.until("status = 'RUNNING'", len(gates))
        for gate in gates[:20]:
            gate.set()
        await table.until("status = 'COMPLETED'", 20)
        for gate in gates[20:]:
            gate.set()
            await asyncio.sleep(0.001)  # one after the other
        await table.until("status = 'COMPLETED'", len(gates))

    [writes] = await table.execute("select count(distinct xmin::text)::int from pulse.outbox")
    assert writes == (2,)


async def test_a_few_results_wait_for_nobody(dsn, outbox: Outbox, table: Table, monkeypatch):
    monkeypatch.setattr(settling, "GATHER", 60)
    outbox.handler("job")(lambda event: None)

    async with dispatching(outbox, dsn):
        for number in range(1, 4):
            await table.enqueue_many(outbox, [NewEvent("job", {}) for _ in range(settling.HANDFUL - 1)])
            await table.until("status = 'COMPLETED'", number * (settling.HANDFUL - 1))


@pytest.mark.parametrize("function", ["outbox_complete", "outbox_fail", "outbox_snooze", "outbox_release"])
async def test_an_answer_that_is_lost_on_its_way(dsn, outbox: Outbox, table: Table, function: str):
    """FAULTS 8: the retry finds its own result and calls it success."""
    from pulse_outbox import RetryLater

    release = asyncio.Event()

    @outbox.handler("job", retry=RetryPolicy(max_attempts=2, base_delay=3600, jitter="none"))
    async def job(event: Event) -> None:
        await release.wait()
        if function == "outbox_fail":
            raise ValueError
        if function == "outbox_snooze":
            raise RetryLater(3600)

    await table.enqueue(outbox, "job")
    async with proxied(dsn) as proxy, dispatching(outbox, proxy.dsn, concurrency=1) as dispatcher:

        async def running() -> bool:
            return len(dispatcher._in_flight) == 1

        await wait_until_async(running)
        proxy.lose_answer_to = function.encode()
        if function == "outbox_release":
            # Something that waits is given back when its topic is paused.
            job_in_flight = dispatcher._in_flight.snapshot()[0]
            from pulse_outbox.dispatcher.jobs import Job, Released

            dispatcher._settler.add(
                Released(Job(job_in_flight.claim, job_in_flight.handler, job_in_flight.claimed_at))
            )
            await table.execute("select pulse.outbox_pause(null, 'test', 'test')")
            await table.until("status = 'PENDING'", 1)

            async def known() -> bool:
                return dispatcher._tally.released == 1

            await wait_until_async(known)
            assert dispatcher._tally.lost == 0
            release.set()
        else:
            release.set()

            async def settled() -> bool:
                return len(dispatcher._in_flight) == 0

            await wait_until_async(settled)
            assert dispatcher._tally.lost == 0
            assert dispatcher._tally.completed + dispatcher._tally.retried + dispatcher._tally.snoozed == 1
        assert proxy.lost_answers == 1

    [row] = await table.execute("select * from pulse.outbox")
    expected = {
        "outbox_complete": ("COMPLETED", 1),
        "outbox_fail": ("RETRYING", 1),
        "outbox_snooze": ("RETRYING", 0),
        "outbox_release": ("PENDING", 0),
    }
    assert (row.status, row.attempts) == expected[function]


@pytest.fixture
def break_the_log():
    """From the call on every log line raises, as when whoever read them has gone."""
    import structlog

    before = structlog.get_config()

    def broken(*arguments: object) -> str:
        raise BrokenPipeError

    yield lambda: structlog.configure(processors=[broken])
    structlog.configure(**before)


async def test_a_log_that_cannot_be_written_stops_nothing(dsn, outbox: Outbox, table: Table, break_the_log):
    """`… 2>&1 | head` closes the pipe: results are stored, leases kept, lost connections made again."""

    @outbox.handler("fails", retry=RetryPolicy(max_attempts=1))
    async def fails(event: Event) -> None:
        raise ValueError

    @outbox.handler("long")
    async def long(event: Event) -> None:
        await asyncio.sleep(4)

    await table.enqueue(outbox, "long")
    async with dispatching(outbox, dsn) as dispatcher:
        await table.until("status = 'RUNNING'", 1)
        break_the_log()
        await table.enqueue_many(outbox, [NewEvent("fails", {}) for _ in range(5)])
        await table.until("status = 'DEAD_LETTERED'", 5)
        # Every loop has something to complain about.
        await table.execute("alter schema pulse rename to elsewhere")
        await asyncio.sleep(0.7)
        await table.execute("alter schema elsewhere rename to pulse")
        await table.enqueue_many(outbox, [NewEvent("fails", {}) for _ in range(5)])
        await table.until("status = 'DEAD_LETTERED'", 10)
        await table.until("status = 'COMPLETED'", 1)
        assert not [name for name, task in dispatcher._tasks.items() if task.done()]

    assert await table.count("lapses > 0 or attempts > 1") == 0
