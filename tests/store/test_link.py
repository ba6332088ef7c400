"""One connection: made when needed, thrown away when lost, never waited for longer than a call may take."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from pulse_outbox import EventNotFound, NewEvent, Outbox, SchemaError, TransitionRefused, embedded, schema
from pulse_outbox.errors import BadArgument, SettingsError
from pulse_outbox.link import Link, _Line
from pulse_outbox.storage_retry import CallTimedOut, StorageRetries, StorageRetry
from pulse_outbox.store import Failure, Store
from tests.support.dispatching import Table
from tests.support.proxy import proxied
from tests.support.waiting import wait_until, wait_until_async

SOON = StorageRetries(storage=StorageRetry(first=0.01, cap=0.05), dequeue=StorageRetry(first=0.01, cap=0.05))


@pytest.fixture
async def table(dsn: str):
    table = Table(dsn)
    yield table
    await table.close()


@pytest.fixture
async def open_store(dsn: str):
    stores: list[Store] = []

    def open_one(to: str = dsn, *, call_timeout: float = 15, retries: StorageRetries = SOON) -> Store:
        store = Store(Link(to, call_timeout=timedelta(seconds=call_timeout)), retries=retries)
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        await store.close()


async def test_a_lost_connection_is_made_again(table: Table, open_store):
    store = open_store()
    await store.paused()
    await table.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where application_name = 'pulse-outbox' and datname = current_database()"
    )

    assert await store.paused() == frozenset()


async def test_without_retries_the_error_is_the_callers(dsn, table: Table, open_store):
    """Control for the test above: the off switch is one."""
    store = open_store(retries=StorageRetries.off())
    await store.paused()
    async with await psycopg.AsyncConnection.connect(dsn) as locking:
        await locking.execute("lock table pulse.pause")
        call = asyncio.create_task(store.paused())
        await until_waiting(table)
        await table.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where application_name = 'pulse-outbox' and datname = current_database()"
        )
        with pytest.raises(psycopg.OperationalError):
            await call

    assert await store.paused() == frozenset(), "and the next call has a new connection"


async def until_waiting(table: Table, calls: int = 1) -> None:
    """Until so many sessions of links wait for a lock."""

    async def wait() -> bool:
        waiting = await table.execute(
            "select 1 from pg_stat_activity where application_name = 'pulse-outbox' and wait_event_type = 'Lock' "
            "and datname = current_database()"
        )
        return len(waiting) == calls

    await wait_until_async(wait)


@pytest.mark.parametrize("function", ["claim", "complete", "fail", "snooze", "release", "heartbeat"])
async def test_a_lost_answer_counts_once(dsn, table: Table, open_store, function: str):
    """FAULTS 8 and 9: the server did it, nobody heard of it, the repeated call says what became of it."""
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    ids = [await table.enqueue(outbox, "job") for _ in range(3)]
    async with proxied(dsn) as proxy:
        store = open_store(proxy.dsn)
        await store.paused()
        if function == "claim":
            proxy.lose_answer_to = b"outbox_claim"
        claims = await store.claim(limit=10, topics=["job"])
        assert [claim.event_id for claim in claims] == ids
        answers: Any = None
        if function != "claim":
            proxy.lose_answer_to = f"outbox_{function}".encode()
        match function:
            case "complete":
                answers = await store.complete(claims)
            case "release":
                answers = await store.release(claims)
            case "heartbeat":
                answers = await store.heartbeat(claims, lease=timedelta(seconds=60))
            case "snooze":
                answers = await store.snooze(claims, [timedelta(hours=1)] * 3)
            case "fail":
                answers = await store.fail(
                    [
                        Failure(held=claim, error="x", failure={}, delay=timedelta(hours=1), terminal=False)
                        for claim in claims
                    ]
                )
        assert proxy.lost_answers == 1
        await store.close()

    assert answers == {"claim": None, "fail": dict.fromkeys(ids, "RETRYING")}.get(function, {})
    expected = {
        "claim": ("RUNNING", 1),
        "complete": ("COMPLETED", 1),
        "fail": ("RETRYING", 1),
        "snooze": ("RETRYING", 0),
        "release": ("PENDING", 0),
        "heartbeat": ("RUNNING", 1),
    }[function]
    assert {(row.status, row.attempts, row.lease_seq) for row in [await table.row(i) for i in ids]} == {
        (*expected, 1)
    }


async def test_a_lost_answer_of_a_prepared_statement(dsn, table: Table, open_store):
    """From the second call on only the statement's name is sent; a new connection does not know it."""
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    async with proxied(dsn) as proxy:
        store = open_store(proxy.dsn)
        for _ in range(6):
            assert await store.claim(limit=1, topics=["job"]) == []
        event_id = await table.enqueue(outbox, "job")
        proxy.lose_answer_to = b"outbox_claim"
        [claim] = await store.claim(limit=1, topics=["job"])
        await store.close()

    assert proxy.lost_answers == 1
    assert (claim.event_id, claim.attempts, claim.lease_seq) == (event_id, 1, 1)


