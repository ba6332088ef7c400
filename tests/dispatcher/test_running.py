"""Handlers that do what handlers do: each failure is one attempt of one event, and the worker lives on."""

from __future__ import annotations

import asyncio
import threading
import time
import types
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from pulse_outbox import Dispatcher, Event, NewEvent, Outbox, RetryLater, RetryPolicy, TerminalHandlerError
from tests.support.dispatching import QUICK, Table, dispatching, drain
from tests.support.waiting import wait_until_async

TWICE = RetryPolicy(max_attempts=2, base_delay=0.01, max_delay=0.01)


class TextRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


class NoText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307  on purpose


def a_validation_error() -> ValidationError:
    try:
        TypeAdapter(int).validate_python("s3cret")
    except ValidationError as error:
        return error
    raise AssertionError("unreachable")


# name → what is raised, the attempts that it takes to die of it (2: transient), what last_error starts with
FAILURES: dict[str, tuple[Callable[[], BaseException], int, str]] = {
    "value error": (lambda: ValueError("odd"), 2, "ValueError: odd"),
    "system exit": (lambda: SystemExit(3), 2, "SystemExit: 3"),
    "keyboard interrupt": (KeyboardInterrupt, 2, "KeyboardInterrupt"),
    "cancelled": (asyncio.CancelledError, 2, "CancelledError"),
    "generator exit": (GeneratorExit, 2, ""),
    "stop iteration": (StopIteration, 2, "RuntimeError: "),
    "stop async iteration": (StopAsyncIteration, 2, ""),
    "recursion": (RecursionError, 2, "RecursionError"),
    "memory": (MemoryError, 2, "MemoryError"),
    "connection": (lambda: ConnectionResetError("gone"), 2, "ConnectionResetError"),
    "timeout": (TimeoutError, 2, "TimeoutError"),
    "database": (lambda: psycopg.OperationalError("gone"), 2, "OperationalError"),
    "integrity": (lambda: psycopg.errors.UniqueViolation("twice"), 1, "UniqueViolation"),
    "terminal": (lambda: TerminalHandlerError("never"), 1, "TerminalHandlerError: never"),
    "validation": (a_validation_error, 1, "ValidationError"),
    "mixed group": (lambda: ExceptionGroup("g", [ValueError(), TerminalHandlerError()]), 2, "ExceptionGroup"),
    "terminal group": (lambda: ExceptionGroup("g", [TerminalHandlerError()]), 1, "ExceptionGroup"),
    "base group": (lambda: BaseExceptionGroup("g", [SystemExit(1)]), 2, "BaseExceptionGroup"),
    "text raises": (TextRaises, 2, ""),
    "no text": (NoText, 2, ""),
    "nul": (lambda: ValueError("a\0b"), 2, "ValueError: a\ufffdb"),
    "surrogate": (lambda: ValueError("a\ud800b"), 2, "ValueError: a?b"),
    "ten megabytes": (lambda: ValueError("é" * 10_000_000), 2, "ValueError: éé"),
}


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_every_exception_is_a_failed_attempt(dsn, outbox: Outbox, table: Table, kind: str):
    """FAULTS 25 and 26: recording a failure never fails, and no exception of a handler ends the worker."""
    if kind == "async":

        @outbox.handler("fails", retry=TWICE)
        async def fails_async(event: Event[dict]) -> None:
            raise FAILURES[event.payload["name"]][0]()
    else:

        @outbox.handler("fails", retry=TWICE)
        def fails(event: Event[dict]) -> None:
            raise FAILURES[event.payload["name"]][0]()

    done = []
    outbox.handler("after")(lambda event: done.append(event.id))
    ids = await table.enqueue_many(outbox, [NewEvent("fails", {"name": name}) for name in FAILURES])
    async with dispatching(outbox, dsn, concurrency=4):
        await table.until("status = 'DEAD_LETTERED'", len(FAILURES))
        await table.enqueue(outbox, "after")
        await table.until("status = 'COMPLETED'", 1)

    rows = {name: await table.row(event_id) for name, event_id in zip(FAILURES, ids, strict=True)}
    assert {name: row.attempts for name, row in rows.items()} == {
        name: attempts for name, (_, attempts, _) in FAILURES.items()
    }
    for name, (_, _, start) in FAILURES.items():
        assert rows[name].last_error.startswith(start), name
        assert len(rows[name].last_error.encode()) <= 8192
        assert rows[name].last_failure.keys() == {"handler", "error_class", "verdict", "rule"}
    assert "s3cret" not in rows["validation"].last_error


