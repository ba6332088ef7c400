"""Run as a program: a dispatcher in a process of its own, for tests that send signals.

    python -m tests.support.worker DSN '{"concurrency": 2, …}'

Writes a line to standard output whenever a handler starts or ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Any

import psycopg

from pulse_outbox import Dispatcher, Event, Outbox, RetryPolicy

outbox = Outbox()


def say(what: str, event: Event[Any]) -> None:
    line = json.dumps({"what": what, "event": str(event.id), "seq": event.lease_seq})
    os.write(1, f"{line}\n".encode())  # in one piece, whichever threads and loggers write beside it


@outbox.handler("sleeps")
async def sleeps(event: Event[dict]) -> None:
    say("started", event)
    await asyncio.sleep(event.payload["seconds"])
    say("ended", event)


@outbox.handler("once", retry=RetryPolicy(max_attempts=1))
async def once(event: Event[dict]) -> None:
    await sleeps(event)


@outbox.handler("sleeps in a thread")
def sleeps_in_a_thread(event: Event[dict]) -> None:
    say("started", event)
    time.sleep(event.payload["seconds"])
    say("ended", event)


@outbox.handler("blocks the loop")
async def blocks_the_loop(event: Event[dict]) -> None:
    say("started", event)
    threading.Event().wait(event.payload["seconds"])
    say("ended", event)


@outbox.handler("ignores cancellation")
async def ignores_cancellation(event: Event[dict]) -> None:
    say("started", event)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


@outbox.handler("leaks a task")
async def leaks_a_task(event: Event[dict]) -> None:
    leaked.append(asyncio.create_task(ignores_cancellation(event)))


leaked: list[asyncio.Task[None]] = []


@outbox.handler("exits in a task", retry=RetryPolicy(max_attempts=1))
async def exits_in_a_task(event: Event[dict]) -> None:
    async def leave() -> None:
        raise SystemExit(7)

    await asyncio.gather(asyncio.create_task(leave()))


@outbox.handler("dies after its effect")
def dies_after_its_effect(event: Event[dict]) -> None:
    """Its effect is committed with the record of it; then the first run takes the whole process down."""
    with psycopg.connect(sys.argv[1]) as conn:
        if outbox.first_time(conn, event):
            conn.execute("insert into public.effect values (%s)", (event.idempotency_key,))
    say("done", event)
    if event.lease_seq == 1:
        os.kill(os.getpid(), signal.SIGKILL)


class Worker:
    """The process, as a test sees it."""

    def __init__(self, dsn: str, settings: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.worker", dsn, json.dumps(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.log: list[str] = []
        self._said: Queue[dict[str, Any]] = Queue()
        self.heard: list[dict[str, Any]] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
            else:
                self.log.append(line)

    def next(self, within: float = 15) -> dict[str, Any]:
        """What a handler said next."""
        try:
            said = self._said.get(timeout=within)
        except Empty:
            raise AssertionError(f"nothing was said within {within} s\n{self.text}") from None
        self.heard.append(said)
        return said

    def started(self) -> set[str]:
        """The events whose handlers have started until now."""
        while not self._said.empty():
            self.heard.append(self._said.get())
        return {said["event"] for said in self.heard if said["what"] == "started"}

    def wait(self, within: float = 30) -> int:
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the process still runs after {within} s\n{self.text}") from None
        self._reading.join(5)
        return code

    @property
    def text(self) -> str:
        return "".join(self.log)


@contextmanager
def working(dsn: str, **settings: Any) -> Iterator[Worker]:
    """A dispatcher's process; killed at the end if it is still there."""
    from tests.support.dispatching import QUICK

    worker = Worker(dsn, {**QUICK, **settings})
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()
        worker._reading.join(5)
        assert worker.process.stdout is not None
        worker.process.stdout.close()


if __name__ == "__main__":
    Dispatcher(outbox, dsn=sys.argv[1], **json.loads(sys.argv[2])).run()