async def test_a_call_is_sent_ahead(dsn, table: Table, open_store):
    """The server does it before anybody waits for the answer."""
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    event_id = await table.enqueue(outbox, "job")
    store = open_store()
    await store.paused()  # there is a connection
    claiming = store.claim(limit=1, topics=["job"])
    listing = store.lanes(["job"])
    claiming.send()
    listing.send()

    await table.until("status = 'RUNNING'", 1)
    [claim] = await claiming
    assert (claim.event_id, claim.attempts) == (event_id, 1)
    assert (await listing).lanes == []
    await store.close()


async def test_a_call_that_could_not_be_sent_ahead_is_sent_when_it_is_awaited(table: Table, open_store):
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    await table.enqueue(outbox, "job")
    store = open_store()
    claiming = store.claim(limit=1, topics=["job"])
    claiming.send()  # there is no connection yet

    assert await table.count("status = 'RUNNING'") == 0
    [claim] = await claiming
    assert (claim.attempts, claim.lease_seq) == (1, 1)
    await store.close()


@pytest.mark.parametrize("when", ["sent", "awaited"])
async def test_a_call_that_is_ready_outlives_its_connection(dsn, table: Table, open_store, when: str):
    """It was made before the dispatcher fell asleep, and the server may be another one when it is woken."""
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    await table.enqueue(outbox, "job")
    async with proxied(dsn) as proxy:
        store = open_store(proxy.dsn)
        await store.paused()
        claiming = store.claim(limit=1, topics=["job"])
        claiming.prepare()
        proxy.cut()

        async def is_noticed() -> bool:
            return bool(store._link._line.is_lost)

        await wait_until_async(is_noticed)
        if when == "sent":
            claiming.send()
        [claim] = await claiming
        assert (claim.attempts, claim.lease_seq) == (1, 1)
        await store.close()


async def test_calls_that_are_ready_do_not_disturb_each_other(table: Table, open_store):
    """What one was made of must not be what the next one is made with."""
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    event_id = await table.enqueue(outbox, "job")
    store = open_store()
    await store.paused()
    claiming, listing = store.claim(limit=1, topics=["job"]), store.lanes(["job"], [7])
    claiming.prepare()
    listing.prepare()
    assert await store.complete([]) == {}
    assert len((await store.lanes(["job"])).lanes) == 1
    claiming.send()
    listing.send()

    assert [claim.event_id for claim in await claiming] == [event_id]
    assert (await listing).lanes == []
    await store.close()


async def test_a_call_that_was_sent_is_not_sent_again(dsn, table: Table, open_store):
    """Not before somebody has waited for its answer: a second claim under the same token would be no first try."""
    async with proxied(dsn) as proxy:
        store = open_store(proxy.dsn)
        await store.paused()
        listing = store.lanes(["job"])
        listing.send()
        sent = listing._sent
        listing.send()

        assert listing._sent is sent
        assert (await listing).lanes == []
        await store.close()


