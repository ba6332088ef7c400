"""Slots: a fixed number of places, each of which runs one job after the other.

They are long-lived coroutines: a task for each job would cost a third of the throughput, a timeout object for each job
a fifth. So deadlines are looked at together, a few times a second.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from pulse_outbox.dispatcher.jobs import Released, apart_once
from pulse_outbox.dispatcher.running import Attempt, job_fields
from pulse_outbox.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pulse_outbox.dispatcher.jobs import Job, Outcome
    from pulse_outbox.dispatcher.running import Runner

SLICE = 0.002
"""How long slots may go on, all together, without giving the event loop a chance, in seconds."""
WAKE_ON = 2
"""How many others a slot wakes whose handler waits for something. Slots whose handlers never do need no help."""
DEADLINE_CHECK = 0.1
CANCEL_PATIENCE = 2.0
"""How long a cancelled handler may take to end before its result is settled without it."""


class TimedOut(TimeoutError):
    """The handler ran past its timeout."""


class Slot:
    """One of the places where a job can run."""

    __slots__ = ("deadline", "expired_at", "job", "settled_early", "task", "wakeup")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.wakeup: asyncio.Future[None] | None = None
        self.job: Job | None = None
        self.deadline: float | None = None
        self.expired_at: float | None = None
        self.settled_early = False


class Slots:
    """All of a process's slots and the queue that they take their jobs from."""

    def __init__(
        self,
        *,
        runner: Runner,
        deliver: Callable[[Outcome], None],
        concurrency: int,
        exhausted: Callable[[str], None],
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner = runner
        self._deliver = deliver
        self._exhausted = exhausted
        self._freed = freed
        self._queue: deque[Job] = deque()
        self._idle: list[Slot] = []
        self._slots = [Slot() for _ in range(concurrency)]
        self._running = 0
        self.ended = 0
        """Jobs that have started and ended."""
        self._expected: list[list[Job]] = []
        """Jobs that may not start yet, claim by claim."""
        self._slice_end = 0.0
        self._slice_over = False
        self._checking: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        """Opens the slots; the event loop must be running."""
        for number, slot in enumerate(self._slots):
            slot.task = asyncio.create_task(self._work(slot), name=f"pulse-outbox-slot-{number}")
        self._checking = asyncio.create_task(self._check_deadlines(), name="pulse-outbox-deadlines")

    @property
    def waiting(self) -> int:
        """Jobs that have not started."""
        return len(self._queue) + self.expected

    @property
    def expected(self) -> int:
        """Those of them that may not start yet."""
        return sum(map(len, self._expected))

    @property
    def free(self) -> int:
        """Slots that a job given now would start in at once."""
        # Not counted by who is idle: slots that have been woken for a queued job are not idle any more.
        return max(0, len(self._slots) - self._running - self.waiting)

    @property
    def running(self) -> int:
        """Jobs that have started and not ended."""
        return self._running

    @property
    def worth_waiting_for(self) -> int:
        """Those of them whose result is still wanted."""
        return sum(slot.job is not None and not slot.settled_early for slot in self._slots)

    def add(self, jobs: Sequence[Job]) -> None:
        """Gives jobs to the slots, in order; budgets of one even before those that wait already."""
        once, others = apart_once(jobs)
        self._queue.extendleft(reversed(once))
        self._queue.extend(others)
        if not self._slice_over:
            self._next_slice()

    def expect(self, jobs: list[Job]) -> None:
        """These will be added when they may start, and have places already. What is taken back leaves the list."""
        self._expected.append(jobs)

    def expect_no_more(self, jobs: list[Job]) -> None:
        """They are added now, or never."""
        self._expected = [others for others in self._expected if others is not jobs]
        self._freed()

    def _wake(self, slots: int) -> None:
        while slots and self._idle and self._queue:
            wakeup = self._idle.pop().wakeup
            if wakeup is not None and not wakeup.done():
                wakeup.set_result(None)
                slots -= 1

    def take_back(self, which: Callable[[Job], bool]) -> list[Job]:
        """Takes back jobs that have not started."""
        taken = [job for job in chain(self._queue, *self._expected) if which(job) and job.withdraw()]
        self._queue = deque(job for job in self._queue if job.stage == "waiting")
        for jobs in self._expected:
            jobs[:] = [job for job in jobs if job.stage == "waiting"]
        return taken

    def oldest_wait(self) -> float:
        """How long the job that is next has been waiting, in seconds; 0 when none does."""
        return time.monotonic() - self._queue[0].claimed_at if self._queue and not self._idle else 0.0

    def take_back_beyond(self, keep: int) -> list[Job]:
        """Takes all but the first *keep* jobs that have not started out of the queue."""
        beyond = set(list(self._queue)[keep:])
        return self.take_back(lambda job: job in beyond)

    async def close(self) -> None:
        """Cancels what still runs and waits a moment for it; a handler that ignores that is left behind."""
        self._closing = True
        tasks = [task for task in (self._checking, *(slot.task for slot in self._slots)) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_PATIENCE)

    async def _work(self, slot: Slot) -> None:
        while not self._closing:  # a handler may have swallowed the cancellation that was meant for the slot
            now = time.monotonic()
            if now >= self._slice_end and self._queue and not self._slice_over:
                self._slice_over = True
                asyncio.get_running_loop().call_soon(self._next_slice)
            if not self._queue or self._slice_over:
                await self._rest(slot)
            else:
                job = self._queue.popleft()
                if now > job.leased_until:
                    if job.withdraw():
                        self._deliver(Released(job))  # somebody else may be running it by now
                elif job.start():  # or it was withdrawn from outside while it waited here
                    outcome: Outcome | Attempt | None = self._begin(job)
                    assert slot.task is not None  # not before: an eager task begins before it is known here
                    if isinstance(outcome, Attempt):
                        outcome = await self._finish(slot, job, outcome, now)
                    elif slot.task.cancelling():
                        await self._forget_cancellation(slot.task)
                    self.ended += 1
                    job.stage = "finished"
                    if outcome is not None:
                        self._deliver(outcome)
                    else:
                        self._freed()

    async def _rest(self, slot: Slot) -> None:
        """Until there is something to do. A handler that has ended may have left a timer that cancels its task."""
        slot.wakeup = asyncio.get_running_loop().create_future()
        self._idle.append(slot)
        try:
            await slot.wakeup
        except asyncio.CancelledError:
            if self._closing:
                raise
            assert slot.task is not None
            while slot.task.cancelling():
                slot.task.uncancel()
            if slot in self._idle:
                self._idle.remove(slot)

    def _next_slice(self) -> None:
        self._slice_end = time.monotonic() + SLICE
        self._slice_over = False
        self._wake(1)

    def _begin(self, job: Job) -> Outcome | Attempt:
        """Runs a job until its handler waits for something. One that never does needs nothing of its slot."""
        try:
            return self._runner.begin(job)
        except BaseException as error:
            return self._escaped(job, error)

    async def _finish(self, slot: Slot, job: Job, attempt: Attempt, now: float) -> Outcome | None:
        """The rest of a job that was begun at *now*; None when it was settled before it ended."""
        assert slot.task is not None
        slot.job = job
        self._running += 1
        if job.handler.timeout is not None and not job.handler.transactional:
            slot.deadline = now + job.handler.timeout
        self._wake(WAKE_ON)
        try:
            try:
                outcome = await attempt
            except BaseException as error:
                outcome = self._escaped(job, error)
            if slot.task.cancelling():
                await self._forget_cancellation(slot.task)
        finally:
            self._running -= 1
            slot.job, slot.deadline = None, None
            expired, slot.expired_at = slot.expired_at, None
            early, slot.settled_early = slot.settled_early, False
        if expired is None:
            return outcome
        return None if early else self._timed_out(job)

    def _escaped(self, job: Job, error: BaseException) -> Outcome:
        """What came of a handler whose task was cancelled, whoever did it. Only closing ends a slot."""
        if self._closing and not job.handler.is_async:
            raise error  # its thread may still be at it: the lease decides
        if self._closing:
            return self._cut_off(job, error)
        return self._runner.failed(job, error)

    async def _forget_cancellation(self, task: asyncio.Task[None]) -> None:
        """A cancellation that a handler swallowed, or asked for, must not reach the next one in the slot."""
        try:
            await asyncio.sleep(0)  # takes delivery of one that is still on its way
        except asyncio.CancelledError:
            if self._closing:
                raise
        while task.cancelling():
            task.uncancel()

    def _cut_off(self, job: Job, error: BaseException) -> Outcome:
        """The grace was over, and the handler obeyed: it goes back, unless it must never be started twice."""
        if job.claim.max_attempts == 1:
            return self._runner.failed(job, error)
        return Released(job)

    def _timed_out(self, job: Job) -> Outcome:
        return self._runner.failed(job, TimedOut(f"the handler ran longer than {job.handler.timeout:g} s"))

    async def _check_deadlines(self) -> None:
        while True:
            await asyncio.sleep(DEADLINE_CHECK)
            now = time.monotonic()
            stuck = 0
            for slot in self._slots:
                if (job := slot.job) and job.handler.timeout and job.begun_at and not slot.deadline:
                    slot.deadline = job.begun_at + job.handler.timeout
                if slot.deadline is not None and slot.expired_at is None and now >= slot.deadline:
                    self._expire(slot, now)
                elif (
                    slot.expired_at is not None
                    and not slot.settled_early
                    and now >= slot.expired_at + CANCEL_PATIENCE
                ):
                    self._settle_early(slot)
                stuck += slot.settled_early
            if stuck * 2 >= len(self._slots) and stuck:
                self._exhausted(
                    f"{stuck} of {len(self._slots)} slots are held by handlers that ran past their timeout"
                    " and can't be stopped"
                )

    def _expire(self, slot: Slot, now: float) -> None:
        assert slot.job is not None
        assert slot.task is not None
        slot.expired_at = now
        if slot.job.handler.is_async:
            slot.task.cancel()
        else:
            self._settle_early(slot)  # nothing can stop a thread

    def _settle_early(self, slot: Slot) -> None:
        assert slot.job is not None
        slot.settled_early = True
        log.warning("outbox.handler_stuck", **job_fields(slot.job), timeout=slot.job.handler.timeout)
        self._deliver(self._timed_out(slot.job))
