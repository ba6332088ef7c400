"""Storing results: outcomes are gathered while a write is under way, and go into the next one together.

A result is offered until the database accepts or refuses it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, assert_never

import psycopg

from pulse_outbox.dispatcher.jobs import (
    Completed,
    Failed,
    Lapsed,
    Over,
    Released,
    Snoozed,
    all_completed,
    apart,
)
from pulse_outbox.errors import BadArgument
from pulse_outbox.log import log
from pulse_outbox.store import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from uuid import UUID

    from pulse_outbox.dispatcher.jobs import InFlight, Job, Outcome
    from pulse_outbox.dispatcher.state import Condition
    from pulse_outbox.store import Answer, Store

BATCHES_AT_ONCE = 2
"""How many batches one write may store. Few large writes cost the database less than many small ones."""
GATHER = 0.002
"""How long results wait for others where they come in handfuls, in seconds: so many commits cost more than the jobs."""
HANDFUL = 16
"""A write stored one if it had so many, and not a quarter of what one may store."""
LOCKED_PAUSE = 0.05
"""How long a result waits whose row somebody else has locked, in seconds; it doubles up to the next."""
LOCKED_PAUSE_MAX = 2.0
UNSTORABLE = "the failure could not be stored as it was reported"


class Settler:
    """Takes outcomes at any time and writes them in batches, one write at a time."""

    def __init__(
        self,
        store: Store,
        *,
        in_flight: InFlight,
        batch: int,
        condition: Condition,
        settled: Callable[[Sequence[Outcome], Mapping[UUID, Answer]], None],
    ) -> None:
        self._store = store
        self._in_flight = in_flight
        self._at_once = BATCHES_AT_ONCE * batch
        self._condition = condition
        self._settled = settled
        self._waiting: list[Outcome] = []
        self._wanted = asyncio.Event()
        self._busy = False
        self._locked_tries: dict[Job, int] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._locked_tries)

    @property
    def idle(self) -> bool:
        """Nothing waits, and nothing is being written."""
        return not self._waiting and not self._busy and not self._locked_tries

    def add(self, outcome: Outcome) -> None:
        """To be written as soon as the write under way is done; a moment later where results come in handfuls."""
        self._waiting.append(outcome)
        self._wanted.set()

    async def run(self) -> None:
        """Writes for ever. An error that retrying did not cure leaves all results where they are."""
        stored = 0
        while True:
            await self._wanted.wait()
            if stored >= HANDFUL and max(stored, len(self._waiting)) * 4 < self._at_once:
                await asyncio.sleep(GATHER)
            self._busy = True
            batch, self._waiting = self._waiting[: self._at_once], self._waiting[self._at_once :]
            if not self._waiting:
                self._wanted.clear()
            stored = len(batch)
            calls = _calls(batch)
            try:
                for call in calls:
                    await self._offer(call)
            except BaseException:
                self._waiting = [outcome for call in calls for outcome in call] + self._waiting
                self._wanted.set()
                raise
            finally:
                self._busy = False

    async def _offer(self, call: list[Outcome]) -> None:
        """Offers what one call can store; what has been answered leaves the list, whatever happens to the rest."""
        try:
            answers = await self._send(call)
        except (psycopg.Error, BadArgument) as error:
            if not _is_about_data(error):
                raise
            await self._isolate(call, error)
            return
        answered = call.copy()
        call.clear()
        self._answered(answered, answers)

    async def _isolate(self, call: list[Outcome], error: Exception) -> None:
        """The database refuses this batch for good: find the one that it refuses, and spare the others."""
        if len(call) > 1:
            while call:
                await self._offer(call[:1])
                del call[0]
            return
        outcome = call.pop()
        if isinstance(outcome, Failed) and outcome.error != UNSTORABLE:
            known = {"handler": outcome.job.handler.name, "verdict": outcome.failure.get("verdict")}
            failure = {**known, "error_class": "Unstorable", "rule": "unstorable"}
            call.append(Failed(outcome.job, UNSTORABLE, failure, outcome.delay, outcome.terminal))
            await self._offer(call)
            return
        log.error(
            "outbox.settle_refused",
            event_id=str(outcome.job.claim.event_id),
            topic=outcome.job.claim.topic,
            outcome=type(outcome).__name__,
            sqlstate=getattr(error, "sqlstate", None),
        )
        # Its lease runs out, and the watchdog decides.
        self._answered([outcome], {outcome.job.claim.event_id: "lost"})

    async def _send(self, part: Sequence[Outcome]) -> Mapping[UUID, Answer]:
        """The one call that stores outcomes of one kind."""
        claims = [outcome.job.claim for outcome in part]
        first = part[0]
        match first:
            case Completed():
                return await self._store.complete(claims, delete=first.job.handler.completed == "delete")
            case Failed():
                return await self._store.fail([_failure(outcome) for outcome in part])
            case Snoozed():
                delays = [outcome.delay for outcome in part if isinstance(outcome, Snoozed)]
                return await self._store.snooze(claims, delays)
            case Released():
                return await self._store.release(claims)
            case Lapsed():
                names = {outcome.job.claim.topic: outcome.job.handler.name for outcome in part}
                return await self._store.lapse(claims, first.error, handlers=names)
            case Over():
                return {}
            case _:
                assert_never(first)

    def _answered(self, outcomes: list[Outcome], answers: Mapping[UUID, Answer]) -> None:
        over = outcomes
        if answers:
            over = [outcome for outcome in outcomes if answers.get(outcome.job.claim.event_id) != "locked"]
            for outcome in outcomes:
                if answers.get(outcome.job.claim.event_id) == "locked":
                    self._put_off(outcome)
        jobs = [outcome.job for outcome in over]
        self._in_flight.remove(jobs)
        if self._locked_tries:
            for job in jobs:
                self._locked_tries.pop(job, None)
        try:
            self._settled(over, answers)
        except Exception as error:
            # It is stored. A log that can't be written must not have it offered again.
            self._condition.complain("log", f"a log line can't be written: {type(error).__name__}")

    def _put_off(self, outcome: Outcome) -> None:
        tries = self._locked_tries.get(outcome.job, 0)
        self._locked_tries[outcome.job] = tries + 1
        pause = min(LOCKED_PAUSE * 2 ** min(tries, 10), LOCKED_PAUSE_MAX)
        asyncio.get_running_loop().call_later(pause, self.add, outcome)


def _calls(batch: list[Outcome]) -> list[list[Outcome]]:
    """The outcomes in groups that one call can store."""
    if all_completed(batch) and len({outcome.job.handler.completed for outcome in batch}) == 1:
        return _apart(batch)  # nearly always
    alike: dict[object, list[Outcome]] = {}
    for outcome in batch:
        same: object = type(outcome)
        if isinstance(outcome, Completed):
            same = outcome.job.handler.completed
        elif isinstance(outcome, Lapsed):
            same = Lapsed, outcome.error
        alike.setdefault(same, []).append(outcome)
    return [call for outcomes in alike.values() for call in _apart(outcomes)]


def _apart(outcomes: list[Outcome]) -> list[list[Outcome]]:
    """The outcomes in groups of which each has an event only once, since an answer names the event."""
    if len({outcome.job.claim.raw_id for outcome in outcomes}) == len(outcomes):
        return [outcomes]  # nearly always
    jobs = {outcome.job: outcome for outcome in outcomes}
    return [[jobs[job] for job in group] for group in apart(jobs)]


def _is_about_data(error: psycopg.Error | BadArgument) -> bool:
    """Whether the database refuses what it was given, and would for ever; anything else may pass."""
    if isinstance(error, BadArgument):
        return True
    if error.sqlstate is None:
        return isinstance(error, psycopg.DataError)
    return error.sqlstate.startswith(("22", "23"))


def _failure(outcome: Outcome) -> Failure:
    assert isinstance(outcome, Failed)
    return Failure(
        held=outcome.job.claim,
        error=outcome.error,
        failure=outcome.failure,
        delay=outcome.delay,
        terminal=outcome.terminal,
    )