async def test_a_call_is_made_ready_once(table: Table, open_store):
    """What could not be sent ahead is still a first try: a second one has to look for what the first took."""
    store = open_store()
    claiming = store.claim(limit=1, topics=["job"])
    claiming.prepare()  # there is no connection yet
    claiming.send()

    assert await claiming == []
    assert await table.execute("select * from pulse.claim_try") == []
    await store.close()


@pytest.mark.parametrize("done", [True, False], ids=["it was done", "it was not"])
async def test_the_connection_is_lost_behind_a_call_that_was_sent_ahead(
    dsn, table: Table, open_store, done: bool
):
    """Nobody waits at that moment: who does later gets what it took, or takes it now, and no retry is spent on it."""
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    await table.enqueue(outbox, "job")
    async with proxied(dsn) as proxy:
        store = open_store(proxy.dsn, retries=StorageRetries.off())
        await store.paused()
        claiming = store.claim(limit=1, topics=["job"])
        if done:
            proxy.lose_answer_to = b"outbox_claim"
            claiming.send()
            await table.until("status = 'RUNNING'", 1)
        else:
            proxy.cut()
            claiming.send()

        async def is_noticed() -> bool:
            return bool(store._link._line.is_lost)

        await wait_until_async(is_noticed)
        [claim] = await claiming
        assert (claim.attempts, claim.lease_seq) == (1, 1)
        await store.close()


async def test_nobody_asks_for_an_answer_that_was_lost(dsn, open_store, caplog):
    """The dispatcher ends before the call's turn comes: not a word of asyncio's."""
    async with proxied(dsn) as proxy:
        store = open_store(proxy.dsn)
        await store.paused()
        store.lanes(["job"]).send()
        proxy.cut()

        async def is_lost() -> bool:
            return bool(store._link._line.is_lost)

        await wait_until_async(is_lost)
        await store.close()
    gc.collect()

    assert [record for record in caplog.records if record.name == "asyncio"] == []


async def test_a_repeated_claim_waits_for_the_first_which_still_runs(dsn, table: Table, open_store):
    """The deadline cut the first call off on this side only: on the server it goes on, and takes its rows."""
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    ids = {await table.enqueue(outbox, "job") for _ in range(3)}
    await table.execute(
        """
        create function public.slow() returns trigger language plpgsql as $$
        begin perform pg_sleep(0.4); return new; end $$;
        create trigger slow before update on pulse.outbox for each row execute function public.slow();
        """
    )
    store = open_store(call_timeout=0.5)
    claims = await store.claim(limit=3, topics=["job"])

    assert {claim.event_id for claim in claims} == ids
    assert {claim.attempts for claim in claims} == {1}
    assert await table.count("attempts = 1 and lease_seq = 1") == 3


async def test_a_call_ends_by_its_deadline(dsn, open_store):
    """FAULTS 12: packets vanish. The next call has a connection of its own."""
    async with proxied(dsn) as proxy:
        store = open_store(proxy.dsn, call_timeout=0.3, retries=StorageRetries.off())
        await store.paused()
        proxy.frozen = True
        started = time.monotonic()
        with pytest.raises(CallTimedOut):
            await store.paused()
        took = time.monotonic() - started
        proxy.frozen = False

        assert 0.25 < took < 1
        assert await store.paused() == frozenset()
        await store.close()


