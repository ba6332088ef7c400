"""One child process as its dispatcher sees it: started, spoken to, watched, and buried."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from typing import TYPE_CHECKING, Any

from pulse_outbox.dispatcher.jobs import Job, Lapsed, Released
from pulse_outbox.dispatcher.slots import CANCEL_PATIENCE
from pulse_outbox.dispatcher.wire import CHUNK, Lines, decode, decode_outcome, encode, encode_job
from pulse_outbox.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pulse_outbox.dispatcher.jobs import Outcome

START_TIMEOUT = 60.0
"""What the application's import and lifespan may take in a child, in seconds."""
END_PATIENCE = 2.0
"""How long a child may take to close its resources."""
DEATH_NEWS = 1.0
"""How long after the end of its connection a living child is ended."""


class ChildFailed(Exception):
    """A child process could not start."""


class ChildProcess:
    """One child, and the jobs that were sent to it.

    *deliver* takes the outcome of each of them, exactly one, whatever happens to the process.
    """

    def __init__(self, *, deliver: Callable[[Outcome], None], concurrency: int, lease: float) -> None:
        self.concurrency = concurrency
        self.topics: frozenset[str] = frozenset()
        self.ended = asyncio.Event()
        self.retired = False
        """It finishes what it has and gets nothing more."""
        self.reported = 0
        """Jobs that it has told the outcome of."""
        self.burdened = False
        """It has started a job, ever."""
        self.stirred = asyncio.Event()
        """Something has changed."""
        self._deliver = deliver
        self._lease = lease
        self._jobs: dict[int, Job] = {}
        self._started: dict[int, float] = {}
        self._numbers = 0
        self._lines = Lines()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._to_send: asyncio.Queue[bytes] = asyncio.Queue()
        self._silent_for = 0.0
        self._loop_still_for = 0.0
        self._killed_because: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.seeing_off: asyncio.Task[None] | None = None

    @property
    def outstanding(self) -> int:
        """Jobs that it has and has not told the outcome of."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Jobs that it has and has not started."""
        return len(self._jobs) - len(self._started)

    @property
    def transactional(self) -> int:
        """Jobs that it has and that need a connection for their transaction."""
        return sum(job.handler.transactional for job in self._jobs.values())

    @property
    def usable(self) -> bool:
        """May be sent more."""
        return not self.retired and not self.ended.is_set()

    # Life

    async def start(self, order: Mapping[str, object]) -> None:
        """Starts the process and waits until it has loaded the application; ChildFailed when that goes wrong."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        # Never one of the standard descriptors, which may be closed in this process: the child gets its own there.
        descriptor = fcntl(theirs, F_DUPFD_CLOEXEC, 3)
        theirs.close()
        try:
            # From the event loop's thread: Linux would end the child with the thread that started it.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pulse_outbox.dispatcher.child",
                str(descriptor),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        except BaseException as error:
            self._socket.close()
            self.ended.set()
            if isinstance(error, OSError):
                raise ChildFailed(f"can't start a process: {error.strerror}") from error
            raise
        finally:
            os.close(descriptor)
        self.pid = self._process.pid
        asyncio.get_running_loop().add_reader(self._socket, self._read)
        self._to_send.put_nowait(encode(order))
        self._tasks = [
            asyncio.create_task(self._send()),
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._wait()),
        ]
        done, _ = await asyncio.wait({self._ready}, timeout=START_TIMEOUT)
        if not done:
            self.kill(f"not ready within {START_TIMEOUT:g} s")
            raise ChildFailed(f"the application was not loaded within {START_TIMEOUT:g} s")
        self._ready.result()

    def run(self, jobs: Iterable[Job]) -> None:
        """Sends jobs. From here on the child may have started them."""
        for job in jobs:
            self._numbers += 1
            self._jobs[self._numbers] = job
            job.start()
            self._to_send.put_nowait(encode_job(self._numbers, job.claim))
        if self.ended.is_set():
            self._bury()

    def give_back(self, topics: Sequence[str] | None) -> None:
        """Asks for what it has not started, of these topics or of all."""
        if self.waiting:
            self._to_send.put_nowait(encode("give_back", topics))

    async def end(self) -> None:
        """Lets it close its resources; kills it when that takes too long."""
        self.retired = True
        self._to_send.put_nowait(encode("end"))
        try:
            async with asyncio.timeout(END_PATIENCE):
                await self.ended.wait()
        except TimeoutError:
            self.kill("it did not end when it was told to")
            await self.ended.wait()

    def kill(self, why: str) -> None:
        """Ends it now; what it had started lapses for the reason given."""
        if not self.ended.is_set():
            self._killed_because = self._killed_because or why
            self.retired = True
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _wait(self) -> None:
        """The end of the process: what it has said until then counts, and the rest is decided here."""
        code = await self._process.wait()
        # All that it ever wrote is in the socket by now. The end of file would not do as a sign: a process that a
        # handler has forked may live on and hold the other end.
        while self._read():
            pass
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for task in self._tasks[:2]:
            task.cancel()
        self._error = (
            f"worker process killed: {self._killed_because}" if self._killed_because else describe_exit(code)
        )
        self.ended.set()
        self._not_ready(describe_exit(code, "before it was ready"))
        self._bury()

    def _not_ready(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(ChildFailed(why))
            self._ready.exception()  # or asyncio complains when nobody waits for it any more

    def _bury(self) -> None:
        jobs, self._jobs = self._jobs, {}
        started, self._started = self._started, {}
        if jobs:
            log.warning(
                "outbox.child_died", pid=self.pid, error=self._error, started=len(started), jobs=len(jobs)
            )
        for number, job in jobs.items():
            job.stage = "finished"
            self._deliver(Lapsed(job, self._error) if number in started else Released(job))
        self.stirred.set()

    async def _watch(self) -> None:
        """Ends a child that shows no life, or whose event loop a handler blocks past its own timeout.

        Time counts only while this process is awake itself: both may have been stopped together.
        """
        interval = min(0.25, self._lease / 10)
        while True:
            await asyncio.sleep(interval)
            self._read()
            self._silent_for += interval
            if self._silent_for > self._lease and self._ready.done():
                self.kill(f"no sign of life for {self._lease:g} s")
            elif self._loop_still_for > CANCEL_PATIENCE and (job := self._overdue()):
                self.kill(f"the handler ran longer than {job.handler.timeout:g} s and could not be stopped")
            elif self.retired and not self._jobs:
                await self.end()
            elif self._some_have_expired():
                self.give_back(None)

    def _some_have_expired(self) -> bool:
        """Somebody else may be running them by now: they must not start here."""
        now = time.monotonic()
        return any(
            job.leased_until < now for number, job in self._jobs.items() if number not in self._started
        )

    def _overdue(self) -> Job | None:
        now = time.monotonic()
        for number, started_at in self._started.items():
            timeout = self._jobs[number].handler.timeout
            if timeout is not None and now > started_at + timeout + 2 * CANCEL_PATIENCE:
                return self._jobs[number]
        return None

    # What is said

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # its end is noticed elsewhere
            while True:
                data = await self._to_send.get()
                while not self._to_send.empty() and len(data) < CHUNK:
                    data += self._to_send.get_nowait()
                await loop.sock_sendall(self._socket, data)

    def _read(self) -> bool:
        """Takes what has arrived; False when that is nothing."""
        try:
            data = self._socket.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            loop = asyncio.get_running_loop()
            if loop.remove_reader(self._socket):
                # Mostly it is dead, which will be told in a moment, with the reason.
                loop.call_later(DEATH_NEWS, self.kill, "it closed the connection to its dispatcher")
            return False
        self._silent_for = 0.0
        try:
            for line in self._lines.feed(data):
                self._hear(decode(line))
        except (ValueError, LookupError, TypeError):  # somebody else wrote into the socket
            self.kill("it sent something that makes no sense")
        self.stirred.set()
        return True

    def _hear(self, message: list[Any]) -> None:
        match message:
            case ["started", number]:
                self._started[number] = time.monotonic()
                self.burdened = True
            case ["alive", still_for]:
                self._loop_still_for = still_for
            case ["ready", topics]:
                self.topics = frozenset(topics)
                self._ready.set_result(None)
            case ["broken", why]:
                self.retired = True
                self._not_ready(why)
            case ["exhausted", why]:
                self.retired = True
                log.warning("outbox.child_exhausted", pid=self.pid, why=why)
            case ["stalled", still_for]:
                self.retired = True
                log.warning("outbox.child_stalled", pid=self.pid, seconds=round(still_for, 1))
            case [kind, number, *rest]:
                self._started.pop(number, None)
                job = self._jobs.pop(number)
                outcome = decode_outcome(kind, job, rest)
                job.stage = "finished"
                self.reported += 1
                self._deliver(outcome)


def describe_exit(code: int, when: str = "in the middle of a job") -> str:
    """How a process ended, from what asyncio gives as its return code."""
    if code >= 0:
        return f"worker process ended with exit code {code} {when}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:  # real-time signals have no names
        name = ""
    return f"worker process died: signal {-code}{name}"
