"""Suspects in child processes: what one of them does to its process, it does not do to the dispatcher.

Events with one lapse run together in one child, at full concurrency; those with more run alone, each with a child to
itself. The dispatcher claims them, holds them among its own jobs, so that its heart beats for them, and stores their
results. A child says what it starts: when it dies, what it had started has lapsed, and the rest is given back.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from pulse_outbox.dispatcher.child_process import ChildFailed, ChildProcess
from pulse_outbox.dispatcher.intake import AHEAD
from pulse_outbox.dispatcher.jobs import Job, Released
from pulse_outbox.dispatcher.loops import keep_going

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pulse_outbox.dispatcher.jobs import InFlight, Outcome
    from pulse_outbox.dispatcher.lanes import LaneKey
    from pulse_outbox.dispatcher.settings import DispatcherSettings
    from pulse_outbox.dispatcher.settling import Settler
    from pulse_outbox.dispatcher.state import Condition, Tally
    from pulse_outbox.handlers import Handler
    from pulse_outbox.store import Claim, Store

log = structlog.get_logger("pulse_outbox")

KEEP_IDLE = 10.0
"""How long a child without work is kept for the next suspect: a new one costs a second."""
PAUSE_AFTER_FAILURE = 1.0
"""The wait after a child that could not start, in seconds; it doubles up to the next."""
PAUSE_AFTER_FAILURE_MAX = 60.0
ALONE_AT_ONCE = 4
"""Children that run one suspect each at the same time. Another starts when all others have been busy for …"""
BUSY = 1.0
MOST_CHILDREN = 8
ROOM_PAUSE = 0.02


class DueLanes:
    """The lanes of one kind of suspects, from the listing that showed them until a claim finds no more."""

    def __init__(self) -> None:
        self.some = asyncio.Event()
        self._places: dict[LaneKey, dict[str, Any]] = {}
        self._turn = 0

    @property
    def topics(self) -> set[str]:
        """The topics that have suspects due."""
        return {key.topic for key in self._places}

    def show(self, lanes: Sequence[LaneKey]) -> None:
        """A listing has found these."""
        self._places = {key: self._places.get(key, {}) for key in lanes}
        if lanes:
            self.some.set()
        else:
            self.some.clear()

    def ask(self, limit: int, room: Callable[[str], int]) -> dict[LaneKey, int]:
        """For a claim: one lane of each topic that has room, and how many to take from it."""
        topics = sorted(topic for topic in self.topics if room(topic) > 0)
        if not topics:
            return {}
        share = -(-limit // len(topics))
        self._turn = (self._turn + 1) % len(topics)  # with fewer places than topics everyone gets one in time
        return {
            min(
                (key for key in self._places if key.topic == topic),
                key=lambda key: (-key.priority, key.lapses, key.generation),
            ): min(share, room(topic))
            for topic in topics[self._turn :] + topics[: self._turn]
        }

    def as_asked(self, quotas: Mapping[LaneKey, int]) -> list[dict[str, Any]]:
        """The same as the claim takes it, each lane from where the last claim ended."""
        return [{**key._asdict(), "quota": quota, **self._places[key]} for key, quota in quotas.items()]

    def note(self, quotas: Mapping[LaneKey, int], limit: int, claims: Sequence[Claim]) -> None:
        """Moves the lanes on after a claim (whose rows come in order), and forgets those that are empty."""
        for key, quota in quotas.items():
            taken = [
                claim
                for claim in claims
                if (claim.topic, claim.generation, claim.lapses, claim.priority) == key
            ]
            if len(taken) < quota and len(claims) < limit:
                self._places.pop(key, None)
            elif taken and key in self._places:
                self._places[key] = {
                    "next_run_at": taken[-1].next_run_at.isoformat(),
                    "seq": taken[-1].seq + 1,
                }
        if not self._places:
            self.some.clear()


class ChildSuspects:
    """Runs a dispatcher's suspects in child processes of its own."""

    def __init__(
        self,
        store: Store,
        *,
        target: str,
        dsn: str,
        schema: str,
        settings: DispatcherSettings,
        handlers: Mapping[str, Handler],
        in_flight: InFlight,
        settler: Settler,
        deliver: Callable[[Outcome], None],
        condition: Condition,
        tally: Tally,
    ) -> None:
        self._store = store
        self._target = target
        self._dsn = dsn
        self._schema = schema
        self._settings = settings
        self._handlers = handlers
        self._topics = sorted(handlers)
        self._in_flight = in_flight
        self._settler = settler
        self._deliver = deliver
        self._condition = condition
        self._tally = tally
        self._in_company = DueLanes()
        self._alone = DueLanes()
        self._children: set[ChildProcess] = set()
        self._busy_since: list[float | None] = [None] * ALONE_AT_ONCE
        self._claiming = asyncio.Lock()
        self._kept: dict[str, int] = {}
        self._failures = 0
        self._not_before = 0.0
        self._closing = False
        self._rate = 0.0
        self._rate_at = time.monotonic()
        self._rate_reported = 0

    # What the dispatcher calls

    @property
    def waiting(self) -> int:
        """Jobs that children have and have not started."""
        return sum(child.waiting for child in self._children)

    def due(self, lanes: Sequence[LaneKey]) -> None:
        """There are some."""
        if not self._closing:
            self._in_company.show([lane for lane in lanes if lane.lapses == 1])
            self._alone.show([lane for lane in lanes if lane.lapses > 1])
            self._keep_places()

    def give_back(self, topics: Collection[str | None]) -> None:
        """Releases what has not started."""
        names = [topic for topic in topics if topic is not None]
        for child in self._children:
            child.give_back(names)

    async def run(self) -> None:
        """Runs them for ever."""
        loops: list[Callable[[], Any]] = [self._run_in_company]
        loops += [functools.partial(self._run_alone, rank) for rank in range(ALONE_AT_ONCE)]
        await asyncio.gather(*(keep_going("suspects", loop, self._condition) for loop in loops))

    async def close(self) -> None:
        """Gives back what has not started, lets the rest finish within the grace, and ends the children."""
        self._closing = True
        self._in_company.show([])
        self._alone.show([])
        grace_ends = time.monotonic() + self._settings.seconds("grace")
        while time.monotonic() < grace_ends and (
            self._claiming.locked() or any(child.outstanding for child in self._children)
        ):
            for child in self._children:
                child.give_back(None)
            await asyncio.sleep(ROOM_PAUSE)
        for child in self._children:
            if child.outstanding:
                child.kill("its job ran past the grace of a shutdown")
        await asyncio.gather(*(child.end() for child in self._children))

    async def kill(self) -> None:
        """Ends the children at once."""
        self._closing = True
        for child in self._children:
            child.kill("the dispatcher ended")
        await asyncio.gather(*(child.ended.wait() for child in self._children))

    # Loops

    async def _run_in_company(self) -> None:
        """Keeps one child full with those that have lapsed once."""
        child: ChildProcess | None = None
        while True:
            if not await self._wait_for(self._in_company.some, child):
                child = None
                continue
            if child is None or not child.usable:
                child = await self._new_child(self._settings.concurrency)
            child.stirred.clear()
            free = max(0, child.concurrency - child.outstanding)
            wanted = self._wanted(child)
            if wanted < 1 or not await self._claim_for(child, self._in_company, wanted, free):
                await self._room_in(child)

    async def _run_alone(self, rank: int) -> None:
        """One after the other, those that have lapsed more than once. Later ranks help where there is much to do."""
        child: ChildProcess | None = None
        while True:
            if not self._alone.some.is_set():
                self._busy_since[rank] = None
            if not await self._wait_for(self._alone.some, child):
                child = None
                continue
            if not self._is_needed(rank):
                await asyncio.sleep(BUSY / 4)
                continue
            if child is None or not child.usable:
                # Before the claim: should this process die while it waits, nobody has spent an attempt.
                child = await self._new_child(1)
            if not await self._claim_for(child, self._alone, 1, 1):
                await asyncio.sleep(ROOM_PAUSE)
                continue
            self._busy_since[rank] = self._busy_since[rank] or time.monotonic()
            while child.outstanding:
                child.stirred.clear()
                await child.stirred.wait()

    def _is_needed(self, rank: int) -> bool:
        latest = time.monotonic() - BUSY
        return all(since is not None and since < latest for since in self._busy_since[:rank])

    async def _wait_for(self, some: asyncio.Event, child: ChildProcess | None) -> bool:
        """Until there are some; False when it took so long that the child was let go."""
        while not some.is_set():
            try:
                async with asyncio.timeout(KEEP_IDLE if child else None):
                    await some.wait()
            except TimeoutError:
                assert child is not None
                if not child.outstanding:
                    await child.end()
                    return False
        return True

    async def _room_in(self, child: ChildProcess) -> None:
        """Until the child has made room, or somebody else may have."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ROOM_PAUSE):
                await child.stirred.wait()

    def _wanted(self, child: ChildProcess) -> int:
        """How many more the child should have: enough for its slots, and a moment's work beyond."""
        if len(self._settler) >= 4 * self._settings.batch:
            return 0  # the database does not take results: do not add to them
        ahead = min(self._settings.batch, int(self._completion_rate(child) * AHEAD))
        if child.outstanding > child.concurrency + ahead // 2:
            return 0
        return min(self._settings.batch, child.concurrency + ahead - child.outstanding)

    def _completion_rate(self, child: ChildProcess) -> float:
        """Jobs that the child ends per second, over the last moments."""
        now = time.monotonic()
        if (passed := now - self._rate_at) >= 0.05:
            fresh = max(0, child.reported - self._rate_reported) / passed
            self._rate = fresh if fresh > self._rate else 0.7 * self._rate + 0.3 * fresh
            self._rate_at, self._rate_reported = now, child.reported
        return self._rate

    # Children

    async def _new_child(self, concurrency: int) -> ChildProcess:
        """A child that has loaded the application, however many tries and however much time that takes."""
        while True:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            if len(self._children) >= MOST_CHILDREN:
                await asyncio.sleep(BUSY)
                continue
            child = ChildProcess(
                deliver=self._deliver, concurrency=concurrency, lease=self._settings.seconds("lease")
            )
            self._children.add(child)
            try:
                await child.start(
                    {
                        "target": self._target,
                        "dsn": self._dsn,
                        "schema": self._schema,
                        "concurrency": concurrency,
                        "lease": self._settings.seconds("lease"),
                        "path": sys.path,
                        "log_level": _log_level(),
                    }
                )
            except ChildFailed as error:
                self._failed_to_start(str(error))
                continue
            finally:
                child.seeing_off = asyncio.create_task(self._see_off(child))
            log.info("outbox.child_started", pid=child.pid, concurrency=concurrency)
            return child

    def _failed_to_start(self, why: str) -> None:
        pause = min(PAUSE_AFTER_FAILURE * 2**self._failures, PAUSE_AFTER_FAILURE_MAX)
        self._failures += 1
        self._not_before = time.monotonic() + pause
        if self._condition.complain("suspects", f"the child process for suspects does not start: {why}"):
            log.error("outbox.child_failed", error=why)

    async def _see_off(self, child: ChildProcess) -> None:
        await child.ended.wait()
        self._children.discard(child)
        if child.burdened:
            self._failures = 0
        elif not child.retired:
            self._failed_to_start("it died before it had started anything")

    # Claims

    async def _claim_for(self, child: ChildProcess, due: DueLanes, limit: int, free: int) -> bool:
        """Claims and sends; False when there was no room, or nothing more to be had."""
        async with self._claiming:
            quotas = due.ask(limit, lambda topic: self._room_of(topic, child, limit))
            if not quotas or not child.usable:
                return False
            claimed_at = time.monotonic()
            # Others are claimed beside these, and share the limits of handlers.
            with self._in_flight.reserving((key.topic, quota) for key, quota in quotas.items()):
                claims = await self._store.claim(
                    limit=limit,
                    topics=self._topics,
                    worker=self._settings.worker,
                    lease=self._settings.lease_time,
                    budgets=[self._handlers[topic].retry.max_attempts for topic in self._topics],
                    slots=free,
                    lanes=due.as_asked(quotas),
                    alone=due is self._alone,
                )
            self._condition.is_well("suspects")
            due.note(quotas, limit, claims)
            self._tally.claimed += len(claims)
            jobs = [Job(claim, self._handlers[claim.topic], claimed_at) for claim in claims]
            for job in jobs:
                self._in_flight.add(job)
            self._keep_places()
            if self._closing:
                for job in jobs:
                    job.stage = "finished"
                    self._deliver(Released(job))
                return False
            child.run(jobs)
            return bool(jobs)

    def _room_of(self, topic: str, child: ChildProcess, limit: int) -> int:
        if topic not in child.topics:
            return 0  # the files have changed since this process loaded them
        most = self._handlers[topic].concurrency
        if most is None:
            return limit
        return most - (self._in_flight.of_topic(topic) - self._kept.get(topic, 0))

    def _keep_places(self) -> None:
        """While suspects of a handler with a limit are due, half of its places are theirs: or they might get none."""
        for topic, places in self._kept.items():
            self._in_flight.reserve(topic, -places)
        self._kept = {}
        for topic in self._in_company.topics | self._alone.topics:
            most = self._handlers[topic].concurrency
            if most is not None:
                self._kept[topic] = (most + 1) // 2
                self._in_flight.reserve(topic, self._kept[topic])


def _log_level() -> str | None:
    """How much the command logs; None when this is not its configuration."""
    name = logging.getLevelName(logging.getLogger().level).lower()
    return name if structlog.is_configured() and name in ("debug", "info", "warning", "error") else None