async def test_a_frozen_backend_is_left_behind(open_store):
    """SIGSTOP: the socket lives, the server does not answer, not even to a request to cancel."""
    with embedded.start() as server:
        schema.migrate(server.dsn)
        store = open_store(server.dsn, call_timeout=0.3, retries=StorageRetries.off())
        await store.paused()
        with psycopg.connect(server.dsn) as conn:
            [(pid,)] = conn.execute(
                "select pid from pg_stat_activity where application_name = 'pulse-outbox'"
            ).fetchall()
        os.kill(pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(CallTimedOut):
                await store.paused()
            assert time.monotonic() - started < 1
            assert await store.paused() == frozenset()
        finally:
            os.kill(pid, signal.SIGCONT)
        await store.close()


async def test_a_claim_that_a_frozen_backend_gets_to_late_takes_nothing(open_store):
    """Its repetition has been answered: what it took now, nobody would run, and a budget of one would be spent."""
    with embedded.start() as server:
        schema.migrate(server.dsn)
        store = open_store(server.dsn, call_timeout=0.5)
        await store.paused()
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            [(pid,)] = conn.execute(
                "select pid from pg_stat_activity where application_name = 'pulse-outbox'"
            ).fetchall()
            for _ in range(4):
                conn.execute("select pulse.outbox_enqueue('job', '{}')")
            os.kill(pid, signal.SIGSTOP)
            try:
                claims = await store.claim(limit=2, topics=["job"])
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_until(
                lambda: not conn.execute("select 1 from pg_stat_activity where pid = %s", (pid,)).fetchone()
            )

            assert len(claims) == 2
            running = conn.execute("select event_id from pulse.outbox where status = 'RUNNING'").fetchall()
            assert {event_id for (event_id,) in running} == {claim.event_id for claim in claims}
        await store.close()


async def test_a_cancelled_call_costs_the_connection_and_nothing_else(dsn, table: Table, open_store):
    """Its answer may still be on its way: nobody may take it for the answer to the next question."""
    store = open_store()
    locked = await psycopg.AsyncConnection.connect(dsn)
    await locked.execute("lock table pulse.pause")
    call = asyncio.create_task(store.paused())
    await until_waiting(table)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await locked.rollback()
    await locked.close()

    assert await store.paused() == frozenset()


async def test_calls_share_a_connection(open_store):
    """Several loops ask at once; each gets the answer to its own question."""
    store = open_store()

    assert await asyncio.gather(*[store.paused() for _ in range(50)]) == [frozenset()] * 50


class TestCallsThatOverlap:
    """One connection, several questions on their way: the server gets to one after the other."""

    async def test_the_next_question_is_with_the_server_before_the_last_one_is_answered(self, dsn):
        link = Link(dsn)
        await link.rows(b"select 1", ())
        started = time.monotonic()
        slow = asyncio.create_task(link.rows(b"select pg_sleep(0.3), clock_timestamp()", ()))
        await asyncio.sleep(0)  # sent
        [(asked_at, begun_at)] = await link.rows(b"select statement_timestamp(), clock_timestamp()", ())
        [(_, ended_at)] = await slow
        await link.close()

        assert time.monotonic() - started < 0.6
        assert ended_at <= begun_at, "one after the other"
        assert (asked_at - ended_at).total_seconds() < 0.1, "without a pause in between"

    async def test_each_gets_its_own_answer(self, dsn):
        link = Link(dsn)
        answers = await asyncio.gather(
            *[link.rows(b"select %s::int, repeat('x', %s)", (n, n)) for n in range(200)]
        )
        await link.close()

        assert answers == [[(n, "x" * n)] for n in range(200)]

    async def test_an_error_is_the_error_of_one(self, dsn, table: Table):
        """Each is a transaction of its own: what fails takes nothing along, before it or behind it."""
        await table.execute("create table public.written (n integer)")
        link = Link(dsn)
        await link.rows(b"select 1", ())
        query = b"insert into public.written values (%s) returning 1 / n"
        answers = await asyncio.gather(
            *[link.rows(query, (n,)) for n in (1, 0, 2)],
            link.rows(b"select no_such_function(%s)", (1,)),
            link.rows(query, (3,)),
            return_exceptions=True,
        )
        again = await asyncio.gather(
            link.rows(b"select no_such_function(%s)", (1,)), link.rows(query, (4,)), return_exceptions=True
        )
        await link.close()

        assert [getattr(answer, "sqlstate", answer) for answer in answers] == [
            [(1,)],
            "22012",
            [(0,)],
            "42883",
            [(0,)],
        ]
        assert [getattr(answer, "sqlstate", answer) for answer in again] == ["42883", [(0,)]]
        assert [n for (n,) in await table.execute("select n from public.written order by n")] == [1, 2, 3, 4]

    async def test_a_lost_connection_is_an_error_for_all_of_them(self, dsn, table: Table):
        link = Link(dsn)
        await link.rows(b"select 1", ())
        calls = [asyncio.create_task(link.rows(b"select pg_sleep(20)", ())) for _ in range(3)]
        await asyncio.sleep(0)

        async def terminated() -> bool:
            return bool(
                await table.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where query like 'select pg_sleep(20%%'"
                    " and state = 'active' and datname = current_database()"
                )
            )

        await wait_until_async(terminated)
        answers = await asyncio.gather(*calls, return_exceptions=True)

        assert all(isinstance(answer, psycopg.OperationalError) for answer in answers)
        assert await link.rows(b"select 2", ()) == [(2,)]
        await link.close()

    async def test_a_deadline_counts_from_when_the_server_gets_to_it(self, dsn):
        """Those behind a slow one have not been slow themselves; but a connection that is given up is lost for all."""
        link = Link(dsn, call_timeout=timedelta(seconds=0.5))
        await link.rows(b"select 1", ())
        one_by_one = await asyncio.gather(*[link.rows(b"select 1 from pg_sleep(0.3)", ()) for _ in range(3)])
        first, second = await asyncio.gather(
            link.rows(b"select pg_sleep(20)", ()), link.rows(b"select 2", ()), return_exceptions=True
        )

        assert one_by_one == [[(1,)]] * 3
        assert isinstance(first, CallTimedOut)
        assert isinstance(second, psycopg.OperationalError)
        assert not isinstance(second, CallTimedOut)
        assert await link.rows(b"select 3", ()) == [(3,)]
        await link.close()

    async def test_an_answer_that_came_while_the_loop_stood_still_is_taken(self, dsn):
        """The timer of an earlier call becomes due in the round in which a handler blocks: it must not cut this one."""
        link = Link(dsn, call_timeout=timedelta(seconds=0.5))
        await link.rows(b"select 1", ())
        line = link._line
        assert line is not None
        asked = asyncio.create_task(link.rows(b"select 2 from pg_sleep(0.1)", ()))
        await asyncio.sleep(0)
        time.sleep(0.7)
        line._look_at_deadline()

        assert await asked == [(2,)]
        assert link._line is line
        await link.close()

    async def test_what_failed_is_not_prepared_again_and_again(self, dsn):
        link = Link(dsn)
        for _ in range(20):
            with pytest.raises(psycopg.errors.DivisionByZero):
                await link.rows(b"select 1 / (%s::int)", (0,))
        prepared = await link.rows(
            b"select count(*) from pg_prepared_statements where statement like 'select 1 / %%'", ()
        )
        await link.close()

        assert prepared == [(1,)]

    async def test_a_parameter_that_can_not_be_sent_concerns_nobody_else(self, dsn):
        link = Link(dsn)
        await link.rows(b"select 1", ())
        answers = await asyncio.gather(
            link.rows(b"select 1 from pg_sleep(0.1)", ()),
            link.rows(b"select %s::text", ("\0",)),
            link.rows(b"select 2", ()),
            return_exceptions=True,
        )
        await link.close()

        assert answers[0] == [(1,)]
        assert isinstance(answers[1], psycopg.DataError)
        assert answers[2] == [(2,)]

    async def test_an_answer_is_read_while_another_question_is_still_being_sent(self, dsn):
        link = Link(dsn)
        await link.rows(b"select 1", ())
        started = time.monotonic()
        small = asyncio.create_task(link.rows(b"select 7", ()))
        large = asyncio.create_task(
            link.rows(b"select length(%s::text) from pg_sleep(2)", ("x" * 40_000_000,))
        )

        assert await small == [(7,)]
        assert time.monotonic() - started < 1
        assert await large == [(40_000_000,)]
        await link.close()

    async def test_a_server_that_hangs_while_it_is_written_to(self, dsn, table: Table):
        """FAULTS 12: the call ends by its deadline, also when the socket takes no more of its question."""
        link = Link(dsn, call_timeout=timedelta(seconds=0.5))
        [(pid,)] = await link.rows(b"select pg_backend_pid()", ())
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(5):
                answers = await asyncio.gather(
                    link.rows(b"select 1", ()),
                    link.rows(b"select length(%s::text)", ("x" * 20_000_000,)),
                    return_exceptions=True,
                )
        finally:
            os.kill(pid, signal.SIGCONT)

        assert [isinstance(answer, psycopg.OperationalError) for answer in answers] == [True, True]
        assert await link.rows(b"select 3", ()) == [(3,)]
        await link.close()

    async def test_a_question_larger_than_the_sockets_buffer(self, dsn):
        """It is sent piece by piece while the server already answers the one before it."""
        link = Link(dsn)
        large = "x" * 30_000_000
        answers = await asyncio.gather(
            link.rows(b"select repeat('y', 30000000)", ()),
            link.rows(b"select %s::text", (large,)),
            link.rows(b"select length(%s::text)", (large,)),
        )
        await link.close()

        assert list(answers) == [[("y" * 30_000_000,)], [(large,)], [(30_000_000,)]]

    async def test_behind_a_pooler_calls_take_turns(self, dsn, monkeypatch):
        """A pooler may give the session to somebody else as soon as the first one is answered."""
        outstanding = []
        real = _Line.ask

        def counted(line: _Line, written: Any) -> Any:
            outstanding.append(len(line._questions))
            return real(line, written)

        monkeypatch.setattr(_Line, "ask", counted)
        for kind, most in ((BehindPooler, 0), (Link, 9)):
            link = kind(dsn)
            await link.rows(b"select 1", ())
            outstanding.clear()
            await asyncio.gather(*[link.rows(b"select 1 from pg_sleep(0.01)", ()) for _ in range(10)])
            await link.close()

            assert max(outstanding) == most


