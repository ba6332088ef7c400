"""What the drivers written in Python share: the protocol with the harness, the clock and the handlers.

A driver is a small script that does one thing with one product and says when. It gets its task as JSON, prints one JSON
object per line, and waits for a line `go` before it starts:

    {"event": "ready", …}      imported and configured; `go` on standard input starts it
    {"event": "done", …}       what was measured; times are of CLOCK_MONOTONIC, which all processes of a machine share

Standard library only, since it runs in every peer's environment.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

MARKS = 400
"""About so many points of a run's progress are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a driver is to do; the same fields for every product."""

    action: str
    """setup: make the product's tables; enqueue: write jobs; work: run them."""
    dsn: str
    count: int = 0
    payload: int = 10
    """About the size of a job's payload, in bytes."""
    mode: str = "bulk"
    """Of enqueue: bulk (many per transaction), single (one per transaction), paced (at a rate, times kept)."""
    rate: float = 0.0
    """Of paced: jobs per second; above 100 several share a transaction."""
    first: int = 0
    """The number of the first job: producers at the same time have numbers of their own."""
    handler: str = "noop"
    """Of work: noop, io (sleeps), sync (a plain function), record (keeps its start times), fail (some of them)."""
    io: float = 0.0
    """What an io handler waits, in seconds."""
    concurrency: int = 100
    batch: int = 500
    seconds: float = 600.0
    """Give up after this time and report what was done."""
    options: dict[str, Any] = field(default_factory=dict)
    """What only some products know: delete, notify, keys …"""

    def option(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)


def payload_of(number: int, size: int) -> dict[str, Any]:
    """A payload of about *size* bytes that names its job."""
    length = size - 12 - len(str(number))
    return {"n": number, "pad": padding(length)} if length >= 6 else {"n": number}


@cache
def padding(length: int) -> str:
    """Text that does not compress: a hundred kilobytes of one letter would be a hundred bytes on disk."""
    return base64.b64encode(random.Random(7).randbytes(length)).decode()[:length]


class Producer(Protocol):
    """How a product writes jobs."""

    async def one(self, number: int) -> None:
        """One job in a transaction of its own."""

    async def many(self, numbers: Sequence[int]) -> None:
        """All of them in one transaction, by the fastest documented way."""

    async def close(self) -> None: ...


class Run:
    """A worker's run: counts what its handler has seen, and knows when it is over."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.count = 0
        self.marks: list[tuple[int, float]] = []
        self.starts: list[tuple[int, float]] = []
        self._step = max(1, task.count // MARKS)
        self._next = 1
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.complete = False
        self._lock = threading.Lock()
        self._failed_once: set[int] = set()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        # `stop`, or the end of a harness that is gone.
        sys.stdin.readline()
        self._loop.call_soon_threadsafe(self._over.set)

    # What handlers call

    def tick(self) -> None:
        """One more job has been run."""
        self.count += 1
        if self.count >= self._next:
            self._mark()

    def tick_in_thread(self) -> None:
        """The same from a sync handler's thread."""
        with self._lock:
            self.tick()

    def record(self, number: int) -> None:
        """One more, and when it started."""
        self.starts.append((number, time.monotonic()))
        self.tick()

    def should_fail(self, number: int) -> str | None:
        """'transient' for the first try of one in five, 'terminal' for one in a hundred, else None."""
        if number % 100 == 7:
            return "terminal"
        if number % 5 == 0 and number not in self._failed_once:
            self._failed_once.add(number)
            return "transient"
        return None

    def _mark(self) -> None:
        self.marks.append((self.count, time.monotonic()))
        self._next += self._step
        if self.count >= self.task.count:
            self._next = sys.maxsize
            self._loop.call_soon_threadsafe(self._over.set)
        elif self._next > self.task.count:
            self._next = self.task.count

    # What drivers call

    async def until_over(self, unsettled: Callable[[], Awaitable[bool]]) -> None:
        """Waits for the last job, and then until its result is durable: while *unsettled* says so."""
        try:
            await asyncio.wait_for(self._over.wait(), self.task.seconds)
        except TimeoutError:
            return self._say_done()
        if self.count >= self.task.count:
            deadline = time.monotonic() + 60
            while await unsettled() and time.monotonic() < deadline:
                await asyncio.sleep(0.002)
            self.complete = time.monotonic() < deadline
        self._say_done()

    def _say_done(self) -> None:
        # Said before the worker is stopped: how long that takes is not what is measured.
        say(
            "done",
            count=self.count,
            complete=self.complete,
            marks=self.marks,
            starts=self.starts,
            ended=time.monotonic(),
        )


class Driver(Protocol):
    """What each product's script defines."""

    name: str

    def settings(self, task: Task) -> str:
        """The configuration in words, for the report."""

    async def setup(self, task: Task) -> None: ...

    async def producer(self, task: Task) -> Producer: ...

    async def work(self, task: Task, run: Run) -> None:
        """Runs a worker until `run.until_over` has returned."""


def say(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def main(driver: Driver, *, runner: Callable[[Any], None] = asyncio.run) -> None:
    """Does the task that the command line gives. *runner* runs a coroutine, for products that bring a loop."""
    task = Task(**json.loads(sys.argv[1]))
    say("ready", settings=driver.settings(task))
    if sys.stdin.readline().strip() != "go":
        return
    runner(_perform(driver, task))


async def _perform(driver: Driver, task: Task) -> None:
    match task.action:
        case "setup":
            await driver.setup(task)
            say("done")
        case "work":
            await driver.work(task, Run(task))
        case "enqueue":
            producer = await driver.producer(task)
            try:
                await _enqueue(producer, task)
            finally:
                await producer.close()
        case other:
            raise ValueError(f"no action {other!r}")


async def _enqueue(producer: Producer, task: Task) -> None:
    numbers = range(task.first, task.first + task.count)
    times: list[float] = []
    commits: list[tuple[int, float]] = []
    started = time.monotonic()
    limit = started + task.seconds
    done = 0
    match task.mode:
        case "single":
            for number in numbers:
                before = time.monotonic()
                await producer.one(number)
                after = time.monotonic()
                times.append(after - before)
                done += 1
                if after > limit:
                    break
        case "bulk":
            for start in range(0, task.count, task.batch):
                chunk = numbers[start : start + task.batch]
                await producer.many(chunk)
                done += len(chunk)
                if time.monotonic() > limit:
                    break
        case "paced":
            done = await _paced(producer, task, numbers, commits)
        case other:
            raise ValueError(f"no mode {other!r}")
    ended = time.monotonic()
    say("done", count=done, started=started, ended=ended, times=times, commits=commits)


async def _paced(
    producer: Producer, task: Task, numbers: Sequence[int], commits: list[tuple[int, float]]
) -> int:
    """Writes at a rate, keeping for each job the time at which its commit had returned."""
    together = max(1, round(task.rate / 100))
    gap = together / task.rate
    due = time.monotonic()
    limit = due + task.seconds
    for start in range(0, len(numbers), together):
        chunk = numbers[start : start + together]
        # Uneven gaps: an even beat could fall in step with a poller.
        due += gap * random.uniform(0.5, 1.5)
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        if together == 1:
            await producer.one(chunk[0])
        else:
            await producer.many(chunk)
        now = time.monotonic()
        commits.extend((number, now) for number in chunk)
        if now > limit:
            break
    return len(commits)
