"""Running handlers: a fixed set of slots, each of which takes one job after the other.

Slots are long-lived coroutines: a task for each job would cost a third of the throughput, a timeout object for each
job a fifth. So deadlines are looked at together, a few times a second.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import types
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import structlog
from pydantic_core import from_json

from pulse_outbox.dispatcher.jobs import Completed, Failed, Job, Outcome, Over, Released, Snoozed
from pulse_outbox.dispatcher.transactions import LeaseLost, NotStarted
from pulse_outbox.events import Event
from pulse_outbox.failures import PayloadError, describe_error
from pulse_outbox.trace import HEADER as TRACE_HEADER
from pulse_outbox.trace import trace_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable
    from random import Random

    from pulse_outbox.dispatcher.sentry import Sentry
    from pulse_outbox.dispatcher.transactions import Transactions
    from pulse_outbox.failures import Redact

log = structlog.get_logger("pulse_outbox")

T = TypeVar("T")

current_event: ContextVar[Event[Any] | None] = ContextVar("pulse_outbox_event", default=None)
"""The event that the running code works on; log lines take their context from it."""

SLICE = 0.005
"""How long slots may go on without giving the event loop a chance, in seconds."""
DEADLINE_CHECK = 0.1
CANCEL_PATIENCE = 2.0
"""How long a cancelled handler may take to end before its result is settled without it."""


class TimedOut(TimeoutError):
    """The handler ran past its timeout."""


class Runner:
    """Runs one job and says what came of it. Never raises, except when its task is cancelled from outside."""

    def __init__(
        self,
        *,
        resources: Any,
        redact: Redact | None,
        random: Random,
        threads: int,
        transactions: Transactions | None = None,
        sentry: Sentry | None = None,
    ) -> None:
        self._resources = resources
        self._sentry = sentry
        self._redact = redact
        self._random = random
        self._transactions = transactions
        self.left_behind = 0
        """Handlers that still run in threads although their slots were closed."""
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="pulse-outbox-handler")

    def close(self) -> None:
        """Lets the threads go; one that is stuck is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, job: Job) -> Outcome:
        """The outcome of one attempt."""
        try:
            event = self.event_of(job)
        except PayloadError as error:
            return self.failed(job, error, decoding=True)
        # In a context of its own: what a handler binds (to its logger, say) must not reach the next one in the slot.
        return await _in_context(copy_context(), self._attempt_in_scope(job, event))

    async def _attempt_in_scope(self, job: Job, event: Event[Any]) -> Outcome:
        if self._sentry is None:
            return await self._attempt(job, event)
        with self._sentry.around(event):
            return await self._attempt(job, event)

    async def _attempt(self, job: Job, event: Event[Any]) -> Outcome:
        current_event.set(event)
        try:
            if job.handler.transactional:
                await self._in_transaction(job)
                return Over(job)
            if job.handler.is_async:
                await job.handler.function(event)
            else:
                await self._in_thread(job.handler.function, event)
        except NotStarted as error:
            log.warning("outbox.not_started", **job_fields(job), error=describe_error(error))
            return Released(job)
        except LeaseLost:
            return Over(job, lost=True)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # somebody cancelled the slot; otherwise the handler raised it itself
            return self.failed(job, error)
        except BaseException as error:
            return self.failed(job, error)
        return Completed(job)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> None:
        work = self._threads.submit(copy_context().run, _call, function, *arguments)
        try:
            returned = await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            self.left_behind += not work.done()  # nothing can stop a thread
            raise
        if inspect.isawaitable(returned):
            await returned

    async def _in_transaction(self, job: Job) -> None:
        assert self._transactions is not None

        def build(connection: Any) -> Event[Any]:
            event = self.event_of(job, connection)
            current_event.set(event)
            return event

        if job.handler.is_async:
            await self._transactions.run_async(job, build)
        else:
            await self._in_thread(self._transactions.run_sync, job, build)

    def event_of(self, job: Job, connection: Any = None) -> Event[Any]:
        """What the handler gets. A payload or headers that can't be decoded are a PayloadError of this job alone."""
        claim = job.claim
        headers: Any = {}
        if claim.headers != "{}":
            try:
                headers = from_json(claim.headers)
            except (ValueError, RecursionError):
                headers = None
            if not isinstance(headers, dict):
                raise PayloadError("the headers are not a JSON object that can be decoded")
        return Event(
            claim.event_id,
            claim.topic,
            job.handler.decode(claim.payload),
            headers,
            claim.idempotency_key,
            claim.ordering_key,
            claim.attempts,
            claim.max_attempts,
            claim.generation,
            claim.lease_seq,
            claim.created_at,
            claim.source,
            claim.target,
            claim.snoozes,
            self._resources,
            connection,
        )

    def failed(self, job: Job, error: BaseException, *, decoding: bool = False) -> Failed | Snoozed:
        """The outcome of an exception: judged by the handler's policy, described without secrets."""
        claim, handler = job.claim, job.handler
        verdict = handler.retry.judge(
            error,
            decoding=decoding,
            snoozes=claim.snoozes,
            age=timedelta(seconds=job.age()),
        )
        text = describe_error(error, self._redact)
        if verdict.kind == "later":
            delay = verdict.delay if verdict.at is None else verdict.at - job.database_time()
            if delay is not None and delay > timedelta():
                return Snoozed(job, delay, text)
            # Due at once, and free: it would run for ever. It is an attempt like any other.
            verdict = replace(verdict, kind="transient", rule="retry_later.past")
        return Failed(
            job,
            text,
            {
                "handler": handler.name,
                "error_class": verdict.error_class,
                "verdict": verdict.kind,
                "rule": verdict.rule,
            },
            handler.retry.delay(claim.attempts, self._random),
            verdict.kind == "terminal",
        )


