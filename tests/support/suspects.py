"""An application whose handlers do everything that a handler should not; the tests of suspects run it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psycopg

from pulse_outbox import Event, Outbox, RetryPolicy

TABLES = """
create table noted (event_id uuid, topic text, pid integer, began timestamptz, ended timestamptz);
create table effect (event_id uuid);
"""
IN_CHILD = Path(sys.argv[0]).name == "child.py"
BREAK_IF_THERE = Path(os.environ.get("TEST_BREAK_IF_THERE", os.devnull + "/not"))

if IN_CHILD and BREAK_IF_THERE.exists():
    with BREAK_IF_THERE.open("a") as tries:
        tries.write(f"{time.monotonic()}\n")
    raise ImportError("this application can't be loaded today")

outbox = Outbox()
TWICE = RetryPolicy(max_attempts=2, base_delay=0.1)


@outbox.lifespan
async def connection() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    if IN_CHILD:
        await asyncio.sleep(float(os.environ.get("TEST_SLOW_LIFESPAN", "0")))
    async with await psycopg.AsyncConnection.connect(os.environ["PULSE_OUTBOX_DSN"], autocommit=True) as conn:
        yield conn


@outbox.handler("innocent")
async def innocent(event: Event[dict]) -> None:
    await asyncio.sleep(event.payload.get("seconds", 0))


@outbox.handler("patient")
async def patient(event: Event[dict]) -> None:
    """Is still running whenever the dispatcher is killed, and quick as a suspect."""
    await asyncio.sleep(1 if IN_CHILD else 600)


async def note(event: Event[dict]) -> None:
    """Leaves a record of when it ran, and where."""
    await event.resources.execute(
        "insert into noted values (%s, %s, %s, clock_timestamp())", (event.id, event.topic, os.getpid())
    )
    await asyncio.sleep(event.payload.get("seconds", 0.1))
    await event.resources.execute(
        "update noted set ended = clock_timestamp() where event_id = %s and ended is null", (event.id,)
    )


outbox.handler("noted")(note)
outbox.handler("limited", concurrency=2)(note)
outbox.handler("serial", concurrency=1)(note)


@outbox.handler("written", transactional=True)
async def write(event: Event[dict]) -> None:
    await event.connection.execute("insert into effect values (%s)", (event.id,))


@outbox.handler("written.sync", transactional=True)
def write_sync(event: Event[dict]) -> None:
    event.connection.execute("insert into effect values (%s)", (event.id,))


# Death


def segfault() -> None:
    ctypes.string_at(0)


def leave_heir() -> None:
    if not os.fork():
        time.sleep(4)  # holds whatever this process had open
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(0),
    "segfault": segfault,
    "heir": leave_heir,
    "descriptors": lambda: os.closerange(3, 256),
}


@outbox.handler("poison", retry=TWICE)
async def poison(event: Event[dict]) -> None:
    await asyncio.sleep(0.05)
    DEATHS[event.payload["how"]]()
    await asyncio.sleep(30)


@outbox.handler("last.words")
async def last_words(event: Event[dict]) -> None:
    """Its outcome is told, and then the process dies."""
    asyncio.get_running_loop().call_later(0.1, os._exit, 3)


# Not ending


@outbox.handler("endless", retry=TWICE)
async def endless(event: Event[dict]) -> None:
    await asyncio.sleep(600)


@outbox.handler("greedy", retry=TWICE)
async def greedy(event: Event[dict]) -> None:
    """Holds the interpreter's lock."""
    ctypes.PyDLL(None).sleep(600)


@outbox.handler("blocking")
async def blocking(event: Event[dict]) -> None:
    time.sleep(event.payload["seconds"])


@outbox.handler("blocking.long", timeout=0.3, retry=TWICE)
async def blocking_for_long(event: Event[dict]) -> None:
    time.sleep(600)


@outbox.handler("stuck", timeout=0.3, retry=RetryPolicy(max_attempts=1))
def stuck(event: Event[dict]) -> None:
    time.sleep(600)


# Noise


@outbox.handler("exits", retry=TWICE)
async def exits(event: Event[dict]) -> None:
    sys.exit(3)


@outbox.handler("exits.sync", retry=TWICE)
def exits_sync(event: Event[dict]) -> None:
    sys.exit(3)


@outbox.handler("noisy")
def noisy(event: Event[dict]) -> None:
    for _ in range(100):
        print('["completed",1]\n["started",1', flush=True)
    os.write(1, b"\xff\x00\n" * 1000)


@outbox.handler("wordy", retry=TWICE)
async def wordy(event: Event[dict]) -> None:
    raise ValueError("\x00\ud800\n" + "x" * 10_000_000)
