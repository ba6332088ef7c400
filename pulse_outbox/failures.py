"""Failures: what a handler may raise, the verdict on it, and the text and history that are kept of it.

Text that leaves here is safe to store and to send: no NUL, no lone surrogates, at most 8 KiB, no payload value,
no input of a validation error, no DETAIL of a database error. Describing a failure never fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, ValidationError

from pulse_outbox.errors import OutboxError, SettingsError
from pulse_outbox.events import as_timedelta

MAX_ERROR_BYTES = 8 * 1024
MANY = 10
"""From so many deaths of one kind on, an alert names the runbook for many."""
REDACT_FAILED = "[redacted: redact hook failed]"
# The hook sees more than is kept: a secret cut in half by the cap would escape it.
_MAX_BYTES_FOR_REDACT = 64 * 1024
_MAX_PARTS = 20
_DRIVERS = ("psycopg", "asyncpg", "django.db", "sqlalchemy.dialects")
# SQLAlchemy's, by name because it need not be installed. Its str() quotes the statement's parameters.
_STATEMENT_ERROR = ("sqlalchemy.exc", "StatementError")

Redact = Callable[[str], str]


class TerminalHandlerError(OutboxError):
    """Raised by a handler that knows that trying again is pointless: the event dead-letters at once."""


class PayloadError(TerminalHandlerError):
    """The stored payload can't be decoded, or no longer fits the handler's model."""


class RetryLater(OutboxError):
    """Raised by a handler to run again later, without this being a failure: no attempt is spent.

    *when* is a delay (seconds or timedelta) or an aware datetime, in the future. Past `max_snoozes` such waits in
    one cycle, or past `max_age` since the event was created, the event dead-letters instead.
    """

    def __init__(
        self,
        when: float | timedelta | datetime,
        *,
        max_snoozes: int | None = None,
        max_age: float | timedelta | None = None,
    ) -> None:
        checked = _check_later(when)
        self.delay = checked if isinstance(checked, timedelta) else None
        self.at = checked if isinstance(checked, datetime) else None
        if max_snoozes is not None and (isinstance(max_snoozes, bool) or max_snoozes < 0):
            raise SettingsError("RetryLater: max_snoozes must not be negative")
        self.max_snoozes = max_snoozes
        self.max_age = (
            None if max_age is None else as_timedelta("RetryLater: max_age", max_age, SettingsError)
        )
        super().__init__(f"again at {self.at.isoformat()}" if self.at else f"again in {self.delay}")

    def spent_limit(self, *, snoozes: int, age: timedelta | None) -> str | None:
        """The name of the limit that forbids another wait, if one does. *snoozes*: waits so far."""
        if self.max_snoozes is not None and snoozes >= self.max_snoozes:
            return "max_snoozes"
        if self.max_age is not None and age is not None and age >= self.max_age:
            return "max_age"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is to happen after a failure, and which rule decided it.

    `later` carries either a delay or a time. `transient` may (what a server said in Retry-After, for one); without
    it the retry policy knows the delay.
    """

    kind: Literal["terminal", "transient", "later"]
    rule: str = ""
    error_class: str = ""
    delay: timedelta | None = None
    at: datetime | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("terminal", "transient", "later"):
            raise SettingsError("Verdict: kind must be terminal, transient or later")
        given: object = self.delay
        if given is not None and not isinstance(given, timedelta):
            raise SettingsError("Verdict: delay must be a timedelta")
        if self.kind == "later" and (self.delay is None) == (self.at is None):
            raise SettingsError("Verdict: later needs a delay or a time")
        if self.at is not None or self.kind == "later":
            _check_later(self.delay if self.at is None else self.at)
        elif self.delay is not None:
            as_timedelta("Verdict: delay", self.delay, SettingsError)

    def record(self, handler_name: str) -> dict[str, str]:
        """The value of `last_failure`: what any dispatcher needs in order to alert."""
        return {
            "handler": handler_name,
            "error_class": self.error_class,
            "verdict": self.kind,
            "rule": self.rule,
        }


class FailureCycle(BaseModel):
    """One entry of `failure_history`: a cycle that ended in a dead letter and was replayed or discarded."""

    model_config = ConfigDict(frozen=True, extra="allow")

    attempts: int
    last_error: str | None = None
    last_failure: dict[str, Any] | None = None
    first_failed_at: datetime | None = None
    dead_lettered_at: datetime | None = None
    generation: int = 0
    replayed_by: str | None = None
    replayed_at: datetime | None = None
    discarded_by: str | None = None
    discarded_at: datetime | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """What an alert is about: the events of one topic that died of one class of error, and the first of them.

    The hook `on_dead_letter` gets this. It may get one twice, under the same `alert_id`, when a dispatcher crashes.
    """

    alert_id: UUID
    topic: str
    error_class: str
    count: int
    event_id: UUID
    """The first that died. This and what follows are its own."""
    source: str | None
    target: str | None
    handler_name: str | None
    last_error: str | None
    attempts: int
    verdict: str | None
    rule: str | None
    first_failed_at: datetime | None
    dead_lettered_at: datetime
    last_dead_lettered_at: datetime
    """When the last of them died."""

    @property
    def runbook(self) -> str:
        """The page for whoever is woken by this alert."""
        if self.rule in ("worker.died", "lease.expired"):
            return "runbooks/a-poison-job.md"
        return f"runbooks/{'many-jobs-died' if self.count >= MANY else 'a-job-died'}.md"


