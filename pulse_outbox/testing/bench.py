"""The bench: the dispatcher's own parts, put together for one event at a time and on simulated time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, assert_never
from uuid import UUID

from pulse_outbox.dispatcher.jobs import (
    Completed,
    Failed,
    InFlight,
    Job,
    Lapsed,
    Outcome,
    Over,
    Released,
    Snoozed,
)
from pulse_outbox.dispatcher.report import Report
from pulse_outbox.dispatcher.running import Runner
from pulse_outbox.dispatcher.settling import Settler
from pulse_outbox.dispatcher.slots import Slots
from pulse_outbox.dispatcher.state import Condition, Tally, Throughput
from pulse_outbox.errors import SettingsError
from pulse_outbox.failures import Verdict
from pulse_outbox.testing.crashing import Killed
from pulse_outbox.testing.links import Borrowed

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from random import Random

    from pulse_outbox.claims import Claim
    from pulse_outbox.dispatcher.running import RunsInTransaction
    from pulse_outbox.failures import Redact
    from pulse_outbox.handlers import Handler
    from pulse_outbox.link import AnyLink
    from pulse_outbox.store import Answer, Store
    from pulse_outbox.testing.crashing import Crash, CrashPoint

# One event runs at a time; a handler that ignores its timeout keeps its slot.
SLOTS = 4

RunStatus = Literal["COMPLETED", "RETRYING", "DEAD_LETTERED", "PENDING", "RUNNING", "LOST"]
"""PENDING: given back unstarted. RUNNING: the run crashed. LOST: the lease was somebody else's when it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of one run of an event."""

    id: UUID
    topic: str
    handler: str
    status: RunStatus
    attempt: int
    max_attempts: int
    verdict: Verdict | None = None
    """What the classifier said of its failure, and by which rule."""
    error: str | None = None
    """The text that is stored of its failure."""
    exception: BaseException | None = None
    """What the handler raised, with its traceback."""
    retry_in: timedelta | None = None
    """When it is RETRYING: how long it waits."""
    crashed_at: CrashPoint | None = None

    def raise_if_failed(self) -> None:
        """Raises what the handler raised; an AssertionError where it did not complete for another reason."""
        if self.status == "COMPLETED":
            return
        if self.exception is not None:
            raise self.exception
        raise AssertionError(f"{self.topic} {self.id} did not complete: {self}")


class _WatchedRunner(Runner):
    """Remembers what the handler raised and how it was judged: an outcome has only the text of it."""

    raised: BaseException | None = None
    verdict: Verdict | None = None
    killed = False

    def forget(self) -> None:
        """Before the next run."""
        self.raised = self.verdict = None
        self.killed = False

    def failed(self, job: Job, error: BaseException, *, decoding: bool = False) -> Failed | Snoozed:
        if isinstance(error, Killed):
            # Nobody lives to judge it, and the application's own `classify` must not see it.
            self.killed = True
            return Failed(job, "killed", {}, timedelta(), False)
        return super().failed(job, error, decoding=decoding)

    def judge(self, job: Job, error: BaseException, *, decoding: bool = False) -> Verdict:
        self.raised, self.verdict = error, super().judge(job, error, decoding=decoding)
        return self.verdict


