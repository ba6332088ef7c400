"""The dispatcher: starts the parts, ties them together, and ends them in the right order."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from pulse_outbox import __version__
from pulse_outbox.alerts import Alerts
from pulse_outbox.dispatcher import care, sentry, systemd
from pulse_outbox.dispatcher.children import ChildSuspects
from pulse_outbox.dispatcher.flushes import Flushes
from pulse_outbox.dispatcher.health import Health
from pulse_outbox.dispatcher.heap import quiet_collector
from pulse_outbox.dispatcher.heart import Heart
from pulse_outbox.dispatcher.intake import STOPPING, Intake
from pulse_outbox.dispatcher.jobs import InFlight, Released
from pulse_outbox.dispatcher.loops import keep_going
from pulse_outbox.dispatcher.report import Report
from pulse_outbox.dispatcher.running import Runner
from pulse_outbox.dispatcher.settings import DispatcherSettings
from pulse_outbox.dispatcher.settling import Settler
from pulse_outbox.dispatcher.slots import Slots
from pulse_outbox.dispatcher.state import Condition, Tally, Throughput
from pulse_outbox.dispatcher.suspects import LonelySuspects
from pulse_outbox.dispatcher.timers import make_exact
from pulse_outbox.dispatcher.transactions import Transactions
from pulse_outbox.dispatcher.wakeup import listen
from pulse_outbox.errors import SettingsError
from pulse_outbox.events import as_timedelta
from pulse_outbox.link import CALL_TIMEOUT, Link
from pulse_outbox.log import log
from pulse_outbox.store import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
    from datetime import timedelta
    from types import FrameType
    from typing import Unpack
    from uuid import UUID

    from pulse_outbox.dispatcher.jobs import Job, Outcome
    from pulse_outbox.dispatcher.settings import DispatcherOptions
    from pulse_outbox.dispatcher.suspects import Suspects
    from pulse_outbox.outbox import Outbox
    from pulse_outbox.store import Answer

FINAL_WRITES = 5.0
"""How long the last results may take to be stored once no handler runs any more, in seconds."""
FINAL_ALERTS = 2.0
"""How long the end waits for alerts of what has just died, in seconds; what is owed then, others pay."""
SUMMARY_INTERVAL = 60.0
LEAKED_PATIENCE = 1.0
PAUSE_CHECK = 1.0


class _StoppedEarly(Exception):
    """Told to stop before it had started."""


class Dispatcher:
    """Runs an outbox's handlers until it is told to stop.

    Settings are those of DispatcherSettings, given as keywords. *target* is MODULE:ATTR, from which suspects are
    started in child processes; without it they run in this process, alone.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        dsn: str | None = None,
        target: str | None = None,
        **settings: Unpack[DispatcherOptions],
    ) -> None:
        dsn = dsn or os.environ.get("PULSE_OUTBOX_DSN")
        if not dsn:
            raise SettingsError("no database: give a dsn or set PULSE_OUTBOX_DSN")
        self.outbox = outbox
        self.settings = DispatcherSettings(**settings)
        self.abandoned = 0
        """Handlers that were still running when this dispatcher ended."""
        self._dsn = dsn
        self._target = target
        served = self.settings.serves(outbox.handlers)
        if not served:
            known = ", ".join(sorted(outbox.handlers)) or "none"
            raise SettingsError(f"nothing to serve: no handler's topic matches (registered: {known})")
        self._handlers = {topic: outbox.handlers[topic] for topic in served}
        self._stopping = asyncio.Event()
        self._why = ""
        self._exit_with_error = False
        self._signalled_at: float | None = None
        self._condition = Condition()
        self._tally = Tally()
        self._throughput = Throughput(sorted(self._handlers), time.monotonic())
        self._in_flight = InFlight(freed=self._room_made)
        self._sleeping: bool | None = None
        """Whether producers should wake it; None: nothing was said yet, or nobody knows what arrived."""

    # Starting and stopping

    def run(self) -> None:
        """Runs until SIGTERM or SIGINT; a second signal ends the process at once.

        The process is its own: meanwhile the garbage collector does not look at what was loaded before, and more
        rarely at what is new, and short waits in the event loop end to the microsecond.
        """
        with quiet_collector(), asyncio.Runner() as runner:
            loop = runner.get_loop()
            make_exact(loop)
            running = loop.create_task(self._run_with_signals())
            while not running.done():
                try:
                    loop.run_until_complete(running)
                except (SystemExit, KeyboardInterrupt) as error:
                    if running.done():
                        raise
                    # Out of a task that a handler has started: asyncio lets it end the loop, which goes on here.
                    log.warning("outbox.task_raised", error=type(error).__name__)
        if self._exit_with_error:
            raise SystemExit(1)

    async def run_async(self) -> None:
        """Runs until `stop` is called; inside a loop of the application's own.

        Cancelled, it ends without a grace: what runs is cancelled too, and all that it held goes back.
        """
        # In one task from beginning to end: what a lifespan opens may insist on being closed where it was opened.
        async with AsyncExitStack() as stack:
            try:
                await self._open(stack)
            except _StoppedEarly:
                return
            try:
                await self._stopping.wait()
            except asyncio.CancelledError:
                self.stop("cancelled")
                await self._drain(grace=0)
                raise
            await self._drain(self.settings.seconds("grace"))

    def stop(self, why: str = "asked to") -> None:
        """Starts the end: no more claims, running handlers get their grace. From the event loop's thread only."""
        if not self._stopping.is_set():
            self._why = why
            self._stopping.set()

    async def _run_with_signals(self) -> None:
        loop = asyncio.get_running_loop()

        # Not through the event loop, which a handler may be blocking.
        def on_signal(number: int, _: FrameType | None) -> None:
            name = signal.Signals(number).name
            if self._signalled_at is not None:
                log.warning("outbox.ended_at_once", signal=name, in_flight=len(self._in_flight))
                self._end_process(1)
            self._signalled_at = time.monotonic()
            loop.call_soon_threadsafe(self.stop, name)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        await self.run_async()
        if self.abandoned or await _leaked_tasks():
            # What can't be stopped would keep the interpreter from ending.
            self._end_process(1)

    async def _unless_stopped(self, call: Coroutine[Any, Any, None]) -> None:
        """Awaits a storage call of the start; a stop does not wait for a database that does not answer."""
        calling = asyncio.create_task(call)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({calling, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if was_too_slow := not calling.done():
                calling.cancel()
                await asyncio.wait({calling})
        if was_too_slow:
            raise _StoppedEarly
        calling.result()

    def _end_if_overdue(self) -> None:
        """Called by the heart: a loop that a handler blocks can't end by itself."""
        if self._signalled_at is None:
            return
        grace_ends = self._signalled_at + self.settings.seconds("grace") + FINAL_WRITES
        if time.monotonic() > grace_ends and "loop" in self._condition.complaints:
            log.error(
                "outbox.ended_by_force", why="a handler blocks the event loop", in_flight=len(self._in_flight)
            )
            self._end_process(1)

    def _end_process(self, code: int) -> NoReturn:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    async def _open(self, stack: AsyncExitStack) -> None:
        """Starts everything; what was started is ended by *stack*, last first."""
        settings = self.settings
        care_store = await self._open_store("care", stack)
        await self._unless_stopped(care_store.require_supported())
        transactions = await self._open_transactions(stack)
        resources = await stack.enter_async_context(self.outbox.open_resources())
        self._sentry = sentry.connect()  # after the lifespan, which may have initialised it
        self._runner = runner = Runner(
            resources=resources,
            redact=self.outbox.redact,
            random=random.Random(),
            threads=settings.concurrency,
            transactions=transactions,
            sentry=self._sentry,
        )
        stack.callback(runner.close)
        self._settler = Settler(
            await self._open_store("settle", stack),
            in_flight=self._in_flight,
            batch=settings.batch,
            condition=self._condition,
            settled=self._settled,
        )
        self._report = Report(
            tally=self._tally,
            throughput=self._throughput,
            sentry=self._sentry,
            died=lambda: self._alerts.wake(),  # noqa: PLW0108  made after this
            due_in=lambda seconds: self._intake.expect(seconds),  # noqa: PLW0108  made after this
        )
        self._slots = Slots(
            runner=runner,
            deliver=self._deliver,
            concurrency=settings.concurrency,
            exhausted=self._slots_exhausted,
            freed=self._room_made,
        )
        claim_store = await self._open_store("claim", stack)
        self._flushes = Flushes(await self._open_store("flush", stack))
        self._intake = Intake(
            claim_store,
            flushes=self._flushes,
            settings=settings,
            handlers=self._handlers,
            in_flight=self._in_flight,
            slots=self._slots,
            settler=self._settler,
            tally=self._tally,
            say_sleeping=lambda sleeping: self._say_sleeping(claim_store, sleeping),
            suspects_due=lambda lanes: self._suspects.due(lanes),  # noqa: PLW0108  made after the intake
        )
        self._alerts = Alerts(
            await self._open_store("alerts", stack),
            worker=settings.worker,
            poll=settings.seconds("poll"),
            hook=self.outbox.on_dead_letter,
            redact=self.outbox.redact,
        )
        self._suspects = await self._open_suspects(stack)
        heart = Heart(
            settings=settings,
            in_flight=self._in_flight,
            condition=self._condition,
            # A call that hangs must end while there is still time for another.
            open_store=lambda: self._new_store("heart", min(CALL_TIMEOUT, settings.lease_time / 4)),
            say_alive=self._say_alive,
            lost=self._lost,
            health=Health(live=self._is_live, ready=self._is_ready, facts=self._facts),
            end_if_overdue=self._end_if_overdue,
        )
        await self._unless_stopped(self._say_alive(care_store))
        stack.push_async_callback(self._say_gone, care_store)
        await heart.start()
        stack.push_async_callback(heart.stop)
        self._slots.start()
        stack.push_async_callback(self._slots.close)
        self._start_loops(stack, care_store)
        systemd.tell(f"READY=1\nSTATUS=serving {len(self._handlers)} topics as {settings.worker}")
        log.info(
            "outbox.started",
            version=__version__,
            worker=settings.worker,
            topics=sorted(self._handlers),
            generations=settings.generations,
            schema=self.outbox.schema,
            concurrency=settings.concurrency,
            batch=settings.batch,
            lease=settings.seconds("lease"),
            notify=settings.notify,
            suspects="child process" if self._target else "alone in this process",
        )

    def _start_loops(self, stack: AsyncExitStack, care_store: Store) -> None:
        settings = self.settings
        names = {topic: handler.name for topic, handler in self._handlers.items()}
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "claim": self._intake.run,
            "flush": self._flushes.run,
            "settle": self._settler.run,
            "shed": self._intake.shed,
            "suspects": self._suspects.run,
            "alerts": self._alerts.run,
            "watchdog": lambda: care.watchdog(care_store, settings, names, self._report.reaped),
            "heal": lambda: care.heal(care_store),
            "pause": lambda: self._release_paused(care_store),
            "summary": self._summarise,
        }
        if settings.notify:
            loops["listen"] = self._listen
        if settings.retention is not None:
            retention = as_timedelta("retention", settings.retention)
            loops["prune"] = lambda: care.prune(care_store, retention)
        if settings.burst:
            loops["burst"] = self._stop_when_done
        # A complaint is about a connection, whichever loop has it: when a call succeeds on it, it is over.
        shared = {"watchdog": "care", "heal": "care", "pause": "care", "prune": "care"}
        self._tasks = {
            name: asyncio.create_task(
                keep_going(shared.get(name, name), loop, self._condition), name=f"pulse-outbox-{name}"
            )
            for name, loop in loops.items()
        }

        async def end_loops() -> None:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.wait(self._tasks.values(), timeout=2)

        stack.push_async_callback(end_loops)

    async def _drain(self, grace: float) -> None:
        """No more claims; what has not started goes back, what runs gets its grace, what ended is stored."""
        systemd.tell("STOPPING=1")
        self._give_back(self._handlers)
        await self._intake.hold(STOPPING)
        log.info("outbox.stopping", why=self._why, running=self._slots.running, waiting=self._slots.waiting)
        self._give_back(self._handlers)
        closing = asyncio.create_task(self._suspects.close())
        grace_ends = time.monotonic() + grace
        while self._slots.worth_waiting_for and time.monotonic() < grace_ends:
            await asyncio.sleep(0.02)
        if self._slots.running:
            log.warning("outbox.grace_over", running=self._slots.running)
            await self._slots.close()
        await closing
        writes_end = max(grace_ends, time.monotonic() + FINAL_WRITES)
        while not self._settler.idle and time.monotonic() < writes_end:
            await asyncio.sleep(0.01)
        if not self._condition.complaints:
            await self._alerts.finish(FINAL_ALERTS)
        self.abandoned = self._slots.running + self._runner.left_behind
        log.info(
            "outbox.stopped",
            why=self._why,
            abandoned=self.abandoned,
            unstored=len(self._settler),
            **_counts(self._tally),
        )

    # Parts

    def _new_store(self, name: str, call_timeout: timedelta = CALL_TIMEOUT) -> Store:
        link = Link(
            self._dsn,
            name=f"pulse-outbox {name}",
            call_timeout=call_timeout,
            succeeded=lambda: self._is_well(name),
        )
        return Store(link, schema=self.outbox.schema, retries=self.settings.retries)

    async def _open_store(self, name: str, stack: AsyncExitStack) -> Store:
        store = self._new_store(name)
        stack.push_async_callback(store.close)
        return store

    def _is_well(self, subject: str) -> None:
        if subject in self._condition.complaints:
            silence = self._condition.is_well(subject) or 0.0
            log.info("outbox.loop_recovered", loop=subject, after_seconds=round(silence, 1))

    async def _open_transactions(self, stack: AsyncExitStack) -> Transactions | None:
        if not any(handler.transactional for handler in self._handlers.values()):
            return None
        transactions = Transactions(self._dsn, schema=self.outbox.schema)
        await transactions.open()
        stack.push_async_callback(transactions.close)
        return transactions

    async def _open_suspects(self, stack: AsyncExitStack) -> Suspects:
        store = await self._open_store("suspects", stack)
        if self._target is not None:
            children = ChildSuspects(
                store,
                target=self._target,
                dsn=self._dsn,
                schema=self.outbox.schema,
                settings=self.settings,
                handlers=self._handlers,
                in_flight=self._in_flight,
                settler=self._settler,
                deliver=self._deliver,
                condition=self._condition,
                tally=self._tally,
            )
            stack.push_async_callback(children.kill)
            return children
        return LonelySuspects(
            store,
            settings=self.settings,
            handlers=self._handlers,
            in_flight=self._in_flight,
            slots=self._slots,
            intake=self._intake,
        )

    async def _listen(self) -> None:
        def connected(is_up: bool) -> None:
            self._intake.listening(is_up)
            if is_up:
                self._is_well("listen")

        await listen(
            self.settings.listen_dsn or self._dsn,
            schema=self.outbox.schema,
            wake=self._intake.wake,
            connected=connected,
        )

    # What the parts tell each other

    def _room_made(self) -> None:
        self._intake.room_made()

    def _deliver(self, outcome: Outcome) -> None:
        self._settler.add(outcome)
        self._intake.room_made()

    def _settled(self, outcomes: Sequence[Outcome], answers: Mapping[UUID, Answer]) -> None:
        """Results are stored, or refused."""
        self._intake.room_made()
        self._report.settled(outcomes, answers)

    def _lost(self, job: Job) -> None:
        """A heartbeat found that a lease is somebody else's. A running handler goes on; its result will be refused."""
        if job.withdraw():
            self._in_flight.remove([job])
            self._report.lost(job, result="not started")

    def _slots_exhausted(self, why: str) -> None:
        if not self._stopping.is_set():
            self._exit_with_error = True
            log.error(
                "outbox.slots_exhausted", why=why, remedy="give the handler timeouts of its own, inside"
            )
            self.stop(why)

    async def _say_sleeping(self, store: Store, sleeping: bool) -> None:
        """Whether producers should wake this dispatcher."""
        if sleeping == self._sleeping:
            return
        self._sleeping = sleeping
        try:
            await self._say_alive(store)
        except BaseException:
            self._sleeping = None
            raise

    async def _say_alive(self, store: Store) -> None:
        """Keeps this dispatcher's row true. The heart does it beside the others, on a connection of its own."""
        settings = self.settings
        said: bool | None = not self._sleeping
        while said is not self._sleeping:  # changed meanwhile: what was said first may have come last
            said = self._sleeping
            await store.dispatcher_seen(
                settings.worker,
                host=socket.gethostname(),
                pid=os.getpid(),
                version=__version__,
                topics=sorted(self._handlers),
                generations=settings.generations,
                in_flight=len(self._in_flight),
                sleeping=said is not False and settings.notify,
                lease=settings.lease_time,
                completed=self._tally.completed,
                rates=self._throughput.rates(time.monotonic()),
            )

    async def _say_gone(self, store: Store) -> None:
        try:
            async with asyncio.timeout(2):
                await store.dispatcher_gone(self.settings.worker)
        except Exception as error:
            log.info("outbox.goodbye_failed", error=type(error).__name__)

    # Loops of its own

    async def _release_paused(self, store: Store) -> None:
        """Gives back what was claimed ahead of a pause."""
        while True:
            await asyncio.sleep(PAUSE_CHECK)
            if (self._slots.waiting or self._suspects.waiting) and (paused := await store.paused()):
                self._give_back(self._handlers if None in paused else paused)

    def _give_back(self, topics: Collection[str | None]) -> None:
        """Releases what has not started."""
        self._suspects.give_back(topics)
        for job in self._slots.take_back(lambda job: job.claim.topic in topics):
            self._settler.add(Released(job))

    async def _stop_when_done(self) -> None:
        while True:
            if self._is_done():
                # What ended last may have made something due, as the next of its key or as its own event: only a look
                # that began after it tells.
                claimed = self._tally.claimed
                await self._intake.look_again()
                if self._is_done() and self._tally.claimed == claimed:
                    self.stop("nothing is due or running")
            await asyncio.sleep(0.02)

    def _is_done(self) -> bool:
        return not len(self._in_flight) and self._settler.idle

    async def _summarise(self) -> None:
        before = self._tally.copy()
        while True:
            await asyncio.sleep(SUMMARY_INTERVAL)
            now = self._tally.copy()
            if now != before or self._condition.complaints:
                done = {name: count - getattr(before, name) for name, count in _counts(now).items()}
                log.info(
                    "outbox.summary",
                    seconds=SUMMARY_INTERVAL,
                    in_flight=len(self._in_flight),
                    unstored=len(self._settler),
                    wrong=self._condition.in_words(),
                    **done,
                )
            before = now

    # Health

    def _is_live(self) -> list[str]:
        loop = self._condition.complaints.get("loop")
        return [loop[0]] if loop and time.monotonic() - loop[1] > self.settings.seconds("lease") else []

    def _is_ready(self) -> list[str]:
        if log.unwritten:
            self._condition.complain("log", "log lines can't be written")
        else:
            self._condition.is_well("log")
        return self._condition.in_words() + (["the process is ending"] if self._stopping.is_set() else [])

    def _facts(self) -> dict[str, Any]:
        return {
            "worker": self.settings.worker,
            "version": __version__,
            "in_flight": len(self._in_flight),
            "unstored": len(self._settler),
            **_counts(self._tally),
        }


async def _leaked_tasks() -> int:
    """Cancels what handlers have left behind, and counts those tasks that go on all the same."""
    leaked = asyncio.all_tasks() - {asyncio.current_task()}
    for task in leaked:
        task.cancel()
    if not leaked:
        return 0
    _, pending = await asyncio.wait(leaked, timeout=LEAKED_PATIENCE)
    return len(pending)


def _counts(tally: Tally) -> dict[str, int]:
    return {name: getattr(tally, name) for name in tally.__slots__}
