"""The child process that suspects run in: `python -m pulse_outbox.dispatcher.child DESCRIPTOR PARENT`.

Started by `child_process`, never by hand. It loads the application afresh, runs what the parent sends it in slots of
its own, and says over the socket what it starts and what came of it. It holds no lease and stores no result (but for
transactional handlers, whose own transaction does); when the parent is gone, so is it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

from pulse_outbox.dispatcher import sentry
from pulse_outbox.dispatcher.jobs import Job, Over, Released
from pulse_outbox.dispatcher.running import Attempt, Runner
from pulse_outbox.dispatcher.slots import Slots
from pulse_outbox.dispatcher.timers import make_exact
from pulse_outbox.dispatcher.transactions import Transactions
from pulse_outbox.dispatcher.wire import CHUNK, Lines, decode, decode_claim, encode, encode_outcome
from pulse_outbox.failures import describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pulse_outbox.dispatcher.jobs import Outcome
    from pulse_outbox.outbox import Outbox

PR_SET_PDEATHSIG = 1
TICK_MAX = 0.5
"""How often a sign of life is sent at least, in seconds."""


def main(arguments: list[str]) -> None:
    """Runs until the parent says that it is enough, or is gone."""
    sys.excepthook = write_whole
    descriptor, parent = map(int, arguments)
    _die_with(parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        # A signal to the whole process group or control group is the parent's affair. Not SIG_IGN: programs that
        # handlers start would inherit that.
        signal.signal(number, lambda *_: None)
    os.set_inheritable(descriptor, False)
    link = ParentLink(socket.socket(fileno=descriptor), parent)
    [order] = link.first()
    try:
        outbox = _load(order)
    except BaseException as error:
        link.say("broken", describe_error(error))
        raise
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        make_exact(loop)
        running = loop.create_task(Child(link, order, outbox).run())
        while not running.done():
            try:
                loop.run_until_complete(running)
            except (SystemExit, KeyboardInterrupt):
                if running.done():
                    raise
                # Out of a task that a handler has started: asyncio lets it end the loop, which goes on here.


def _load(order: Mapping[str, Any]) -> Outbox:
    """The application, from where the parent has it."""
    from pulse_outbox.dispatcher import logs
    from pulse_outbox.dispatcher.target import load_outbox

    if order["log_level"] is not None:
        logs.configure(order["log_level"])
    sys.path.extend(path for path in order["path"] if path not in sys.path)
    return load_outbox(order["target"], schema=order["schema"])


def write_whole(*raised: Any) -> None:
    """A traceback in one piece: in the many that Python makes, unbuffered, it would tear the parent's log lines."""
    sys.stderr.write("".join(traceback.format_exception(*raised)))
    sys.stderr.flush()


def _die_with(parent: int) -> None:
    """Linux ends this process with its parent, even while a handler holds the interpreter's lock."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # the thread that reads the socket notices too
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class ParentLink:
    """The socket to the parent. Whoever can't speak to his parent any more ends."""

    def __init__(self, sock: socket.socket, parent: int) -> None:
        self._socket = sock
        self._parent = parent
        self._lines = Lines()
        self._pending: list[bytes] = []
        self._one_at_a_time = threading.Lock()

    def say(self, *message: object) -> None:
        """Sends a message, from any thread."""
        self.send(encode(*message))

    def send(self, line: bytes) -> None:
        """Returns when the kernel has it: from then on it arrives, whatever happens to this process."""
        try:
            with self._one_at_a_time:
                self._socket.sendall(line)
        except OSError:
            os._exit(1)

    def first(self) -> Any:
        """The first message, however long it takes."""
        while not self._pending:
            self._pending = self.receive(None)
        return decode(self._pending.pop(0))

    def receive(self, timeout: float | None) -> list[bytes]:
        """What has arrived, after *timeout* seconds at most. Ends the process with its parent."""
        if self._pending:
            pending, self._pending = self._pending, []
            return pending
        # Not select(): a process may have more files open than that can count.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            # A process that the parent forked may hold the other end open.
            return [] if os.getppid() == self._parent else os._exit(1)
        try:
            data = self._socket.recv(CHUNK)
        except OSError:
            os._exit(1)
        return self._lines.feed(data) if data else os._exit(1)


class ReportingRunner(Runner):
    """Says that a handler is about to be called, before it is."""

    def __init__(self, may_start: Callable[[Job], bool], **options: Any) -> None:
        super().__init__(**options)
        self._may_start = may_start

    def begin(self, job: Job) -> Outcome | Attempt:
        """Calls the handler."""
        return super().begin(job) if self._may_start(job) else Over(job)


