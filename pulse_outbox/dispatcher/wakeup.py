"""Wake-ups: LISTEN on a connection of its own. Polling alone is enough; this makes it quick."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pulse_outbox.link import connection_string, shut_down

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CHECK_INTERVAL = 5.0
"""How often a silent connection is asked whether it is still there, in seconds."""
CHECK_TIMEOUT = 3.0


class Heard(NamedTuple):
    """A notification."""

    topic: str
    """Empty: it did not say."""
    producer: int
    """The process of the server that sent it."""


def commits_of(heard: Iterable[Heard]) -> int:
    """How many commits these come from, at least: one commit names no topic twice."""
    commits = 0
    topics: set[str] = set()
    last = None
    for topic, producer in heard:
        if producer != last or topic in topics:
            commits += 1
            topics.clear()
        last = producer
        topics.add(topic)
    return commits


async def listen(
    dsn: str, *, schema: str, wake: Callable[[list[Heard]], None], connected: Callable[[bool], None]
) -> None:
    """Calls *wake* for notifications. Ends with an error when the connection no longer answers."""
    # Whatever encoding the application wants: topics have to arrive as they are, also those that others serve.
    conninfo = make_conninfo(connection_string(dsn, "pulse-outbox listen"), client_encoding="utf8")
    async with await psycopg.AsyncConnection.connect(
        conninfo, autocommit=True, prepare_threshold=None
    ) as conn:
        # What comes along with an answer.
        conn.add_notify_handler(lambda notify: wake([Heard(notify.payload, notify.pid)]))
        try:
            await _within(CHECK_TIMEOUT, conn, _start(conn, f"{schema}_outbox_wake"))
            connected(True)
            wake([])  # whatever was enqueued while nobody listened
            while True:
                await _hear(conn, wake, CHECK_INTERVAL)
                # A connection can be dead without saying so: nothing but an answer shows that it lives.
                await _within(CHECK_TIMEOUT, conn, _ask(conn))
        finally:
            connected(False)


async def _hear(
    conn: psycopg.AsyncConnection[Any], wake: Callable[[list[Heard]], None], seconds: float
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
            heard.append(Heard(_topic_in(notify.extra), notify.be_pid))
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


def _topic_in(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return ""  # whatever that was, it is not from a producer of ours


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
