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
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import structlog

from pulse_outbox.dispatcher.child_process import ChildFailed, ChildProcess
from pulse_outbox.dispatcher.intake import AHEAD
from pulse_outbox.dispatcher.jobs import Job, Released, apart_once
from pulse_outbox.dispatcher.lanes import Turn
from pulse_outbox.dispatcher.loops import keep_going
from pulse_outbox.dispatcher.transactions import POOL_SIZE as TRANSACTIONS
from pulse_outbox.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from uuid import UUID

    from pulse_outbox.claims import Claim
    from pulse_outbox.dispatcher.jobs import InFlight, Outcome
    from pulse_outbox.dispatcher.lanes import LaneKey
    from pulse_outbox.dispatcher.settings import DispatcherSettings
    from pulse_outbox.dispatcher.settling import Settler
    from pulse_outbox.dispatcher.state import Condition, Tally
    from pulse_outbox.handlers import Handler
    from pulse_outbox.store import Store

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
        self._turn = Turn()

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
        topics = self._turn.order(topic for topic in self.topics if room(topic) > 0)
        if not topics:
            return {}
        share = -(-limit // len(topics))
        return {
            min(
                (key for key in self._places if key.topic == topic),
                key=lambda key: (-key.priority, key.lapses, key.generation),
            ): min(share, room(topic))
            for topic in topics
        }

    def as_asked(self, quotas: Mapping[LaneKey, int]) -> list[dict[str, Any]]:
        """The same as the claim takes it, each lane from where the last claim ended."""
        return [{**key._asdict(), "quota": quota, **self._places[key]} for key, quota in quotas.items()]

    def note(self, quotas: Mapping[LaneKey, int], limit: int, claims: Sequence[Claim]) -> None:
        """Moves the lanes on after a claim (whose rows come in order), and forgets those that are empty."""
        shares = {key.topic: quota for key, quota in quotas.items()}
        self._turn.took(shares, Counter(claim.topic for claim in claims))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimCall:
    """One claim, also while its answer is lost: asked again under its token it finds what it took."""

    token: UUID
    quotas: Mapping[LaneKey, int]
    lanes: list[dict[str, Any]]
    limit: int
    slots: int
    at: float


class Crew:
    """Those who work through one child, one after the other: its lanes and its present child."""

    def __init__(self, due: DueLanes, *, concurrency: int, alone: bool) -> None:
        self.due = due
        self.concurrency = concurrency
        self.alone = alone
        self.child: ChildProcess | None = None
        self.unanswered: ClaimCall | None = None
        self.busy_since: float | None = None
        self._rate = 0.0
        self._rate_at = time.monotonic()
        self._rate_reported = 0

    def completion_rate(self, child: ChildProcess) -> float:
        """Jobs that the child ends per second, over the last moments."""
        now = time.monotonic()
        if (passed := now - self._rate_at) >= 0.05:
            fresh = max(0, child.reported - self._rate_reported) / passed
            self._rate = fresh if fresh > self._rate else 0.7 * self._rate + 0.3 * fresh
            self._rate_at, self._rate_reported = now, child.reported
        return self._rate


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
        self._budgets = [handlers[topic].retry.max_attempts for topic in self._topics]
        self._in_flight = in_flight
        self._settler = settler
        self._deliver = deliver
        self._condition = condition
        self._tally = tally
        self._lapsed_once = DueLanes()
        self._lapsed_often = DueLanes()
        self._company = Crew(self._lapsed_once, concurrency=settings.concurrency, alone=False)
        self._loners = [Crew(self._lapsed_often, concurrency=1, alone=True) for _ in range(ALONE_AT_ONCE)]
        self._children: set[ChildProcess] = set()
        self._claiming = asyncio.Lock()
        self._kept: dict[str, int] = {}
        self._failures = 0
        self._not_before = 0.0
        self._closing = False

    # What the dispatcher calls

    @property
    def waiting(self) -> int:
        """Jobs that children have and have not started."""
        return sum(child.waiting for child in self._children)

    def due(self, lanes: Sequence[LaneKey]) -> None:
        """There are some."""
        if not self._closing:
            self._lapsed_once.show([lane for lane in lanes if lane.lapses == 1])
            self._lapsed_often.show([lane for lane in lanes if lane.lapses > 1])
            self._keep_places()

    def give_back(self, topics: Collection[str | None]) -> None:
        """Releases what has not started."""
        names = [topic for topic in topics if topic is not None]
        for child in self._children:
            child.give_back(names)

    async def run(self) -> None:
        """Runs them for ever."""
        loops = [functools.partial(self._keep_busy, self._company)]
        loops += [functools.partial(self._run_one_by_one, crew) for crew in self._loners]
        await asyncio.gather(*(keep_going("suspects", loop, self._condition) for loop in loops))

    async def close(self) -> None:
        """Gives back what has not started, lets the rest finish within the grace, and ends the children."""
        self._closing = True
        self._lapsed_once.show([])
        self._lapsed_often.show([])
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

    async def _keep_busy(self, crew: Crew) -> None:
        """Keeps one child full with those that have lapsed once."""
        while True:
            if not await self._some_for(crew):
                continue
            child = await self._child_of(crew)
            child.stirred.clear()
            wanted = self._wanted(crew, child)
            free = max(0, child.concurrency - child.outstanding)
            if wanted < 1 or not await self._claim_for(crew, child, wanted, free):
                with suppress(TimeoutError):  # somebody else's job may end, and leave its handler's place
                    async with asyncio.timeout(ROOM_PAUSE):
                        await child.stirred.wait()

    async def _run_one_by_one(self, crew: Crew) -> None:
        """Runs those that have lapsed more than once. Later crews help where there is much to do."""
        while True:
            if not crew.due.some.is_set():
                crew.busy_since = None
            if not await self._some_for(crew):
                continue
            if not self._is_needed(crew):
                await asyncio.sleep(BUSY / 4)
                continue
            # The child first: should this process die while it waits for one, nobody has spent an attempt.
            child = await self._child_of(crew)
            if not await self._claim_for(crew, child, 1, 1):
                await asyncio.sleep(ROOM_PAUSE)
                continue
            crew.busy_since = crew.busy_since or time.monotonic()
            while child.outstanding:
                child.stirred.clear()
                await child.stirred.wait()

    async def _some_for(self, crew: Crew) -> bool:
        """Waits for work; False when that took so long that the child was let go."""
        while not crew.due.some.is_set() and crew.unanswered is None:
            try:
                async with asyncio.timeout(KEEP_IDLE if crew.child else None):
                    await crew.due.some.wait()
            except TimeoutError:
                if crew.child is not None and not crew.child.outstanding:
                    child, crew.child = crew.child, None
                    await child.end()
                    return False
        return True

    def _is_needed(self, crew: Crew) -> bool:
        latest = time.monotonic() - BUSY
        before = self._loners[: self._loners.index(crew)]
        return crew.unanswered is not None or all(
            other.busy_since is not None and other.busy_since < latest for other in before
        )

    def _wanted(self, crew: Crew, child: ChildProcess) -> int:
        """How many more the child should have: enough for its slots, and a moment's work beyond."""
        if len(self._settler) >= 4 * self._settings.batch:
            return 0  # the database does not take results: do not add to them
        ahead = min(self._settings.batch, int(crew.completion_rate(child) * AHEAD))
        if child.outstanding > child.concurrency + ahead // 2:
            return 0
        return min(self._settings.batch, child.concurrency + ahead - child.outstanding)

    # Children

    async def _child_of(self, crew: Crew) -> ChildProcess:
        """Its child, or a new one, however many tries and however much time that takes."""
        while crew.child is None or not crew.child.usable:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            if len(self._children) >= MOST_CHILDREN or self._closing:
                await asyncio.sleep(BUSY)
                continue
            child = ChildProcess(
                deliver=self._deliver, concurrency=crew.concurrency, lease=self._settings.seconds("lease")
            )
            self._children.add(child)
            child.seeing_off = asyncio.create_task(self._see_off(child))
            try:
                await child.start(self._order(crew))
            except ChildFailed as error:
                self._failed_to_start(str(error))
                continue
            crew.child = child
            log.info("outbox.child_started", pid=child.pid, concurrency=crew.concurrency)
        return crew.child

    def _order(self, crew: Crew) -> dict[str, object]:
        """What a child has to know. It goes through the socket: arguments and environment can be seen by others."""
        return {
            "target": self._target,
            "dsn": self._dsn,
            "schema": self._schema,
            "concurrency": crew.concurrency,
            "lease": self._settings.seconds("lease"),
            "path": sys.path,
            "log_level": _log_level(),
        }

    def _failed_to_start(self, why: str) -> None:
        pause = min(PAUSE_AFTER_FAILURE * 2 ** min(self._failures, 10), PAUSE_AFTER_FAILURE_MAX)
        self._failures += 1
        self._not_before = time.monotonic() + pause
        self._keep_places()
        if self._condition.complain("suspects", f"the child process for suspects does not start: {why}"):
            log.error("outbox.child_failed", error=why)

    async def _see_off(self, child: ChildProcess) -> None:
        await child.ended.wait()
        self._children.discard(child)
        if child.burdened:
            self._failures = 0
        elif not child.retired and child.topics:
            self._failed_to_start("it died before it had started anything")

    # Claims

    async def _claim_for(self, crew: Crew, child: ChildProcess, limit: int, free: int) -> bool:
        """Claims and sends; False when there was no room, or nothing more to be had."""
        async with self._claiming:
            fresh = crew.unanswered is None
            call = crew.unanswered or self._next_claim(crew, child, limit, free)
            if call is None or not child.usable:
                return False
            crew.unanswered = call
            # Others are claimed beside these, and share the limits of handlers.
            self._in_flight.ask(call.token, ((key.topic, quota) for key, quota in call.quotas.items()))
            claims = await self._store.claim(
                limit=call.limit,
                topics=self._topics,
                worker=self._settings.worker,
                lease=self._settings.lease_time,
                budgets=self._budgets,
                slots=call.slots,
                lanes=call.lanes,
                alone=crew.alone,
                token=call.token,
                fresh=fresh,
            )
            crew.unanswered = None
            self._condition.is_well("suspects")
            crew.due.note(call.quotas, call.limit, claims)
            self._take_in(claims, call, child)
            self._keep_places()
            return bool(claims)

    def _next_claim(self, crew: Crew, child: ChildProcess, limit: int, free: int) -> ClaimCall | None:
        quotas = crew.due.ask(limit, lambda topic: self._room_of(topic, child, limit))
        if not quotas:
            return None
        return ClaimCall(
            token=uuid4(),
            quotas=quotas,
            lanes=crew.due.as_asked(quotas),
            limit=limit,
            slots=free,
            at=time.monotonic(),
        )

    def _take_in(self, claims: Sequence[Claim], call: ClaimCall, child: ChildProcess) -> None:
        ours = self._in_flight.answered(call.token)
        self._tally.claimed += len(claims)
        lease = self._settings.seconds("lease")
        now = time.monotonic()
        jobs = [Job(claim, self._handlers[claim.topic], call.at, lease, now) for claim in claims]
        self._in_flight.add(jobs)
        # Expired: the loop stood still before it read the answer, and somebody else may be running them by now.
        if self._closing or not ours or now > call.at + lease:
            for job in jobs:
                job.stage = "finished"
                self._deliver(Released(job))
        else:
            once, others = apart_once(jobs)
            child.run([*once, *others])

    def _room_of(self, topic: str, child: ChildProcess, limit: int) -> int:
        """How many more of a topic could run in a child."""
        if topic not in child.topics:
            return 0  # the files have changed since this process loaded them
        handler = self._handlers[topic]
        room = limit
        if handler.concurrency is not None:
            room = handler.concurrency - (self._in_flight.of_topic(topic) - self._kept.get(topic, 0))
        if handler.transactional:
            room = min(room, TRANSACTIONS - child.transactional)
        return room

    def _keep_places(self) -> None:
        """While suspects of a handler with a limit are due, half of its places are theirs: or they might get none."""
        before, self._kept = self._kept, {}
        if not self._failures or any(child.usable for child in self._children):  # else nobody could use them
            for topic in self._lapsed_once.topics | self._lapsed_often.topics:
                most = self._handlers[topic].concurrency
                if most is not None:
                    self._kept[topic] = (most + 1) // 2
        for topic in before.keys() | self._kept.keys():
            if change := self._kept.get(topic, 0) - before.get(topic, 0):
                self._in_flight.reserve(topic, change)


def _log_level() -> str | None:
    """How much the command logs; None when this is not its configuration."""
    name = logging.getLevelName(logging.getLogger().level).lower()
    return name if structlog.is_configured() and name in ("debug", "info", "warning", "error") else None