@types.coroutine
def _in_context(context: Context, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Awaits a coroutine, each step of it in this context; a task of its own would do the same and cost more."""
    step: Callable[[], Any] = functools.partial(coroutine.send, None)
    while True:
        try:
            awaited = context.run(step)
        except StopIteration as done:
            return cast("T", done.value)
        try:
            sent = yield awaited
        except BaseException as error:
            step = functools.partial(coroutine.throw, error)
        else:
            step = functools.partial(coroutine.send, sent)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (StopIteration, GeneratorExit) as error:
        # These steer coroutines: whoever awaited a future with one of them would wait for ever, or be closed.
        raise RuntimeError(f"the handler raised {type(error).__name__}") from error


def job_fields(job: Job) -> dict[str, Any]:
    """What every log line about a job says."""
    claim = job.claim
    return {
        "event_id": str(claim.event_id),
        "topic": claim.topic,
        "handler": job.handler.name,
        "attempt": claim.attempts,
        "max_attempts": claim.max_attempts,
        **_trace_fields(claim.headers),
    }


def _trace_fields(headers: str) -> dict[str, str]:
    if f'"{TRACE_HEADER}"' not in headers:
        return {}
    try:
        decoded = from_json(headers)
    except (ValueError, RecursionError):
        return {}
    return trace_fields(decoded) if isinstance(decoded, dict) else {}


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
    ) -> None:
        self._runner = runner
        self._deliver = deliver
        self._exhausted = exhausted
        self._queue: deque[Job] = deque()
        self._idle: list[Slot] = []
        self._slots = [Slot() for _ in range(concurrency)]
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
        return len(self._queue)

    @property
    def free(self) -> int:
        """Slots that a job given now would start in at once."""
        # Not counted by who is idle: slots that have been woken for a queued job are not idle any more.
        return max(0, len(self._slots) - self.running - len(self._queue))

    @property
    def running(self) -> int:
        """Jobs that have started and not ended."""
        return sum(slot.job is not None for slot in self._slots)

    @property
    def worth_waiting_for(self) -> int:
        """Those of them whose result is still wanted."""
        return sum(slot.job is not None and not slot.settled_early for slot in self._slots)

    def add(self, jobs: Iterable[Job]) -> None:
        """Gives jobs to the slots, in order."""
        self._queue.extend(jobs)
        for _ in range(min(len(self._idle), len(self._queue))):
            wakeup = self._idle.pop().wakeup
            if wakeup is not None and not wakeup.done():
                wakeup.set_result(None)

    def take_back(self, which: Callable[[Job], bool]) -> list[Job]:
        """Takes jobs that have not started out of the queue."""
        taken = [job for job in self._queue if job.stage == "waiting" and which(job)]
        for job in taken:
            job.stage = "withdrawn"
        self._queue = deque(job for job in self._queue if job.stage == "waiting")
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
        loop = asyncio.get_running_loop()
        slice_end = loop.time() + SLICE
        while not self._closing:  # a handler may have swallowed the cancellation that was meant for the slot
            if not self._queue:
                slot.wakeup = loop.create_future()
                self._idle.append(slot)
                await slot.wakeup
                slice_end = loop.time() + SLICE
                continue
            job = self._queue.popleft()
            if job.stage != "waiting":
                continue  # withdrawn from outside while it waited here
            if time.monotonic() > job.leased_until:
                job.stage = "withdrawn"
                self._deliver(Released(job))  # somebody else may be running it by now
                continue
            job.stage = "running"
            outcome = await self._run(slot, job, loop)
            job.stage = "finished"
            if outcome is not None:
                self._deliver(outcome)
            if loop.time() >= slice_end:
                await asyncio.sleep(0)
                slice_end = loop.time() + SLICE

    async def _run(self, slot: Slot, job: Job, loop: asyncio.AbstractEventLoop) -> Outcome | None:
        """One job in one slot; None when it was settled before it ended."""
        slot.job = job
        timeout = job.handler.timeout
        if timeout is not None:
            slot.deadline = loop.time() + timeout
        try:
            outcome = await self._outcome(slot, job)
        finally:
            slot.job, slot.deadline = None, None
            expired, slot.expired_at = slot.expired_at, None
            early, slot.settled_early = slot.settled_early, False
        if expired is None:
            return outcome
        return None if early else self._timed_out(job)

    async def _outcome(self, slot: Slot, job: Job) -> Outcome:
        """What came of the handler, whatever it did to the task that it ran in. Only closing ends a slot."""
        assert slot.task is not None
        try:
            outcome = await self._runner.run(job)
        except BaseException as error:
            if self._closing:
                raise
            outcome = self._runner.failed(job, error)
        if slot.task.cancelling():
            await self._forget_cancellation(slot.task)
        return outcome

    async def _forget_cancellation(self, task: asyncio.Task[None]) -> None:
        """A cancellation that a handler swallowed, or asked for, must not reach the next one in the slot."""
        try:
            await asyncio.sleep(0)  # takes delivery of one that is still on its way
        except asyncio.CancelledError:
            if self._closing:
                raise
        while task.cancelling():
            task.uncancel()

    def _timed_out(self, job: Job) -> Outcome:
        return self._runner.failed(job, TimedOut(f"the handler ran longer than {job.handler.timeout:g} s"))

    async def _check_deadlines(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(DEADLINE_CHECK)
            now = loop.time()
            stuck = 0
            for slot in self._slots:
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