class Bench:
    """Runs one claim after the other through runner, slots and settler."""

    def __init__(
        self, link: AnyLink, store: Store, runner: _WatchedRunner, slots: Slots, settler: Settler
    ) -> None:
        self._link = link
        self._store = store
        self._runner = runner
        self._slots = slots
        self._settler = settler
        self.delivered: asyncio.Future[Outcome] | None = None
        self.settled: asyncio.Future[tuple[Outcome, Answer | None]] | None = None
        self.settling: asyncio.Task[None] | None = None

    async def run(self, claim: Claim, handler: Handler, crash: Crash | None) -> Ran:
        """One attempt, from the claim to the stored result, unless it crashes on the way."""
        if crash is not None and crash.strikes(claim.topic, "after_claim"):
            return _crashed(claim, handler, crash)
        armed = handler if crash is None else crash.in_handler(handler)
        outcome = await self._outcome(Job(claim, armed, time.monotonic()))
        if crash is not None and (self._runner.killed or crash.strikes(claim.topic, "before_complete")):
            return _crashed(claim, handler, crash)
        outcome, answer = await self._stored(outcome)
        if crash is not None and crash.strikes(claim.topic, "after_complete"):
            return _crashed(claim, handler, crash)
        return self._ran(claim, handler, outcome, answer)

    async def _outcome(self, job: Job) -> Outcome:
        self._runner.forget()
        self.delivered = asyncio.get_running_loop().create_future()
        if not isinstance(self._link, Borrowed):
            self._slots.add([job])
            return await self.delivered
        async with self._link.around_handler():
            self._slots.add([job])
            return await self.delivered

    async def _stored(self, outcome: Outcome) -> tuple[Outcome, Answer | None]:
        self.settled = asyncio.get_running_loop().create_future()
        self._settler.add(outcome)
        assert self.settling is not None
        either: list[asyncio.Future[Any]] = [self.settled, self.settling]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.settling.done():
            self.settling.result()  # raises: the database is gone, for one
        return self.settled.result()

    def _ran(self, claim: Claim, handler: Handler, outcome: Outcome, answer: Answer | None) -> Ran:
        status: RunStatus
        retry_in: timedelta | None = None
        error: str | None = None
        verdict = self._runner.verdict
        match outcome:
            case Completed():
                status = "COMPLETED"
            case Over():
                status = "LOST" if outcome.lost else "COMPLETED"
            case Failed():
                status = "DEAD_LETTERED" if answer == "DEAD_LETTERED" else "RETRYING"
                retry_in = outcome.delay if status == "RETRYING" else None
                error = outcome.error
                kind = outcome.failure["verdict"]
                verdict = Verdict(
                    kind=kind, rule=outcome.failure["rule"], error_class=outcome.failure["error_class"]
                )
            case Snoozed():
                status, retry_in, error = "RETRYING", outcome.delay, outcome.reason
            case Released():
                status = "PENDING"
            case Lapsed():
                raise AssertionError("the test kit has no child processes")
            case _:
                assert_never(outcome)
        return Ran(
            id=claim.event_id,
            topic=claim.topic,
            handler=handler.name,
            status="LOST" if answer == "lost" else status,
            attempt=claim.attempts,
            max_attempts=claim.max_attempts,
            verdict=verdict,
            error=error,
            exception=self._runner.raised,
            retry_in=retry_in,
        )


def _crashed(claim: Claim, handler: Handler, crash: Crash) -> Ran:
    ran = Ran(
        id=claim.event_id,
        topic=claim.topic,
        handler=handler.name,
        status="COMPLETED" if crash.point == "after_complete" else "RUNNING",
        attempt=claim.attempts,
        max_attempts=claim.max_attempts,
        crashed_at=crash.point,
    )
    crash.crashed.append(ran)
    return ran


@asynccontextmanager
async def open_bench(
    link: AnyLink,
    store: Store,
    *,
    threads: int | Executor,
    transactions: RunsInTransaction | None,
    resources: Any,
    topics: Iterable[str],
    redact: Redact | None,
    random: Random,
) -> AsyncIterator[Bench]:
    """A bench whose parts end with the context."""
    runner = _WatchedRunner(
        resources=resources, redact=redact, random=random, threads=threads, transactions=transactions
    )
    report = Report(
        tally=Tally(),
        throughput=Throughput(topics, time.monotonic()),
        sentry=None,
        died=lambda: None,
        due_in=lambda _: None,
    )

    def deliver(outcome: Outcome) -> None:
        if bench.delivered is not None and not bench.delivered.done():
            bench.delivered.set_result(outcome)

    def exhausted(why: str) -> None:
        if bench.delivered is not None and not bench.delivered.done():
            bench.delivered.set_exception(SettingsError(why))

    def settled(outcomes: Sequence[Outcome], answers: Mapping[UUID, Answer]) -> None:
        report.settled(outcomes, answers)
        for outcome in outcomes:
            if bench.settled is not None and not bench.settled.done():
                bench.settled.set_result((outcome, answers.get(outcome.job.claim.event_id)))

    slots = Slots(runner=runner, deliver=deliver, concurrency=SLOTS, exhausted=exhausted)
    settler = Settler(store, in_flight=InFlight(), batch=1, condition=Condition(), settled=settled)
    bench = Bench(link, store, runner, slots, settler)
    async with AsyncExitStack() as stack:
        stack.callback(runner.close)
        slots.start()
        stack.push_async_callback(slots.close)
        bench.settling = asyncio.create_task(settler.run())
        stack.callback(bench.settling.cancel)
        yield bench
