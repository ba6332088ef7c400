"""The Python halves of the mutants: each breaks the product in the process that calls it."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import psycopg

from pulse_outbox.dispatcher.core import Dispatcher
from pulse_outbox.dispatcher.heart import Heart
from pulse_outbox.dispatcher.jobs import Completed, Job
from pulse_outbox.dispatcher.settings import DispatcherSettings
from pulse_outbox.dispatcher.slots import Slot, Slots
from pulse_outbox.outbox import Outbox
from pulse_outbox.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AsyncExitStack
    from uuid import UUID

    from pulse_outbox.dispatcher.jobs import Outcome
    from pulse_outbox.dispatcher.suspects import Suspects
    from pulse_outbox.failures import DeadLetter
    from pulse_outbox.store import Answer


def run_again_what_was_lost() -> None:
    """A completion that is answered with 'lost' is no reason to look, but to run the job again."""
    settled = Dispatcher._settled

    def run_again(self: Dispatcher, outcomes: Sequence[Outcome], answers: Mapping[UUID, Answer]) -> None:
        settled(self, outcomes, answers)
        jobs = [
            Job(outcome.job.claim, outcome.job.handler, time.monotonic())
            for outcome in outcomes
            if isinstance(outcome, Completed) and answers.get(outcome.job.claim.event_id) == "lost"
        ]
        self._in_flight.add(jobs)
        self._slots.add(jobs)

    setattr(Dispatcher, "_settled", run_again)  # noqa: B010  mypy would not have it otherwise


def pay_alerts_first() -> None:
    """Whoever is lent an alert marks it as sent: from then on it is in his memory alone."""
    next_alert = Store.next_alert

    async def lend_and_forget(self: Store, **named: Any) -> DeadLetter | None:
        letter = await next_alert(self, **named)
        if letter is not None:
            await self.pay_alert(letter.alert_id)
        return letter

    setattr(Store, "next_alert", lend_and_forget)  # noqa: B010


def beat_in_the_event_loop() -> None:
    """Heartbeats are a task beside the handlers, and stand still when one of those blocks."""
    beating: dict[Heart, asyncio.Task[None]] = {}

    async def start(self: Heart) -> None:
        beating[self] = asyncio.create_task(self._beat_until_stopped())
        await asyncio.sleep(0)

    async def stop(self: Heart) -> None:
        self._stop.set()
        await asyncio.wait([beating[self]], timeout=5)

    setattr(Heart, "start", start)  # noqa: B010
    setattr(Heart, "stop", stop)  # noqa: B010


def enqueue_in_another_transaction() -> None:
    """The event is committed at once, whatever becomes of the caller's transaction."""
    enqueue = Outbox.enqueue

    def enqueue_now(self: Outbox, connection: Any, topic: str, payload: object, **options: Any) -> UUID:
        with psycopg.connect(os.environ["PULSE_OUTBOX_DSN"], autocommit=True) as own:
            return enqueue(self, own, topic, payload, outside_transaction=True, **options)

    setattr(Outbox, "enqueue", enqueue_now)  # noqa: B010


def let_handlers_hang() -> None:
    """Nobody looks at the clock."""

    def look_away(self: Slots, slot: Slot, now: float) -> None:
        slot.deadline = None

    setattr(Slots, "_expire", look_away)  # noqa: B010


def serve_every_topic() -> None:
    """Whatever there is a handler for, as without patterns."""

    def serve_all(self: DispatcherSettings, topics: Iterable[str]) -> list[str]:
        return list(topics)

    setattr(DispatcherSettings, "serves", serve_all)  # noqa: B010


def have_no_children() -> None:
    """Suspects run in the dispatcher's own process, as where an application can't be loaded a second time."""
    open_suspects = Dispatcher._open_suspects

    async def open_without_target(self: Dispatcher, stack: AsyncExitStack) -> Suspects:
        self._target = None
        return await open_suspects(self, stack)

    setattr(Dispatcher, "_open_suspects", open_without_target)  # noqa: B010
