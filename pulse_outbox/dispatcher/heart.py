"""The heart: a thread with an event loop and a connection of its own, so that no handler can stop it.

It extends the leases of everything that this process holds, says that the process is alive, watches the main event
loop, and answers the health endpoint.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from pulse_outbox.dispatcher import systemd
from pulse_outbox.dispatcher.health import serve_health
from pulse_outbox.dispatcher.jobs import apart
from pulse_outbox.failures import describe_error
from pulse_outbox.log import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pulse_outbox.dispatcher.health import Health
    from pulse_outbox.dispatcher.jobs import InFlight, Job
    from pulse_outbox.dispatcher.settings import DispatcherSettings
    from pulse_outbox.dispatcher.state import Condition
    from pulse_outbox.store import Store

CHUNK = 5000
"""Leases that one statement extends."""
LOCKED_BEAT_PAUSE = 0.5
FAILED_PAUSE = 1.0
WATCH_INTERVAL = 0.25


class Heart:
    """Runs from `start` to `stop`. *open_store* is called in the thread: a connection belongs to its loop."""

    def __init__(
        self,
        *,
        settings: DispatcherSettings,
        in_flight: InFlight,
        condition: Condition,
        open_store: Callable[[], Store],
        say_alive: Callable[[Store], Awaitable[None]],
        lost: Callable[[Job], None],
        health: Health,
        end_if_overdue: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._in_flight = in_flight
        self._condition = condition
        self._open_store = open_store
        self._say_alive = say_alive
        self._lost = lost
        self._health = health
        self._end_if_overdue = end_if_overdue
        self._withdrawn: list[Job] = []
        self._main = asyncio.get_running_loop()
        self._seen = time.monotonic()
        self._blocked = False
        self._kept_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="pulse-outbox-heart", daemon=True)

    async def start(self) -> None:
        """Starts the thread; raises what kept it from starting (an address in use, say)."""
        self._thread.start()
        await asyncio.to_thread(self._ready.wait)
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Ends the thread."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            await asyncio.to_thread(self._thread.join, 5)

    def _live(self) -> None:
        try:
            asyncio.run(self._beat_until_stopped())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                log.exception("outbox.heart_died")
        finally:
            self._ready.set()

    async def _beat_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        store = self._open_store()
        async with serve_health(self._settings.health, self._health):
            self._ready.set()
            tasks = [
                asyncio.create_task(self._beat_for_ever(store)),
                asyncio.create_task(self._watch_for_ever(store)),
                asyncio.create_task(self._tell_systemd_for_ever()),
            ]
            await self._stop.wait()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=2)
        await store.close()

    # Leases

    async def _beat_for_ever(self, store: Store) -> None:
        interval = self._settings.seconds("heartbeat")
        while True:
            started = time.monotonic()
            try:
                await self._beat(store)
                await self._say_alive(store)
            except Exception as error:
                # The next try comes soon: what is lost here is lease time.
                text = describe_error(error)
                if self._condition.complain("heartbeat", f"heartbeats fail: {text}"):
                    log.warning("outbox.heartbeat_failed", error=text)
                await asyncio.sleep(min(FAILED_PAUSE, interval))
                continue
            if (silence := self._condition.is_well("heartbeat")) is not None:
                log.info("outbox.heartbeat_recovered", after_seconds=round(silence, 1))
            await asyncio.sleep(max(0.0, interval - (time.monotonic() - started)))

    async def _beat(self, store: Store) -> None:
        """One heartbeat for every job that is not brand new; locked rows are tried again until they are free."""
        # What was claimed a moment ago is covered until the beat after this one.
        old = self._in_flight.older_than(self._settings.seconds("heartbeat") / 2)
        jobs = [job for job in old if job not in self._withdrawn]
        give_up_at = time.monotonic() + self._settings.seconds("heartbeat") / 2
        while jobs:
            locked: list[Job] = []
            for group in apart(jobs):
                for first in range(0, len(group), CHUNK):
                    locked += await self._extend(store, group[first : first + CHUNK])
            if not locked or time.monotonic() > give_up_at:
                return
            await asyncio.sleep(LOCKED_BEAT_PAUSE)
            jobs = [job for job in locked if job in self._in_flight]

    async def _extend(self, store: Store, jobs: list[Job]) -> list[Job]:
        """One statement; those whose rows somebody else has locked."""
        leased_until = time.monotonic() + self._settings.seconds("lease")
        answers = await store.heartbeat([job.claim for job in jobs], lease=self._settings.lease_time)
        locked = []
        for job in jobs:
            answer = answers.get(job.claim.event_id) if answers else None
            if answer is None:
                job.leased_until = leased_until
            elif answer == "locked":
                locked.append(job)
            elif job in self._in_flight:
                self._main.call_soon_threadsafe(self._lost, job)
        return locked

    async def _tell_systemd_for_ever(self) -> None:
        """Says that the process lives for as long as a restart would not help."""
        interval = systemd.watchdog_interval()
        while interval is not None:
            if not self._health.live():
                systemd.tell("WATCHDOG=1")
            await asyncio.sleep(interval)

    # The main event loop

    async def _watch_for_ever(self, store: Store) -> None:
        lease = self._settings.seconds("lease")
        while True:
            self._main.call_soon_threadsafe(self._loop_is_alive)
            await asyncio.sleep(min(WATCH_INTERVAL, lease / 10))
            still_for = time.monotonic() - self._seen
            if still_for > lease / 3:
                self._condition.complain("loop", "a handler blocks the event loop")
            if any(waited > lease / 3 for _, waited in self._in_flight.asked.unanswered()):
                await self._keep_what_nobody_reads(store)
            if still_for > lease and not self._blocked:
                self._blocked = True
                self._withdraw_waiting(still_for)
            if self._withdrawn:
                await self._release_withdrawn(store)
            self._end_if_overdue()

    def _loop_is_alive(self) -> None:
        self._seen = time.monotonic()
        self._blocked = False
        self._condition.is_well("loop")
        self._condition.is_well("unread")

    async def _keep_what_nobody_reads(self, store: Store) -> None:
        """What a claim took must not lapse while the loop stands still, or while its answer is lost.

        After a lease it goes back, as all that has not started.
        """
        if time.monotonic() < self._kept_at + self._settings.seconds("heartbeat"):
            return
        self._kept_at = time.monotonic()
        asked = self._in_flight.asked
        try:
            for token, waited in asked.unanswered():
                held = await store.held_by(token)
                if not held:
                    continue
                if waited < self._settings.seconds("lease"):
                    await store.heartbeat(held, lease=self._settings.lease_time)
                elif asked.withdraw(token):
                    await store.release(held)
        except Exception as error:
            self._condition.complain(
                "unread", f"claims that nobody reads can't be kept: {type(error).__name__}"
            )

    def _withdraw_waiting(self, still_for: float) -> None:
        """The loop stands still: what has not started may run elsewhere. What runs keeps its lease."""
        self._withdrawn += [
            job for job in self._in_flight.snapshot() if job.stage == "waiting" and job.withdraw()
        ]
        log.error("outbox.loop_blocked", seconds=round(still_for, 1), released=len(self._withdrawn))

    async def _release_withdrawn(self, store: Store) -> None:
        """Tried at every look until the database has taken them back."""
        try:
            answers = await store.release([job.claim for job in self._withdrawn])
        except Exception as error:
            if self._condition.complain("release", f"waiting jobs can't be released: {type(error).__name__}"):
                log.warning("outbox.release_failed", error=type(error).__name__, jobs=len(self._withdrawn))
            return
        self._condition.is_well("release")
        for job in self._withdrawn:
            if answers.get(job.claim.event_id) != "locked":
                self._main.call_soon_threadsafe(self._in_flight.remove, [job])
        self._withdrawn = [job for job in self._withdrawn if answers.get(job.claim.event_id) == "locked"]