@pytest.mark.parametrize(
    "query",
    [b"", b"set local work_mem = '1MB'", b"copy pulse.pause to stdout", b"copy pulse.pause from stdin"],
)
async def test_a_statement_that_returns_no_rows_is_an_error(dsn, query: bytes):
    """Not a caller that waits for ever, and not a loop that spins."""
    link = Link(dsn)
    async with asyncio.timeout(5):
        with pytest.raises(psycopg.ProgrammingError):
            await link.rows(query, ())

        assert await link.rows(b"select 2", ()) == [(2,)]
    await link.close()


async def test_a_session_that_can_not_be_set_up_is_not_left_open(dsn, table: Table):
    """It would be one more with every attempt."""
    await table.execute("create role nobody_special login")
    await table.execute("revoke execute on function pg_catalog.set_config(text, text, boolean) from public")
    link = Link(f"{dsn}&user=nobody_special")
    for _ in range(3):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await link.rows(b"select 1", ())
    open_sessions = "select count(*) from pg_stat_activity where usename = 'nobody_special'"

    async def gone() -> bool:
        return await table.execute(open_sessions) == [(0,)]

    await wait_until_async(gone)
    await link.close()
    await table.execute("drop role nobody_special")


async def test_an_old_libpq_is_named(dsn, monkeypatch):
    """Without pipeline mode nothing would work: the message says what to install."""
    monkeypatch.setattr(psycopg.capabilities, "has_pipeline", lambda check=False: False)

    with pytest.raises(SettingsError, match="libpq 14 or newer"):
        await Link(dsn).rows(b"select 1", ())


