"""One alert as a Sentry event, sent with the real SDK, and what Sentry's answer means.

The SDK's own queue is not used: it loses what it can't send, and never says what became of an event. Nor is a second
client made beside the application's, which would tear down its profiler.
"""

from __future__ import annotations

import functools
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pulse_outbox.failures import DeadLetter

SEND_TIMEOUT = 8.0
LONGEST_RATE_LIMIT = 3600.0
DEFAULT_RATE_LIMIT = 60.0
# Not about the alert but about the key, the project or a proxy: with those put right it will be accepted.
CURABLE = frozenset({401, 403, 404, 407, 408, 425, 429})


@dataclass(frozen=True, slots=True)
class Receipt:
    """What came of sending one alert."""

    kind: Literal["accepted", "refused", "failed"]
    why: str = ""
    pause: float = 0.0
    """Seconds for which Sentry wants to be left alone."""


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


def send(client: Any | None, letter: DeadLetter, worker: str) -> Receipt:
    """Sends one alert and waits for the answer: to be called in a thread."""
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
                "runbook": letter.runbook,
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
