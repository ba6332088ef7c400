"""Wake-ups: LISTEN on a connection of its own. Polling alone is enough; this makes it quick."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from pulse_outbox.link import connection_string, shut_down

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHECK_INTERVAL = 5.0
"""How often a silent connection is asked whether it is still there, in seconds."""
CHECK_TIMEOUT = 3.0


async def listen(
    dsn: str, *, schema: str, wake: Callable[[Sequence[str]], None], connected: Callable[[bool], None]
) -> None:
    """Calls *wake* for notifications, with the topic that each names, or an empty text.

    Ends with an error when the connection no longer answers.
    """
    conninfo = connection_string(dsn, "pulse-outbox listen")
    async with await psycopg.AsyncConnection.connect(
        conninfo, autocommit=True, prepare_threshold=None
    ) as conn:
        conn.add_notify_handler(lambda notify: wake([notify.payload]))  # what comes along with an answer
        try:
            await _within(CHECK_TIMEOUT, conn, _start(conn, f"{schema}_outbox_wake"))
            connected(True)
            wake(())  # whatever was enqueued while nobody listened
            while True:
                await _hear(conn, wake, CHECK_INTERVAL)
                # A connection can be dead without saying so: nothing but an answer shows that it lives.
                await _within(CHECK_TIMEOUT, conn, _ask(conn))
        finally:
            connected(False)


async def _hear(
    conn: psycopg.AsyncConnection[Any], wake: Callable[[Sequence[str]], None], seconds: float
) -> None:
    """Listens for so long. The socket itself calls *wake*: an event that comes alone waits for nothing in between."""
    loop = asyncio.get_running_loop()
    descriptor = conn.fileno()
    lost: asyncio.Future[psycopg.Error] = loop.create_future()

    def read() -> None:
        try:
            conn.pgconn.consume_input()
        except psycopg.Error as error:
            loop.remove_reader(descriptor)  # at once: the next socket that is opened may get its number
            lost.set_result(error)
            return
        heard = []
        while notify := conn.pgconn.notifies():
            heard.append(notify.extra.decode(errors="replace"))
        if heard:
            wake(heard)

    loop.add_reader(descriptor, read)
    try:
        read()  # what the last answer brought along is in no socket any more
        await asyncio.wait({lost}, timeout=seconds)
    finally:
        if not lost.done():
            loop.remove_reader(descriptor)
    if lost.done():
        raise lost.result()


async def _start(conn: psycopg.AsyncConnection[Any], channel: str) -> None:
    await conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))


async def _ask(conn: psycopg.AsyncConnection[Any]) -> None:
    await conn.execute("select 1")


async def _within(seconds: float, conn: psycopg.AsyncConnection[Any], question: Any) -> None:
    asking = asyncio.ensure_future(question)
    done, _ = await asyncio.wait({asking}, timeout=seconds)
    if not done:
        shut_down(conn)  # wakes the question with an error
        await asyncio.wait({asking})
    asking.result()
