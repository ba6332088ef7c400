"""Running one handler: the event is built, the function called, and whatever comes of it becomes an outcome."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
from contextvars import Context, ContextVar, copy_context
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

from pydantic_core import from_json

from pulse_outbox.dispatcher.jobs import Completed, Failed, Job, Outcome, Over, Released, Snoozed
from pulse_outbox.dispatcher.threads import InExecutor, Threads
from pulse_outbox.dispatcher.transactions import LeaseLost, NotStarted
from pulse_outbox.events import event_of_claim
from pulse_outbox.failures import PayloadError, describe_error
from pulse_outbox.log import log
from pulse_outbox.trace import HEADER as TRACE_HEADER
from pulse_outbox.trace import trace_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from concurrent.futures import Executor
    from random import Random

    from pulse_outbox.dispatcher.sentry import Sentry
    from pulse_outbox.events import Event
    from pulse_outbox.failures import Redact, Verdict

current_event: ContextVar[Event[Any] | None] = ContextVar("pulse_outbox_event", default=None)
"""The event that the running code works on; log lines take their context from it."""


class RunsInTransaction(Protocol):
    """Runs a transactional handler and completes its event with it; `Transactions` in a dispatcher."""

    async def run_async(self, job: Job, build: Callable[[Any], Event[Any]]) -> None: ...
    def run_sync(self, job: Job, build: Callable[[Any], Event[Any]]) -> None: ...


class Runner:
    """Runs one job and says what came of it. Never raises, except when its task is cancelled from outside.

    *threads*: how many sync handlers at once, or what runs them.
    """

    def __init__(
        self,
        *,
        resources: Any,
        redact: Redact | None,
        random: Random,
        threads: int | Executor,
        transactions: RunsInTransaction | None = None,
        sentry: Sentry | None = None,
    ) -> None:
        self._resources = resources
        self._sentry = sentry
        self._redact = redact
        self._random = random
        self._transactions = transactions
        self.left_behind = 0
        """Handlers that still run in threads although their slots were closed."""
        self._threads = Threads(threads) if isinstance(threads, int) else InExecutor(threads)

    def close(self) -> None:
        """Lets the threads go; one that is stuck is not waited for."""
        self._threads.close()

    def begin(self, job: Job) -> Outcome | Attempt:
        """Calls the handler and lets it go on until it waits for something: one that never does is over then."""
        try:
            event = self.event_of(job)
        except PayloadError as error:
            return self.failed(job, error, decoding=True)
        # In a context of its own: what a handler binds (to its logger, say) must not reach the next one in the slot.
        context = copy_context()
        attempt = self._attempt(job, event) if self._sentry is None else self._attempt_in_scope(job, event)
        try:
            return Attempt(context, attempt, context.run(attempt.send, None))
        except StopIteration as done:
            outcome: Outcome = done.value
            return outcome

    async def _attempt_in_scope(self, job: Job, event: Event[Any]) -> Outcome:
        assert self._sentry is not None
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
        call = self._threads.call(copy_context().run, _call, function, *arguments)
        try:
            returned = await call.answer
        except asyncio.CancelledError:
            self.left_behind += not call.withdraw()
            raise
        finally:
            del call  # an error's traceback holds this frame, and the call its error
        if inspect.isawaitable(returned):
            await returned

    async def _in_transaction(self, job: Job) -> None:
        assert self._transactions is not None

        def build(connection: Any) -> Event[Any]:
            event = self.event_of(job, connection)
            current_event.set(event)
            job.begun_at = time.monotonic()
            return event

        if job.handler.is_async:
            await self._transactions.run_async(job, build)
        else:
            await self._in_thread(self._transactions.run_sync, job, build)

    def event_of(self, job: Job, connection: Any = None) -> Event[Any]:
        """What the handler gets. A payload or headers that can't be decoded are a PayloadError of this job alone."""
        claim = job.claim
        headers: Any = {}
        if claim.headers is not None:
            try:
                headers = from_json(claim.headers)
            except (ValueError, RecursionError):
                headers = None
            if not isinstance(headers, dict):
                raise PayloadError("the headers are not a JSON object that can be decoded")
        return event_of_claim(claim, job.handler.decode(claim.payload), headers, self._resources, connection)

    def failed(self, job: Job, error: BaseException, *, decoding: bool = False) -> Failed | Snoozed:
        """The outcome of an exception: judged by the handler's policy, described without secrets."""
        claim, handler = job.claim, job.handler
        verdict = self.judge(job, error, decoding=decoding)
        text = describe_error(error, self._redact)
        delay = verdict.delay if verdict.at is None else verdict.at - job.database_time()
        if verdict.kind == "later":
            if delay is not None and delay > timedelta():
                return Snoozed(job, delay, text)
            # Due at once, and free: it would run for ever. It is an attempt like any other.
            verdict, delay = replace(verdict, kind="transient", rule="retry_later.past"), None
        if delay is None:
            delay = handler.retry.delay(claim.attempts, self._random)
        return Failed(
            job,
            text,
            verdict.record(handler.name),
            max(delay, timedelta()),
            verdict.kind == "terminal",
        )

    def judge(self, job: Job, error: BaseException, *, decoding: bool = False) -> Verdict:
        """The verdict of the handler's policy."""
        return job.handler.retry.judge(
            error, decoding=decoding, snoozes=job.claim.snoozes, age=timedelta(seconds=job.age())
        )


class Attempt:
    """A handler that waits for something. Awaiting this lets it go on, each step in its own context.

    A task of its own would do the same and cost more.
    """

    __slots__ = ("_awaited", "_context", "_coroutine")

    def __init__(self, context: Context, coroutine: Coroutine[Any, Any, Outcome], awaited: Any) -> None:
        self._context = context
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, Outcome]:
        step: Callable[[], Any]
        while True:
            try:
                sent = yield self._awaited
            except BaseException as error:
                step = functools.partial(self._coroutine.throw, error)
            else:
                step = functools.partial(self._coroutine.send, sent)
            try:
                self._awaited = self._context.run(step)
            except StopIteration as done:
                return cast("Outcome", done.value)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    django = _django()
    django()
    try:
        return function(*arguments)
    except (StopIteration, GeneratorExit) as error:
        # These steer coroutines: whoever awaited a future with one of them would wait for ever, or be closed.
        raise RuntimeError(f"the handler raised {type(error).__name__}") from error
    finally:
        django()


def _django() -> Callable[[], None]:
    """What Django, where the application has it, wants before and after the work of a thread."""
    if "django.db" not in sys.modules:
        return _nothing
    from pulse_outbox.connections.django import end_request

    return end_request


def _nothing() -> None:
    """The usual case."""


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


def _trace_fields(headers: str | None) -> dict[str, str]:
    if headers is None or f'"{TRACE_HEADER}"' not in headers:
        return {}
    try:
        decoded = from_json(headers)
    except (ValueError, RecursionError):
        return {}
    return trace_fields(decoded) if isinstance(decoded, dict) else {}