async def test_a_connection_that_ends_while_idle_costs_no_call(table: Table, open_store):
    """It is noticed at once: the next call makes another one, and needs no retry."""
    store = open_store(retries=StorageRetries.off())
    await store.paused()
    line = store._link._line
    await table.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where application_name = 'pulse-outbox' and datname = current_database()"
    )

    async def noticed() -> bool:
        return bool(line.is_lost)

    await wait_until_async(noticed)
    assert await store.paused() == frozenset()


async def test_our_sqlstates_become_our_exceptions(table: Table, open_store):
    store = open_store()
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    event_id = await table.enqueue(outbox, "job")

    with pytest.raises(EventNotFound):
        await store.replay(uuid4(), generation=0, replayed_by="test")
    with pytest.raises(TransitionRefused):
        await store.replay(event_id, generation=0, replayed_by="test")
    with pytest.raises(BadArgument):
        await store.replay(event_id, generation=-1, replayed_by="test")


async def test_a_replay_whose_answer_is_lost_is_no_error(dsn, table: Table, open_store):
    """The repeated call finds that it was itself who replayed it, and says nothing of a refused transition."""
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    event_id = await table.enqueue(outbox, "job")
    await table.execute("update pulse.outbox set status = 'DEAD_LETTERED', completed_at = now()")
    async with proxied(dsn) as proxy:
        store = open_store(proxy.dsn)
        await store.paused()
        proxy.lose_answer_to = b"outbox_replay"
        await store.replay(event_id, generation=0, replayed_by="test")
        assert proxy.lost_answers == 1
        await store.close()
    row = await table.row(event_id)

    assert (row.status, len(row.failure_history)) == ("PENDING", 1)