def _check_later(when: object) -> timedelta | datetime:
    """A delay above 0 or an aware time. Whether a time lies ahead is for the database's clock to say."""
    if isinstance(when, datetime):
        if when.utcoffset() is None:
            raise SettingsError("the time of RetryLater needs a time zone")
        return when
    delay = as_timedelta("RetryLater", when, SettingsError)
    if not delay:
        raise SettingsError("RetryLater: the delay must be above 0, so that the time is in the future")
    return delay


def error_class(error: BaseException) -> str:
    """The error's class with its module, as alerts are grouped by it."""
    try:
        kind = type(error)
        name = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        return _sanitise(name, 500)
    except BaseException:  # a metaclass may do anything
        return "exception"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside an exception group, however deeply nested; any other error is its own only leaf."""
    waiting = [error]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, BaseExceptionGroup):
            waiting.extend(reversed(inner.exceptions))
        else:
            yield inner


def describe_error(error: BaseException, redact: Redact | None = None) -> str:
    """The text to keep of an error: its class and message, sanitised and capped. Never raises."""
    text = _sanitise(_describe(error), _MAX_BYTES_FOR_REDACT)
    if redact is not None:
        try:
            text = _sanitise(redact(text), MAX_ERROR_BYTES)
        except BaseException:
            # Nothing of the error is kept: what the hook should have hidden is still in it.
            return REDACT_FAILED
    return _sanitise(text, MAX_ERROR_BYTES)


def describe_validation(error: ValidationError, known_names: Iterable[str] | None = None) -> str:
    """Where a validation failed and which rule, and nothing of its input.

    Messages are left out because some quote the input. With *known_names*, so are parts of a place that are not
    among them: a place may go through a dict, whose keys are data.
    """
    known = None if known_names is None else frozenset(known_names)
    found = error.errors(include_input=False, include_url=False, include_context=False)
    parts = []
    for item in found[:_MAX_PARTS]:
        place = ".".join(
            str(part) if isinstance(part, int) or known is None or part in known else "…"
            for part in item["loc"]
        )
        parts.append(f"{place}: {item['type']}" if place else item["type"])
    if len(found) > _MAX_PARTS:
        parts.append(f"and {len(found) - _MAX_PARTS} more")
    return "; ".join(parts)


def _describe(error: BaseException) -> str:
    try:
        if isinstance(error, BaseExceptionGroup):
            return _describe_group(error)
        message = _message(error)
        name = type(error).__qualname__
        return f"{name}: {message}" if message else name
    except BaseException:
        # str() of a stranger's exception is a stranger's code.
        return f"{error_class(error)}: [its text can't be had: str() failed]"


def _describe_group(group: BaseExceptionGroup[BaseException]) -> str:
    inner = list(leaves(group))
    parts = [_sanitise(_describe(leaf), 1000) for leaf in inner[:_MAX_PARTS]]
    if len(inner) > _MAX_PARTS:
        parts.append(f"and {len(inner) - _MAX_PARTS} more")
    return f"{type(group).__qualname__}: {group.message} ({len(inner)}): " + "; ".join(parts)


def _message(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        return f"{error.title}: {describe_validation(error, known_names=())}"
    if any((kind.__module__, kind.__name__) == _STATEMENT_ERROR for kind in type(error).__mro__):
        original = getattr(error, "orig", None)
        return _describe(original) if isinstance(original, BaseException) else ""
    if any(kind.__module__ == "django.db.utils" for kind in type(error).__mro__) and error.__cause__:
        return _describe(error.__cause__)
    return _database_message(error) or str(error)


def _database_message(error: BaseException) -> str | None:
    """The primary message and SQLSTATE of a driver's error, None for any other error."""
    sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if not sqlstate and not any(kind.__module__.startswith(_DRIVERS) for kind in type(error).__mro__):
        return None
    message = getattr(getattr(error, "diag", None), "message_primary", None)
    if not isinstance(message, str):
        message = str(error).partition("\nDETAIL:")[0]
    return f"{message} [{sqlstate}]" if sqlstate else message


def _sanitise(text: str, max_bytes: int) -> str:
    # Methods of str itself: an exception's text may be of a subclass that overrides them.
    encoded = str.encode(text, "utf-8", "replace").replace(b"\0", "\N{REPLACEMENT CHARACTER}".encode())
    if len(encoded) > max_bytes:
        ellipsis = "…".encode()
        encoded = encoded[: max_bytes - len(ellipsis)].decode("utf-8", "ignore").encode() + ellipsis
    return encoded.decode()
