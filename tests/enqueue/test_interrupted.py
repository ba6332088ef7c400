"""Many events whose COPY is cut off: the error that says why comes out, and the connection can be used or is closed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import psycopg
import pytest
from psycopg import sql
from psycopg.pq import TransactionStatus

from pulse_outbox import NewEvent, Outbox
from tests.support.waiting import wait_until, wait_until_async

outbox = Outbox()


def large(number: int = 600) -> list[NewEvent]:
    """More than sockets hold."""
    return [NewEvent("t", {"n": n, "text": "x" * 50_000}) for n in range(number)]


@pytest.fixture
def at_row_200(dsn: str):
    """Makes the server do something in the middle."""

    def do(statement: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(
                sql.SQL(
                    """
                    create function pulse.stumble() returns trigger language plpgsql as $$
                    begin
                      if (new.payload ->> 'n')::int = 200 then {} end if;
                      return new;
                    end
                    $$;
                    create trigger stumble before insert on pulse.outbox
                      for each row execute function pulse.stumble()
                    """
                ).format(sql.SQL(statement))
            )

    return do


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("raise exception 'stumbled' using errcode = 'division_by_zero';", psycopg.errors.DivisionByZero),
        ("perform pg_terminate_backend(pg_backend_pid());", psycopg.errors.AdminShutdown),
    ],
)
def test_the_servers_reason_comes_out(dsn: str, at_row_200, statement: str, error: type[Exception]):
    at_row_200(statement)
    conn = psycopg.connect(dsn)

    with pytest.raises(error):
        outbox.enqueue_many(conn, large())

    if not conn.closed:
        conn.rollback()
        conn.execute("select 1")
    conn.close()


async def test_the_servers_reason_comes_out_of_an_asynchronous_connection(dsn: str, at_row_200):
    at_row_200("perform pg_terminate_backend(pg_backend_pid());")
    conn = await psycopg.AsyncConnection.connect(dsn)

    with pytest.raises(psycopg.errors.AdminShutdown):
        await outbox.enqueue_many_async(conn, large())

    assert conn.closed


@pytest.mark.parametrize("pauses", range(6))
async def test_cancelled_at_any_moment_the_connection_can_be_used_after_a_rollback(dsn: str, pauses: int):
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        writing = asyncio.ensure_future(outbox.enqueue_many_async(conn, large(100)))
        for _ in range(pauses):
            await asyncio.sleep(0)
        writing.cancel()

        with pytest.raises(asyncio.CancelledError):
            await writing

        assert conn.info.transaction_status != TransactionStatus.ACTIVE
        await conn.rollback()
        await conn.execute("select 1")


def test_interrupted_after_its_end_was_sent_the_connection_is_not_left_busy(dsn: str, at_row_200):
    """Soft time limits raise from a signal handler, wherever the code is."""

    class TimeIsUp(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise TimeIsUp

    at_row_200("perform pg_sleep(30);")
    before = signal.signal(signal.SIGUSR1, interrupt)
    with psycopg.connect(dsn, autocommit=True) as other, psycopg.connect(dsn) as conn:

        def waits() -> bool:
            found = other.execute(
                "select from pg_stat_activity where pid = %s and wait_event = 'PgSleep'",
                [conn.info.backend_pid],
            )
            return found.rowcount == 1

        def strike() -> None:
            wait_until(waits)
            os.kill(os.getpid(), signal.SIGUSR1)

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            with pytest.raises(TimeIsUp):
                outbox.enqueue_many(conn, [NewEvent("t", {"n": n}) for n in range(201)])
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)

        assert conn.info.transaction_status != TransactionStatus.ACTIVE


async def test_a_cancellation_stays_one_when_the_server_hangs(dsn: str, at_row_200):
    """psycopg waits five seconds for the server to cancel, and then closes the connection."""
    at_row_200("perform pg_advisory_xact_lock(1);")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
        await other.execute("select pg_advisory_lock(1)")
        conn = await psycopg.AsyncConnection.connect(dsn)
        backend = conn.info.backend_pid
        writing = asyncio.ensure_future(outbox.enqueue_many_async(conn, large()))

        async def waits() -> bool:
            found = await other.execute("select from pg_locks where pid = %s and not granted", [backend])
            return found.rowcount == 1

        await wait_until_async(waits)
        os.kill(backend, signal.SIGSTOP)
        try:
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
        finally:
            os.kill(backend, signal.SIGCONT)

        assert conn.closed