async def test_an_unmigrated_database_names_the_remedy(empty_dsn, open_store):
    store = open_store(empty_dsn)
    for call in (store.require_supported(), store.lanes(["job"]), store.reap()):
        with pytest.raises(SchemaError, match="pulse-outbox migrate"):
            await call


class BehindPooler(Link):
    """Sees another process number than the connection has: how a pooler in transaction mode shows."""

    async def _ask(self, line: Any, query: bytes, parameters: Any, *, raw: bool = False) -> Any:
        rows = await super()._ask(line, query, parameters, raw=raw)
        return (
            [(rows[0][0] + 1, *rows[0][1:])]
            if query.startswith(b"select pg_catalog.pg_backend_pid")
            else rows
        )


@pytest.mark.parametrize(("kind", "prepares"), [(Link, True), (BehindPooler, False)])
async def test_session_keeps_nothing_that_a_pooler_would_mix_up(dsn, table: Table, kind, prepares):
    """FAULTS 21: through a pooler nothing is prepared by name; nothing is ever set or locked for the session."""
    link = kind(dsn)
    store = Store(link)
    for _ in range(8):
        await store.lanes(["job"])
        await store.claim(limit=1, topics=["job"])
    names = await link.rows(b"select name from pg_prepared_statements", ())
    changed = await link.rows(
        b"select array_agg(name) from pg_settings where source = 'session' and name <> 'application_name'", ()
    )
    locks = await link.rows(
        b"select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()", ()
    )
    await store.close()

    assert any(name for (name,) in names) == prepares
    assert changed == [(["statement_timeout"] if prepares else None,)]
    assert locks == [(0,)]


async def test_a_function_that_a_migration_replaced_is_called_on_a_new_connection(dsn, table: Table):
    """FAULTS 39: a prepared statement still knows the old result type, and would for ever."""
    store = Store(Link(dsn))
    for _ in range(5):
        await store.heal()
    await table.execute("alter function pulse.outbox_heal(text, integer, timestamptz) rename to old_heal")
    await table.execute(
        "create function pulse.outbox_heal(p_after text, p_limit integer, p_now timestamptz, "
        "out last_key text, out healed bigint) language sql as 'select null::text, 7::bigint'"
    )

    assert await store.heal() == (None, 7)
    await store.close()