async def test_a_handler_cannot_break_its_slot(dsn, outbox: Outbox, table: Table):
    """With one slot, whatever one handler does to the task it runs in must not reach the next."""
    ways: dict[str, Callable[[], Any]] = {}

    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    async def cancels_itself_and_waits() -> None:
        await cancels_itself()
        await asyncio.sleep(60)

    async def swallows_its_timeout() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    async def turns_its_timeout_into_an_error() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("instead") from None

    async def raises_in_a_group() -> None:
        async def fail() -> None:
            raise ValueError

        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async def raises_cancelled() -> None:
        raise asyncio.CancelledError

    for way in (
        cancels_itself,
        cancels_itself_and_waits,
        swallows_its_timeout,
        turns_its_timeout_into_an_error,
        raises_in_a_group,
        raises_cancelled,
    ):
        ways[way.__name__] = way

    @outbox.handler("odd", retry=RetryPolicy(max_attempts=1), timeout=0.2)
    async def odd(event: Event[dict]) -> None:
        await ways[event.payload["way"]]()

    for name in [*ways, "raises_in_a_group", "raises_cancelled"]:
        await table.enqueue(outbox, "odd", {"way": name})
    async with dispatching(outbox, dsn, concurrency=1):
        await table.until("status in ('DEAD_LETTERED', 'COMPLETED')", 8)

    errors = {
        row.way: row.last_error
        for row in await table.execute("select payload->>'way' as way, last_error from pulse.outbox")
    }
    assert errors["raises_in_a_group"].startswith("ExceptionGroup")
    assert errors["cancels_itself_and_waits"] == "CancelledError"
    assert "longer than 0.2 s" in errors["swallows_its_timeout"]
    assert "longer than 0.2 s" in errors["turns_its_timeout_into_an_error"]


async def test_returned_values_and_leaked_tasks_are_fine(dsn, outbox: Outbox, table: Table):
    """A plain function that returns a coroutine has its coroutine run; other values are nobody's business."""
    ran = []
    leaked: list[asyncio.Task[None]] = []

    async def later() -> None:
        await asyncio.sleep(0)
        ran.append("coroutine of a plain function")

    outbox.handler("coroutine")(lambda event: later())
    outbox.handler("value")(lambda event: {"not": "awaitable"})

    @outbox.handler("leaks")
    async def leaks(event: Event) -> str:
        leaked.append(asyncio.create_task(asyncio.sleep(0.01)))
        return "something"

    for topic in ("coroutine", "value", "leaks"):
        await table.enqueue(outbox, topic)
    await drain(outbox, dsn)

    assert await table.count("status = 'COMPLETED'") == 3
    assert ran == ["coroutine of a plain function"]
    await asyncio.gather(*leaked)


async def test_context_variables_do_not_leak_into_the_next_job(dsn, outbox: Outbox, table: Table):
    """Loggers and Sentry keep their context there: what one event bound must not be said of the next."""
    variable: ContextVar[str] = ContextVar("variable", default="clean")
    seen = []

    @outbox.handler("async")
    async def bind_async(event: Event) -> None:
        seen.append(variable.get())
        variable.set("dirty")
        await asyncio.sleep(0)
        seen.append(variable.get())

    @outbox.handler("sync")
    def bind_sync(event: Event) -> None:
        seen.append(variable.get())
        variable.set("dirty")

    for topic in ("async", "async", "sync", "sync"):
        await table.enqueue(outbox, topic)
    await drain(outbox, dsn, concurrency=1)

    assert sorted(seen) == ["clean"] * 4 + ["dirty"] * 2