class Child:
    """Everything in this process: slots for handlers, and a thread that listens to the parent and shows life."""

    def __init__(self, link: ParentLink, order: Mapping[str, Any], outbox: Outbox) -> None:
        self._link = link
        self._outbox = outbox
        self._dsn: str = order["dsn"]
        self._concurrency: int = order["concurrency"]
        self._lease: float = order["lease"]
        # Jobs and their numbers. Both threads take jobs out of the first; whoever gets one decides about it.
        self._waiting: dict[Job, int] = {}
        self._running: dict[Job, int] = {}
        self._enough = asyncio.Event()
        self._exhausted = False
        self._loop_seen = time.monotonic()
        self._stalled = False

    async def run(self) -> None:
        """Until the parent has said that it is enough."""
        async with AsyncExitStack() as stack:
            try:
                runner = await self._open(stack)
            except BaseException as error:
                self._link.say("broken", describe_error(error))
                raise
            slots = Slots(
                runner=runner,
                deliver=self._report,
                concurrency=self._concurrency,
                exhausted=self._give_up,
            )
            slots.start()
            stack.push_async_callback(slots.close)
            self._link.say("ready", sorted(self._outbox.handlers))
            loop = asyncio.get_running_loop()
            self._loop_lives()  # resources may have taken longer than a lease to open
            threading.Thread(
                target=self._listen, args=(loop, slots), name="pulse-outbox-link", daemon=True
            ).start()
            await self._enough.wait()

    async def _open(self, stack: AsyncExitStack) -> Runner:
        transactions = None
        if any(handler.transactional for handler in self._outbox.handlers.values()):
            transactions = Transactions(self._dsn, schema=self._outbox.schema)
            await transactions.open()
            stack.push_async_callback(transactions.close)
        runner = ReportingRunner(
            self._may_start,
            resources=await stack.enter_async_context(self._outbox.open_resources()),
            redact=self._outbox.redact,
            random=random.Random(),
            threads=self._concurrency,
            transactions=transactions,
            sentry=sentry.connect(),
        )
        stack.callback(runner.close)
        return runner

    # In the event loop

    def _may_start(self, job: Job) -> bool:
        """Says that a job starts, unless it has just been given back."""
        number = self._waiting.pop(job, None)
        if number is None:
            return False
        self._running[job] = number
        self._link.send(b'["started",%d]\n' % number)
        return True

    def _report(self, outcome: Outcome) -> None:
        number = self._running.pop(outcome.job, None)
        if number is not None:
            self._link.send(encode_outcome(number, outcome))

    def _give_up(self, why: str) -> None:
        """Half of the slots are lost to handlers that can't be stopped: the parent will end this process."""
        if not self._exhausted:
            self._exhausted = True
            self._link.say("exhausted", why)

    def _loop_lives(self) -> None:
        self._loop_seen = time.monotonic()
        self._stalled = False

    # In the thread of the link: a handler that blocks the event loop must not be taken for a dead process

    def _listen(self, loop: asyncio.AbstractEventLoop, slots: Slots) -> None:
        tick = min(TICK_MAX, self._lease / 10)
        next_tick = time.monotonic()
        try:
            while True:
                if jobs := self._obey(self._link.receive(tick), loop):
                    loop.call_soon_threadsafe(slots.add, jobs)
                if time.monotonic() >= next_tick:
                    loop.call_soon_threadsafe(self._loop_lives)
                    self._show_life(time.monotonic() - self._loop_seen)
                    next_tick = time.monotonic() + tick
        except BaseException:
            if loop.is_closed():
                return  # the process is at its end
            write_whole(*sys.exc_info())
            os._exit(1)

    def _obey(self, lines: list[bytes], loop: asyncio.AbstractEventLoop) -> list[Job]:
        """Does what the parent says, and returns the jobs that it sent."""
        jobs = []
        for line in lines:
            match decode(line):
                case ["job", number, *fields]:
                    claim = decode_claim(fields)
                    job = Job(claim, self._outbox.handlers[claim.topic], time.monotonic())
                    self._waiting[job] = number
                    jobs.append(job)
                case ["give_back", topics]:
                    self._give_back(topics)
                case ["end"]:
                    loop.call_soon_threadsafe(self._enough.set)
        if self._exhausted or self._stalled:
            self._give_back(None)  # looked at with every tick: what waits here could wait for ever
        return jobs

    def _give_back(self, topics: list[str] | None) -> None:
        for job in list(self._waiting):
            if topics is None or job.claim.topic in topics:
                number = self._waiting.pop(job, None)
                if number is not None:
                    self._link.send(encode_outcome(number, Released(job)))

    def _show_life(self, still_for: float) -> None:
        if still_for > self._lease and not self._stalled:
            self._stalled = True
            self._link.say("stalled", still_for)
        self._link.say("alive", still_for)


if __name__ == "__main__":
    main(sys.argv[1:])
