"""Suspects: events whose lease lapsed, run so that one that kills its worker takes nobody with it.

This is how a dispatcher does it that was built in code: it can't start itself again as a child, so it lets its other
jobs finish and runs the suspect with nothing beside it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

from pulse_outbox.dispatcher.jobs import Job
from pulse_outbox.log import log

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from uuid import UUID

    from pulse_outbox.dispatcher.intake import Intake
    from pulse_outbox.dispatcher.jobs import InFlight
    from pulse_outbox.dispatcher.lanes import LaneKey
    from pulse_outbox.dispatcher.settings import DispatcherSettings
    from pulse_outbox.dispatcher.slots import Slots
    from pulse_outbox.handlers import Handler
    from pulse_outbox.store import Store

TURN_FOR_OTHERS = 0.5
"""How long everybody else runs between two suspects, in seconds."""
LONGEST_TURN = 30.0
QUIET_PATIENCE = 2.0
SUSPECT = "a suspect runs alone"


class Suspects(Protocol):
    """Whoever runs the suspects of a dispatcher."""

    @property
    def waiting(self) -> int:
        """How many have been claimed and have not started, other than in this process's slots."""

    def due(self, lanes: Sequence[LaneKey]) -> None:
        """There are some."""

    def give_back(self, topics: Collection[str | None]) -> None:
        """Releases what has not started, other than in this process's slots."""

    async def run(self) -> None:
        """Runs them for ever."""

    async def close(self) -> None:
        """No more claims; what runs gets the grace, and ends after it."""


class LonelySuspects:
    """Runs one suspect after the other in this process, each with nothing beside it."""

    def __init__(
        self,
        store: Store,
        *,
        settings: DispatcherSettings,
        handlers: Mapping[str, Handler],
        in_flight: InFlight,
        slots: Slots,
        intake: Intake,
    ) -> None:
        self._store = store
        self._settings = settings
        self._handlers = handlers
        self._in_flight = in_flight
        self._slots = slots
        self._intake = intake
        self._lanes: Sequence[LaneKey] = ()
        self._some = asyncio.Event()
        self._token: UUID | None = None
        self._closing = False
        self.waiting = 0

    def due(self, lanes: Sequence[LaneKey]) -> None:
        """There are some."""
        self._lanes = lanes
        if not self._closing:
            self._some.set()

    def give_back(self, topics: Collection[str | None]) -> None:
        """All that there is waits in the slots."""

    async def close(self) -> None:
        """What runs is in the slots, which get the same grace."""
        self._closing = True
        self._some.clear()

    async def run(self) -> None:
        """One suspect at a time, and a turn for everybody else in between."""
        turn = TURN_FOR_OTHERS
        while True:
            if self._token is None:  # else its answer was lost: what it took is in no listing
                await self._some.wait()
            self._some.clear()
            quiet = await self._intake.hold(SUSPECT)
            try:
                if quiet := quiet and await self._quiet() and not self._closing:
                    await self._run_one()
            finally:
                self._intake.let_go(SUSPECT)
            # Where a job runs for hours, asking again and again for silence would keep everybody else from working.
            turn = TURN_FOR_OTHERS if quiet else min(turn * 2, LONGEST_TURN)
            await asyncio.sleep(turn)

    async def _run_one(self) -> None:
        topics = sorted(self._handlers)
        claimed_at = time.monotonic()
        # Kept until it is answered: a claim that was forgotten would lapse, and that would spend the budget.
        token = self._token = self._token or uuid4()
        self._in_flight.ask(token)
        claims = await self._store.claim(
            token=token,
            limit=1,
            topics=topics,
            worker=self._settings.worker,
            lease=self._settings.lease_time,
            budgets=[self._handlers[topic].retry.max_attempts for topic in topics],
            lanes=[{**lane._asdict(), "quota": 1} for lane in self._lanes],
            alone=True,
        )
        self._token = None
        ours = self._in_flight.answered(token)
        for claim in claims:
            log.info("outbox.suspect", event_id=str(claim.event_id), topic=claim.topic, lapses=claim.lapses)
            job = Job(claim, self._handlers[claim.topic], claimed_at, self._settings.seconds("lease"))
            self._in_flight.add([job])
            if not ours:
                job.leased_until = claimed_at  # the slots give back what is too late to start
            self._slots.add([job])
        while not self._is_quiet():
            await asyncio.sleep(0.01)

    def _is_quiet(self) -> bool:
        # A slot whose handler can't be stopped after its timeout is lost, but it must not stop everything else.
        return not self._slots.worth_waiting_for and not self._slots.waiting

    async def _quiet(self) -> bool:
        """Waits until nothing runs in this process, but not for long."""
        give_up_at = time.monotonic() + QUIET_PATIENCE
        while not self._is_quiet():
            if time.monotonic() > give_up_at:
                return False
            await asyncio.sleep(0.01)
        return True