async def test_a_payload_that_cannot_be_decoded_dies_alone(dsn, outbox: Outbox, table: Table):
    """FAULTS 27: neither a model that changed nor nesting that no parser takes stops the batch."""

    class Order(BaseModel):
        number: int

    done = []

    @outbox.handler("order")
    async def handle(event: Event[Order]) -> None:
        done.append(event.payload.number)

    @outbox.handler("plain")
    async def plain(event: Event[dict]) -> None:
        done.append(event.payload["number"])

    bad = [
        await table.enqueue(outbox, "order", {"number": "s3cret"}),
        (await table.execute(f"select pulse.outbox_enqueue('plain', '{'[' * 6000}{']' * 6000}')"))[0][0],
        (await table.execute("select pulse.outbox_enqueue('plain', '1', p_headers => '{}')"))[0][0],
    ]
    for number in range(5):
        await table.enqueue(outbox, "order", {"number": number})
    await drain(outbox, dsn)

    assert sorted(done) == [0, 1, 2, 3, 4]
    rows = [
        (
            await table.execute(
                "select status, attempts, last_error, last_failure from pulse.outbox where event_id = %s",
                event_id,
            )
        )[0]
        for event_id in bad
    ]
    assert [row.status for row in rows[:2]] == ["DEAD_LETTERED", "DEAD_LETTERED"]
    assert [row.attempts for row in rows[:2]] == [1, 1]
    assert rows[0].last_failure["rule"] == "default.decoding"
    assert "s3cret" not in rows[0].last_error
    assert rows[2].status == "RETRYING", "an int has no keys: the handler's own error"


async def test_async_timeout_cancels_and_counts(dsn, outbox: Outbox, table: Table):
    ended = []

    @outbox.handler("slow", timeout=0.2, retry=TWICE)
    async def slow(event: Event) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(event.attempt)

    event_id = await table.enqueue(outbox, "slow")
    async with dispatching(outbox, dsn):
        row = await table.until_status(event_id, "DEAD_LETTERED")

    assert ended == [1, 2]
    assert row.attempts == 2
    assert row.last_error == "TimedOut: the handler ran longer than 0.2 s"


async def test_sync_timeout_settles_but_keeps_the_slot(dsn, outbox: Outbox, table: Table):
    """A thread can't be stopped: its event goes on without it, its slot does not."""
    gate = threading.Event()
    both = threading.Barrier(2, timeout=10)

    @outbox.handler("stuck", timeout=0.2, retry=RetryPolicy(max_attempts=1))
    def stuck(event: Event) -> None:
        gate.wait(30)

    @outbox.handler("quick", retry=RetryPolicy(max_attempts=1))
    def quick(event: Event) -> None:
        both.wait()

    try:
        async with dispatching(outbox, dsn, concurrency=3) as dispatcher:
            event_id = await table.enqueue(outbox, "stuck")
            row = await table.until_status(event_id, "DEAD_LETTERED")
            assert "longer than 0.2 s" in row.last_error

            # Two more run at once, so two slots are left; three would need the lost one.
            for _ in range(4):
                await table.enqueue(outbox, "quick")
            await table.until("topic = 'quick' and status = 'COMPLETED'", 4)
            assert dispatcher._slots.running == 1
            gate.set()
    finally:
        gate.set()


