"""The loop that pays what is owed.

The debt is on the rows, so any dispatcher may pay it. An alert has its id before it is sent, and is sent again under
the same id until it was accepted: at least once, and Sentry keeps one of them.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, assert_never

import structlog

from pulse_outbox.alerts import sentry
from pulse_outbox.alerts.errands import Errand, awaited
from pulse_outbox.alerts.sentry import Receipt
from pulse_outbox.failures import describe_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from pulse_outbox.failures import DeadLetter, Redact
    from pulse_outbox.store import Store

log = structlog.get_logger("pulse_outbox")

GATHER = 0.2
"""Seconds between a death and the look for what is owed: the rest of its batch is stored meanwhile."""
QUIET_FIRST, QUIET_LONGEST = 1.0, 15.0
"""Seconds for which later deaths of a kind gather after an alert of it; doubled while they go on."""
LEASE = timedelta(seconds=20)
"""How long an alert is lent to one sender; longer than sending may take."""
BACKOFF_FIRST, BACKOFF_LONGEST = 1.0, 60.0
HOOK_TRIES = 5


class Alerts:
    """Pays what is owed, whoever stored the death: at once when this dispatcher did, else when it next looks."""

    def __init__(
        self,
        store: Store,
        *,
        worker: str,
        poll: float,
        hook: Callable[..., Any] | None = None,
        redact: Redact | None = None,
    ) -> None:
        self._store = store
        self._worker = worker
        self._poll = poll
        self._hook = hook
        self._redact = redact
        self._random = random.Random()
        self._pace = Pace()
        self._sentry_calls, self._hook_calls = Errand("sentry"), Errand("hook")
        self._woken = asyncio.Event()
        self._at_rest = asyncio.Event()
        self._closing = False
        self._left_alone_until = 0.0
        self._failures = 0
        self._failing_since = 0.0
        self._accepted: dict[UUID, int] = {}
        """Alerts that Sentry has and the hook has not → how often the hook has failed."""
        self._unpaid: dict[UUID, None] = {}
        """Told, and the database does not know it yet."""

    def wake(self) -> None:
        """Something has died."""
        self._woken.set()

    async def run(self) -> None:
        """Pays for ever."""
        while True:
            await self._pay_all()
            await self._rest()

    async def finish(self, within: float) -> None:
        """Before the process ends: pays what can be paid in so many seconds. The rest is for others to pay."""
        self._closing = True
        if time.monotonic() < self._left_alone_until:
            return
        self._at_rest.clear()
        self._woken.set()
        await _nap(self._at_rest, within)

    async def _pay_all(self) -> None:
        self._woken.clear()
        try:
            for alert_id in list(self._unpaid):
                await self._pay(alert_id)
            while time.monotonic() >= self._left_alone_until:
                quiet = [] if self._closing else self._pace.quiet(time.monotonic())
                letter = await self._store.next_alert(lease=LEASE, quiet=quiet)
                if letter is None:
                    break
                self._pace.alerted((letter.topic, letter.error_class), time.monotonic())
                await self._alert(letter)
        finally:
            self._at_rest.set()

    async def _rest(self) -> None:
        now = time.monotonic()
        if now < self._left_alone_until:
            await asyncio.sleep(self._left_alone_until - now)
        elif await _nap(self._woken, min(self._poll, self._pace.until_next(now))) and not self._closing:
            await asyncio.sleep(GATHER)

    async def _alert(self, letter: DeadLetter) -> None:
        """Tells everyone who is to know, then pays. What could not be told comes again when its lease is over."""
        with_sentry = sentry.has_sentry()
        told_by = ["sentry"] if with_sentry else []
        if with_sentry and letter.alert_id not in self._accepted:
            receipt = await self._send(letter)
            match receipt.kind:
                case "failed":
                    self._sentry_failed(receipt)
                    return
                case "refused":
                    # Sending it again would not help. The line says all that the alert would have said.
                    log.error("outbox.alert_refused", why=receipt.why, **fields_of(letter))
                    told_by = ["log"]
                case "accepted":
                    self._sentry_answered(receipt)
                case _:
                    assert_never(receipt.kind)
        if self._hook is not None:
            match await self._call_hook(letter):
                case "told":
                    told_by.append("hook")
                case "failed":
                    return
                case "gave up":
                    told_by = told_by or ["log"]
        if not told_by:
            log.error("outbox.alert", **fields_of(letter))
            told_by = ["log"]
        self._unpaid[letter.alert_id] = None
        await self._pay(letter.alert_id)
        log.info(
            "outbox.alerted",
            alert_id=str(letter.alert_id),
            topic=letter.topic,
            error_class=letter.error_class,
            count=letter.count,
            told_by=told_by,
        )

    async def _pay(self, alert_id: UUID) -> None:
        await self._store.pay_alert(alert_id)
        self._unpaid.pop(alert_id, None)
        self._accepted.pop(alert_id, None)

    # Sentry

    async def _send(self, letter: DeadLetter) -> Receipt:
        try:
            receipt: Receipt = await self._sentry_calls.run(
                sentry.send, sentry.application_client(), letter, self._worker
            )
            return receipt
        except Exception as error:
            return Receipt("failed", why=describe_error(error, self._redact))

    def _sentry_failed(self, receipt: Receipt) -> None:
        now = time.monotonic()
        backoff = min(BACKOFF_FIRST * 2 ** min(self._failures, 20), BACKOFF_LONGEST)
        # Dispatchers that were refused together must not come back together.
        pause = max(receipt.pause, backoff) * self._random.uniform(1, 1.25)
        self._left_alone_until = now + pause
        self._failures += 1
        if self._failures == 1:
            self._failing_since = now
            log.warning("outbox.alert_failed", why=receipt.why, again_in=round(pause, 1))

    def _sentry_answered(self, receipt: Receipt) -> None:
        if receipt.pause:
            self._left_alone_until = time.monotonic() + receipt.pause
        if self._failures:
            self._failures = 0
            silence = time.monotonic() - self._failing_since
            log.info("outbox.alert_recovered", after_seconds=round(silence, 1))

    # The hook

    async def _call_hook(self, letter: DeadLetter) -> Literal["told", "failed", "gave up"]:
        """Tells the hook; after some failures it is not asked again, and the line about the last says everything."""
        assert self._hook is not None
        try:
            if _is_async(self._hook):
                await awaited(self._hook(letter))
            else:
                result = await self._hook_calls.run(self._hook, letter)
                if inspect.isawaitable(result):
                    await awaited(result)
            return "told"
        except Exception as error:
            tries = self._accepted.get(letter.alert_id, 0) + 1
            while len(self._accepted) >= 1000:
                self._accepted.pop(next(iter(self._accepted)))
            self._accepted[letter.alert_id] = tries
            gave_up = tries >= HOOK_TRIES
            log.error(
                "outbox.hook_failed",
                hook_error=describe_error(error, self._redact),
                tries=tries,
                gave_up=gave_up,
                **fields_of(letter),
            )
            return "gave up" if gave_up else "failed"


class Pace:
    """Which kinds were alerted a moment ago: a bug that kills ten jobs a second is no ten alerts a second."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], tuple[float, float]] = {}
        """Kind → quiet until when, and how long that is."""

    def alerted(self, kind: tuple[str, str], now: float) -> None:
        """An alert of this kind goes out."""
        _, before = self._kinds.get(kind, (0.0, 0.0))
        length = min(max(QUIET_FIRST, before * 2), QUIET_LONGEST)
        self._kinds[kind] = (now + length, length)

    def quiet(self, now: float) -> list[tuple[str, str]]:
        """Kinds whose deaths gather at present."""
        # Forgotten when as much time again has passed without a death: then the next is news.
        self._kinds = {
            kind: (until, length) for kind, (until, length) in self._kinds.items() if until + length > now
        }
        return [kind for kind, (until, _) in self._kinds.items() if until > now]

    def until_next(self, now: float) -> float:
        """Seconds until one of them is quiet no longer."""
        return min((until - now for until, _ in self._kinds.values() if until > now), default=float("inf"))


def fields_of(letter: DeadLetter) -> dict[str, Any]:
    """The alert as a log line has it."""
    return {
        "alert_id": str(letter.alert_id),
        "topic": letter.topic,
        "error_class": letter.error_class,
        "count": letter.count,
        "event_id": str(letter.event_id),
        "source": letter.source,
        "target": letter.target,
        "handler": letter.handler_name,
        "error": letter.last_error,
        "attempts": letter.attempts,
        "verdict": letter.verdict,
        "rule": letter.rule,
        "dead_lettered_at": letter.dead_lettered_at.isoformat(),
        "runbook": letter.runbook,
    }


async def _nap(event: asyncio.Event, seconds: float) -> bool:
    """Waits for the event, and says whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object with an async __call__
    )
