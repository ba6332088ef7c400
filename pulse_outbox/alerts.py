"""Alerts: what has died is told to Sentry, to the application's hook or to the log, and then the debt is paid.

The debt is on the rows, so any dispatcher may pay it. An alert has its id before it is sent, and is sent again under
the same id until it was accepted: at least once, and Sentry keeps one of them. Whatever may block runs in a thread that
nobody waits for.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import random
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal, assert_never

from pulse_outbox.failures import describe_error
from pulse_outbox.log import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from uuid import UUID

    from pulse_outbox.failures import DeadLetter, Redact
    from pulse_outbox.store import Store

RUNBOOK = "runbooks/a-job-died.md"
GATHER = 0.2
"""Seconds between a death and the look for what is owed: the rest of its batch is stored meanwhile."""
QUIET_FIRST, QUIET_LONGEST = 1.0, 15.0
"""Seconds for which later deaths of a kind gather after an alert of it; doubled while they go on."""
LEASE = timedelta(seconds=20)
"""How long an alert is lent to one sender; longer than sending may take."""
SEND_TIMEOUT = 8.0
CALL_DEADLINE = 12.0
"""After so many seconds a call to Sentry or to the hook counts as failed, whatever still becomes of it."""
BACKOFF_FIRST, BACKOFF_LONGEST = 1.0, 60.0
LONGEST_RATE_LIMIT = 3600.0
DEFAULT_RATE_LIMIT = 60.0
HOOK_TRIES = 5
# Not about the alert but about the key, the project or a proxy: with those put right it will be accepted.
CURABLE = frozenset({401, 403, 404, 407, 408, 425, 429})


@dataclass(frozen=True, slots=True)
class Receipt:
    """What came of sending one alert."""

    kind: Literal["accepted", "refused", "failed"]
    why: str = ""
    pause: float = 0.0
    """Seconds for which Sentry wants to be left alone."""


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
        with_sentry = has_sentry()
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
            receipt: Receipt = await self._sentry_calls.run(_send, application_client(), letter, self._worker)
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
                await _within(CALL_DEADLINE, self._hook(letter))
            else:
                result = await self._hook_calls.run(self._hook, letter)
                if inspect.isawaitable(result):
                    await _within(CALL_DEADLINE, result)
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


class Errand:
    """Calls that may block, one at a time, in a thread that keeps neither the loop nor the process's end waiting."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = False

    async def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """What the function returns or raises, or TimeoutError; then the thread is left to itself."""
        if self._busy:
            raise TimeoutError("the last call has not ended yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def take(result: tuple[Any, BaseException | None]) -> None:
            self._busy = False
            if not answer.done():
                answer.set_result(result)

        def work() -> None:
            result: tuple[Any, BaseException | None]
            try:
                result = (function(*arguments), None)
            except BaseException as error:
                result = (None, error)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(take, result)

        self._busy = True
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(work,), name=f"pulse-outbox-{self._name}", daemon=True
        ).start()
        async with asyncio.timeout(CALL_DEADLINE):
            value, error = await answer
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(type(error).__name__) from error
        return value


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
        "runbook": RUNBOOK,
    }


# Sentry. What follows the next two functions runs in a thread.


def application_client() -> Any | None:
    """The client of an application that has called `sentry_sdk.init`."""
    sdk = sys.modules.get("sentry_sdk")
    client = sdk.get_client() if sdk is not None else None
    return client if client is not None and client.is_active() else None


def has_sentry() -> bool:
    """Whether there is a Sentry to tell: the application's, or the environment's SENTRY_DSN."""
    client = application_client()
    if client is not None:
        # `init` without a DSN, also none in the environment: it says that there is to be none.
        return getattr(client, "transport", None) is not None
    return bool(os.environ.get("SENTRY_DSN"))


def _send(client: Any | None, letter: DeadLetter, worker: str) -> Receipt:
    """Sends one alert and waits for the answer."""
    from sentry_sdk.envelope import Envelope

    client = client or _own_client(os.environ["SENTRY_DSN"])
    options: Mapping[str, Any] = client.options
    event: Any = sentry_event(letter, worker, options)
    if (before_send := options.get("before_send")) is not None:
        try:
            event = before_send(event, {})
        except Exception as error:
            return Receipt("refused", why=f"before_send raised {type(error).__name__}")
        if event is None:
            return Receipt("refused", why="before_send dropped it")
        event["event_id"] = letter.alert_id.hex
    envelope = Envelope(headers={"event_id": letter.alert_id.hex, "sent_at": _rfc3339(datetime.now(UTC))})
    envelope.add_event(event)
    try:
        envelope.serialize()
    except Exception as error:
        return Receipt("refused", why=f"before_send made it unsendable: {type(error).__name__}")
    if options.get("transport") is not None:
        # One of the application's own making. It can't say what became of the alert: handed over is accepted.
        client.transport.capture_envelope(envelope)
        return Receipt("accepted")
    return judge(*_post(options, envelope))


def judge(status: int, headers: Mapping[str, str], now: datetime | None = None) -> Receipt:
    """What Sentry's answer means."""
    pause = _asked_pause(status, headers, now or datetime.now(UTC))
    if 200 <= status < 300:
        return Receipt("accepted", pause=pause)
    if 400 <= status < 500 and status not in CURABLE:
        return Receipt("refused", why=f"status {status}")
    return Receipt("failed", why=f"status {status}", pause=pause)