async def test_a_cancellation_that_a_handler_left_behind_does_not_end_the_slot(
    dsn, outbox: Outbox, table: Table
):
    """A timer for a job that has ended comes at a time when nothing runs in its slot."""
    came = asyncio.Event()

    @outbox.handler("job")
    async def leaves_a_timer(event: Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(0.2, task.cancel)
        asyncio.get_running_loop().call_later(0.2, came.set)

    async with dispatching(outbox, dsn, concurrency=1):
        await table.enqueue(outbox, "job")
        await came.wait()
        await table.until("status = 'COMPLETED'", 1)
        await table.enqueue(outbox, "job")
        await table.until("status = 'COMPLETED'", 2)


async def test_a_slot_that_a_late_thread_frees_is_used(dsn, outbox: Outbox, table: Table):
    """Nobody else ends and nobody notifies: what is due must not wait beside a slot that is free."""
    late, rest = threading.Event(), asyncio.Event()
    outbox.handler("late", timeout=0.2, retry=RetryPolicy(max_attempts=1))(lambda event: late.wait(20))

    @outbox.handler("rests")
    async def rests(event: Event) -> None:
        await rest.wait()

    outbox.handler("quick")(lambda event: None)
    await table.enqueue_many(outbox, [NewEvent("late", {}), NewEvent("rests", {}), NewEvent("rests", {})])
    async with dispatching(outbox, dsn, concurrency=3, notify=False, poll=600):
        await table.until("topic = 'late' and status = 'DEAD_LETTERED'", 1)
        await table.enqueue(outbox, "quick")
        late.set()
        await table.until("topic = 'quick' and status = 'COMPLETED'", 1)
        rest.set()


async def test_half_of_the_slots_lost_ends_the_dispatcher(dsn, outbox: Outbox, table: Table):
    """A process that can run next to nothing says so and ends, so that somebody starts a fresh one."""
    gate = threading.Event()

    @outbox.handler("stuck", timeout=0.1, retry=RetryPolicy(max_attempts=1))
    def stuck(event: Event) -> None:
        gate.wait(30)

    outbox.handler("other")(lambda event: None)
    dispatcher = Dispatcher(outbox, dsn=dsn, concurrency=4, **{**QUICK, "grace": 0.5})
    running = asyncio.create_task(dispatcher.run_async())
    try:
        for _ in range(2):
            await table.enqueue(outbox, "stuck")
        async with asyncio.timeout(10):
            await running
    finally:
        gate.set()

    assert "2 of 4 slots" in dispatcher._why
    assert dispatcher._exit_with_error
    assert await table.count("status = 'DEAD_LETTERED'") == 2


async def test_swallowed_cancellation_holds_the_slot_until_it_ends(dsn, outbox: Outbox, table: Table):
    """Settled after two seconds of patience; when the handler ends at last, its result changes nothing."""
    release = asyncio.Event()
    ended = asyncio.Event()

    @outbox.handler("deaf", timeout=0.1, retry=RetryPolicy(max_attempts=1))
    async def deaf(event: Event) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    outbox.handler("other")(lambda event: None)
    async with dispatching(outbox, dsn, concurrency=3):
        event_id = await table.enqueue(outbox, "deaf")
        row = await table.until_status(event_id, "DEAD_LETTERED")
        release.set()
        await ended.wait()
        await table.enqueue(outbox, "other")
        await table.until("status = 'COMPLETED'", 1)

    after = await table.row(event_id)
    assert (after.status, after.attempts, after.completed_at, after.last_error) == (
        row.status,
        row.attempts,
        row.completed_at,
        row.last_error,
    )


async def test_retry_later_spends_nothing_and_is_limited(dsn, outbox: Outbox, table: Table):
    calls = []

    @outbox.handler("later", retry=RetryPolicy(max_attempts=1))
    async def later(event: Event) -> None:
        calls.append(event.attempt)
        if len(calls) < 4:
            raise RetryLater(0.02)

    @outbox.handler("limited", retry=RetryPolicy(max_attempts=1))
    def limited(event: Event) -> None:
        raise RetryLater(timedelta(milliseconds=10), max_snoozes=2)

    first = await table.enqueue(outbox, "later")
    second = await table.enqueue(outbox, "limited")
    async with dispatching(outbox, dsn):
        row = await table.until_status(first, "COMPLETED")
        dead = await table.until_status(second, "DEAD_LETTERED")

    assert (row.attempts, row.snoozes, calls) == (1, 3, [1, 1, 1, 1])
    assert (dead.snoozes, dead.last_failure["rule"]) == (2, "retry_later.max_snoozes")


@pytest.mark.parametrize("way", ["priorities", "generations", "one lane"])
async def test_handler_concurrency_is_never_exceeded(dsn, outbox: Outbox, table: Table, way: str):
    """However many lanes a topic has; measured as overlap inside the handler."""
    running = most = 0
    others = 0

    @outbox.handler("narrow", concurrency=2)
    async def narrow(event: Event) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    @outbox.handler("wide")
    async def wide(event: Event) -> None:
        nonlocal others
        others = max(others, running)
        await asyncio.sleep(0.01)

    ways: dict[str, list[dict[str, Any]]] = {
        "priorities": [{"priority": number % 7 - 3} for number in range(60)],
        "generations": [{"generation": number % 7} for number in range(60)],
        "one lane": [{}] * 60,
    }
    await table.enqueue_many(outbox, [NewEvent("narrow", {}, **option) for option in ways[way]])
    await table.enqueue_many(outbox, [NewEvent("wide", {}) for _ in range(200)])
    await drain(outbox, dsn, concurrency=20)

    assert most == 2
    assert await table.count("status = 'COMPLETED'") == 260


async def test_sync_handlers_run_beside_each_other_in_threads(dsn, outbox: Outbox, table: Table):
    together = threading.Barrier(10, timeout=10)
    outbox.handler("together")(lambda event: together.wait())
    await table.enqueue_many(outbox, [NewEvent("together", {}) for _ in range(10)])
    await drain(outbox, dsn, concurrency=10)

    assert await table.count("status = 'COMPLETED' and attempts = 1") == 10


async def test_resources_are_opened_and_closed_once(dsn, outbox: Outbox, table: Table):
    log: list[str] = []

    @outbox.lifespan
    async def resources():
        log.append("opened")
        yield {"mailer": "here"}
        log.append("closed")

    @outbox.handler("uses")
    async def uses(event: Event) -> None:
        log.append(event.resources["mailer"])

    await table.enqueue_many(outbox, [NewEvent("uses", {}) for _ in range(3)])
    await drain(outbox, dsn)

    assert log == ["opened", "here", "here", "here", "closed"]


async def test_no_structure_grows_with_the_jobs_done(dsn, outbox: Outbox, table: Table):
    """Twenty thousand no-ops leave nothing behind in the process."""
    outbox.handler("noop", completed="delete")(_noop)
    async with dispatching(outbox, dsn) as dispatcher:
        await table.enqueue_many(outbox, [NewEvent("noop", {}) for _ in range(20_000)])
        started = time.monotonic()
        await table.until("true", 0, within=30)
        assert time.monotonic() - started < 30

        async def idle() -> bool:
            return dispatcher._settler.idle

        await wait_until_async(idle)
        assert len(dispatcher._in_flight) == 0
        assert dispatcher._in_flight.of_topic("noop") == 0
        assert len(dispatcher._settler) == 0
        assert dispatcher._slots.waiting == 0
        assert len(dispatcher._slots._idle) == 100


async def _noop(event: Event) -> None:
    pass


async def test_a_loop_may_begin_its_tasks_at_once(dsn, outbox: Outbox, table: Table):
    """Since Python 3.12 a loop can be told to: a slot begins before anybody knows its task."""
    ran = 0

    @outbox.handler("mail")
    async def count(event: Event[Any]) -> None:
        nonlocal ran
        ran += 1

    await table.enqueue_many(outbox, [NewEvent("mail", {}) for _ in range(20)])
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_eager_slots)
    try:
        await drain(outbox, dsn)
    finally:
        loop.set_task_factory(None)

    assert ran == 20


def _eager_slots(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Does for slots what asyncio.eager_task_factory does for all, on Python 3.11 too."""
    if coroutine.__qualname__ == "Slots._work":
        coroutine = _go_on(coroutine, coroutine.send(None))
    return asyncio.Task(coroutine, loop=loop, **options)


@types.coroutine
def _go_on(coroutine: Any, awaited: Any) -> Any:
    while True:
        try:
            try:
                sent = yield awaited
            except BaseException as error:
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(sent)
        except StopIteration as done:
            return done.value