async def test_large_payloads_come_whole_and_through_no_file(table: Table, open_store):
    """A claim of 15 MB, which no working memory of the server holds, in hundreds of pieces."""
    outbox = Outbox()
    outbox.handler("job")(lambda event: None)
    texts = [f"{number} ü " * 30_000 for number in range(50)]
    for text in texts:
        await table.enqueue(outbox, "job", {"text": text})
    files = "select temp_files from pg_stat_database where datname = current_database()"
    before = await table.execute(files)

    store = open_store()
    claims = await store.claim(limit=100, topics=["job"])
    again = await store.held_by(claims[0].token)
    await store.close()

    assert [json.loads(claim.payload)["text"] for claim in claims] == texts
    assert {claim.payload for claim in again} == {claim.payload for claim in claims}

    async def counted() -> bool:  # the server adds a session's figures when it ends
        sessions = "application_name = 'pulse-outbox' and datname = current_database()"
        return not await table.execute(f"select from pg_stat_activity where {sessions}")

    await wait_until_async(counted)
    assert await table.execute(files) == before


async def test_every_topic_is_data(table: Table, open_store):
    """The topics of a claim are sent as one text: no character of a topic may end it, or be lost in it."""
    topics = ['"', "\\", '\\"', ",", "{}", "NULL", " a ", "it's", "ä\n", "%s", "1"]
    await table.enqueue_many(Outbox(), [NewEvent(topic, {}) for topic in topics])
    store = open_store()

    lanes = [lane.topic for lane in (await store.lanes(topics)).lanes]
    claims = await store.claim(limit=100, topics=topics, budgets=list(range(2, 2 + len(topics))))

    assert lanes == topics
    assert {claim.topic: claim.max_attempts for claim in claims} == {
        topic: number for number, topic in enumerate(topics, 2)
    }


async def test_a_lease_of_any_length(table: Table, open_store):
    """Its time is sent as text: days, seconds and parts of one all count."""
    await table.enqueue(Outbox(), "job")
    lease = timedelta(days=2, seconds=3, microseconds=250_000)

    [claim] = await open_store().claim(limit=1, topics=["job"], lease=lease)

    [(given,)] = await table.execute("select lease_until - claimed_at from pulse.outbox")
    assert (claim.topic, given) == ("job", lease)


async def test_every_error_is_data(table: Table, open_store):
    """Errors and failures of a whole batch are sent as texts: each comes back as it was, with its own delay."""
    errors = ['"', "\\", '\\"', ",", "{}", "NULL", "", " a ", "it's", "ä\n\t", "%s"]
    await table.enqueue_many(Outbox(), [NewEvent("job", number) for number in range(len(errors))])
    store = open_store()
    claims = sorted(await store.claim(limit=100, topics=["job"]), key=lambda claim: int(claim.payload))

    failures = [
        Failure(
            held=claim,
            error=error,
            failure={"rule": error},
            delay=timedelta(seconds=number, microseconds=number),
            terminal=number % 2 == 0,
        )
        for number, (claim, error) in enumerate(zip(claims, errors, strict=True), 1)
    ]
    await store.fail(failures)

    rows = await table.execute(
        "select last_error, last_failure ->> 'rule' as rule, status::text = 'DEAD_LETTERED' as dead, "
        "       next_run_at - first_failed_at as delay from pulse.outbox order by seq"
    )
    assert [(row.last_error, row.rule, row.dead) for row in rows] == [
        (error, error, number % 2 == 0) for number, error in enumerate(errors, 1)
    ]
    assert [row.delay for row in rows if not row.dead] == [
        failure.delay for failure in failures if not failure.terminal
    ]