def _asked_pause(status: int, headers: Mapping[str, str], now: datetime) -> float:
    pause = 0.0
    if limits := headers.get("x-sentry-rate-limits"):
        for limit in limits.split(","):
            seconds, _, rest = limit.strip().partition(":")
            categories = rest.partition(":")[0]
            if not categories or {"error", "default"} & set(categories.split(";")):
                with suppress(ValueError):
                    pause = max(pause, float(seconds))
    elif status in (429, 503) and (after := headers.get("retry-after")):
        try:
            pause = float(after)
        except ValueError:
            with suppress(ValueError, TypeError):
                pause = (parsedate_to_datetime(after) - now).total_seconds()
    if status == 429 and not pause > 0:
        pause = DEFAULT_RATE_LIMIT
    return min(pause, LONGEST_RATE_LIMIT) if pause > 0 else 0.0


def sentry_event(letter: DeadLetter, worker: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The alert as Sentry has it. No scope, no stack, no breadcrumbs: they may hold what must not leave the process."""
    from sentry_sdk.consts import VERSION

    title = f"{letter.topic}: {letter.error_class or 'unknown error'}"
    tags = {
        "topic": letter.topic,
        "handler": letter.handler_name,
        "rule": letter.rule,
        "worker": worker,
        "outbox.event_id": str(letter.event_id),
    }
    event = {
        "event_id": letter.alert_id.hex,
        "timestamp": _rfc3339(letter.last_dead_lettered_at),
        "platform": "python",
        "level": "error",
        "logger": "pulse_outbox",
        "message": title,
        "exception": {
            "values": [
                {
                    "type": title,
                    "value": letter.last_error or "",
                    "mechanism": {"type": "pulse_outbox", "handled": True},
                }
            ]
        },
        "fingerprint": ["pulse-outbox", letter.topic, letter.error_class],
        "tags": {name: value[:200] for name, value in tags.items() if value},
        "contexts": {
            "dead_letter": {
                "event_id": str(letter.event_id),
                "topic": letter.topic,
                "source": letter.source,
                "target": letter.target,
                "handler_name": letter.handler_name,
                "error_class": letter.error_class,
                "last_error": letter.last_error,
                "attempts": letter.attempts,
                "verdict": letter.verdict,
                "rule": letter.rule,
                "count": letter.count,
                "first_failed_at": letter.first_failed_at and _rfc3339(letter.first_failed_at),
                "dead_lettered_at": _rfc3339(letter.dead_lettered_at),
                "last_dead_lettered_at": _rfc3339(letter.last_dead_lettered_at),
                "runbook": RUNBOOK,
                "type": "dead letter",
            }
        },
        "sdk": {"name": "sentry.python", "version": VERSION},
    }
    for name in ("release", "environment", "server_name", "dist"):
        if options.get(name) is not None:
            event[name] = str(options[name]).strip()
    return event


def _rfc3339(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@functools.cache
def _own_client(dsn: str) -> Any:
    """A client for its options only: release, environment, certificates and proxies as the environment has them."""
    import sentry_sdk

    return sentry_sdk.Client(
        dsn=dsn,
        default_integrations=False,
        auto_enabling_integrations=False,
        enable_backpressure_handling=False,
    )


def _post(options: Mapping[str, Any], envelope: Any) -> tuple[int, Mapping[str, str]]:
    """Sends an envelope as the SDK would, with its proxies and certificates, and gives what was answered."""
    from sentry_sdk.transport import HttpTransport

    answers: list[Any] = []

    class OneEnvelope(HttpTransport):
        """The SDK's own transport, without its queue: it sends while the caller waits."""

        TIMEOUT = SEND_TIMEOUT  # type: ignore[assignment]  # any number of seconds

        def _get_pool_options(self, *arguments: Any, **named: Any) -> dict[str, Any]:
            from urllib3 import Timeout

            pool_options: dict[str, Any] = super()._get_pool_options(*arguments, **named)
            # Trying again is done by whoever pays, after a pause.
            return {**pool_options, "timeout": Timeout(total=SEND_TIMEOUT), "retries": False}

        def _update_rate_limits(self, response: Any) -> None:
            # Every answer passes here. Not kept by this transport, which has no second envelope to hold back.
            answers.append((response.status, dict(response.headers)))

    transport = OneEnvelope({**options, "send_client_reports": False})
    try:
        transport._send_envelope(envelope)
    finally:
        transport._pool.clear()
    [(status, headers)] = answers
    return status, {name.lower(): value for name, value in headers.items()}


# Waiting


async def _nap(event: asyncio.Event, seconds: float) -> bool:
    """Waits for the event, and says whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def _within(seconds: float, awaitable: Awaitable[object]) -> None:
    """Awaits what an application gave us; what ignores its cancellation is left behind."""

    async def guarded() -> None:
        try:
            await awaitable
        except (SystemExit, KeyboardInterrupt) as error:
            # Out of a task these would end the event loop.
            raise RuntimeError(f"the hook raised {type(error).__name__}") from error

    task = asyncio.ensure_future(guarded())
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if not done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if task.cancelled():
        raise RuntimeError("the hook was cancelled")
    task.result()


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object with an async __call__
    )
