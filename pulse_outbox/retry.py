"""The retry policy: how long a failed event waits, and the order in which an exception is judged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import ValidationError

from pulse_outbox.errors import SettingsError
from pulse_outbox.events import as_timedelta
from pulse_outbox.failures import RetryLater, TerminalHandlerError, Verdict, error_class, leaves

if TYPE_CHECKING:
    from random import Random

Curve = Literal["exponential", "quadratic", "linear", "constant"]
Jitter = Literal["full", "equal", "none"]
Classify = Callable[[BaseException], Verdict | Literal["terminal", "transient"] | None]

# By name, because an application may use any of them and need not have the others.
_INTEGRITY_ERRORS = frozenset(
    {
        ("psycopg", "IntegrityError"),
        ("sqlalchemy.exc", "IntegrityError"),
        ("django.db.utils", "IntegrityError"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a failed attempt may run again, and which failures are worth another attempt.

    `base_delay` and `max_delay` are seconds or timedeltas. `classify` gets the exception and may return "terminal",
    "transient", a Verdict, or None to leave the decision to the rules after it.
    """

    max_attempts: int = 5
    base_delay: float | timedelta = timedelta(seconds=1)
    multiplier: float = 2
    max_delay: float | timedelta = timedelta(minutes=5)
    jitter: Jitter = "full"
    curve: Curve = "exponential"
    terminal_errors: tuple[type[BaseException], ...] = ()
    transient_errors: tuple[type[BaseException], ...] = ()
    classify: Classify | None = None

    @classmethod
    def quadratic(cls, *, max_attempts: int = 3, **settings: Any) -> RetryPolicy:
        """Waits of 1, 4, 9 … seconds and a budget of 3; any other setting may be given too."""
        return cls(max_attempts=max_attempts, **{"curve": "quadratic", "jitter": "none", **settings})

    def __post_init__(self) -> None:
        _check_integer("max_attempts", self.max_attempts)
        for name in ("base_delay", "max_delay"):
            value = as_timedelta(f"RetryPolicy: {name}", getattr(self, name), SettingsError)
            object.__setattr__(self, name, value)
        if isinstance(self.multiplier, bool) or not isinstance(self.multiplier, int | float):
            raise SettingsError("RetryPolicy: multiplier must be a number")
        if not 1 <= self.multiplier < float("inf"):
            raise SettingsError("RetryPolicy: multiplier must be finite and at least 1")
        for name, choices in (("jitter", Jitter), ("curve", Curve)):
            if getattr(self, name) not in get_args(choices):
                raise SettingsError(f"RetryPolicy: {name} must be one of {', '.join(get_args(choices))}")
        for name in ("terminal_errors", "transient_errors"):
            object.__setattr__(self, name, _exception_classes(name, getattr(self, name)))
        both = set(self.terminal_errors) & set(self.transient_errors)
        if both:
            names = ", ".join(sorted(kind.__qualname__ for kind in both))
            raise SettingsError(f"RetryPolicy: both terminal and transient: {names}")
        if self.classify is not None and not callable(self.classify):
            raise SettingsError("RetryPolicy: classify must be callable")

    def ceiling(self, attempt: int) -> timedelta:
        """Longest wait after *attempt* (the first run is 1)."""
        base = as_timedelta("base_delay", self.base_delay).total_seconds()
        cap = as_timedelta("max_delay", self.max_delay).total_seconds()
        attempt = max(attempt, 1)
        try:
            match self.curve:
                case "exponential":
                    wait = base * float(self.multiplier) ** (attempt - 1)
                case "quadratic":
                    wait = base * attempt**2
                case "linear":
                    wait = base * attempt
                case "constant":
                    wait = base
        except OverflowError:  # 2.0 ** 1024 and beyond
            wait = cap if base else 0.0
        return timedelta(seconds=min(wait, cap))

    def delay(self, attempt: int, random: Random) -> timedelta:
        """How long to wait after *attempt*. Full jitter: anything between 0 and the ceiling."""
        ceiling = self.ceiling(attempt)
        match self.jitter:
            case "full":
                return ceiling * random.random()
            case "equal":
                return ceiling * (0.5 + 0.5 * random.random())
            case "none":
                return ceiling

    def judge(
        self,
        error: BaseException,
        *,
        decoding: bool = False,
        snoozes: int = 0,
        age: timedelta | None = None,
    ) -> Verdict:
        """Terminal, transient or later, and by which rule. Never raises.

        *decoding*: raised while pulse-outbox itself decoded the payload. *snoozes* and *age* are the event's, for the
        limits of RetryLater.
        """
        judged = self._judge(error, decoding=decoding, snoozes=snoozes, age=age)
        return replace(judged, error_class=error_class(error))

    def _judge(self, error: BaseException, *, decoding: bool, snoozes: int, age: timedelta | None) -> Verdict:
        if isinstance(error, RetryLater) and not decoding:
            return _verdict_of_retry_later(error, snoozes=snoozes, age=age)
        classified, complaint = self._classified(error)
        judged = (
            classified
            or self._listed(error)
            or (Verdict(kind="terminal", rule="default.decoding") if decoding else None)
            or self._judge_group(error, snoozes=snoozes, age=age)
            or _judge_by_default(error)
        )
        return replace(judged, rule=f"{judged.rule} ({complaint})") if complaint else judged

    def _classified(self, error: BaseException) -> tuple[Verdict | None, str]:
        """The answer of `classify`, or None and what was wrong with it."""
        if self.classify is None:
            return None, ""
        try:
            answer: object = self.classify(error)
        except BaseException as failure:
            return None, f"classify raised {error_class(failure)}"
        match answer:
            case None:
                return None, ""
            case "terminal" | "transient":
                return Verdict(kind=answer, rule="classify"), ""
            case Verdict():
                return replace(answer, rule=f"classify:{answer.rule}" if answer.rule else "classify"), ""
            case _:
                if inspect.iscoroutine(answer):
                    answer.close()  # or Python warns that it was never awaited
                return None, f"classify returned {type(answer).__qualname__}, which is no verdict"

    def _listed(self, error: BaseException) -> Verdict | None:
        """What the policy's own lists say: the nearest class in the MRO wins."""
        group = isinstance(error, BaseExceptionGroup)
        for kind in type(error).__mro__:
            if group and not issubclass(kind, BaseExceptionGroup):
                break  # `Exception` in a list is about the leaves of a group, not about the group
            if kind in self.terminal_errors:
                return Verdict(kind="terminal", rule=f"policy.terminal_errors:{kind.__name__}")
            if kind in self.transient_errors:
                return Verdict(kind="transient", rule=f"policy.transient_errors:{kind.__name__}")
        return None

    def _judge_group(self, error: BaseException, *, snoozes: int, age: timedelta | None) -> Verdict | None:
        """A group is terminal only if every leaf is; it comes back later only if every leaf wants that."""
        if not isinstance(error, BaseExceptionGroup):
            return None
        judged = [self._judge(leaf, decoding=False, snoozes=snoozes, age=age) for leaf in leaves(error)]
        kinds = {verdict.kind for verdict in judged}
        if kinds == {"later"}:
            return max(judged, key=_how_late)
        kind: Literal["terminal", "transient"] = "terminal" if kinds == {"terminal"} else "transient"
        deciding = next((verdict for verdict in judged if verdict.kind == kind), judged[0])
        return Verdict(kind=kind, rule=f"group:{deciding.rule}")


def _verdict_of_retry_later(error: RetryLater, *, snoozes: int, age: timedelta | None) -> Verdict:
    if limit := error.spent_limit(snoozes=snoozes, age=age):
        return Verdict(kind="terminal", rule=f"retry_later.{limit}")
    return Verdict(kind="later", rule="retry_later", delay=error.delay, at=error.at)


def _judge_by_default(error: BaseException) -> Verdict:
    if isinstance(error, TerminalHandlerError):
        return Verdict(kind="terminal", rule="default.terminal")
    if isinstance(error, ValidationError):
        return Verdict(kind="terminal", rule="default.validation")
    if any((kind.__module__, kind.__qualname__) in _INTEGRITY_ERRORS for kind in type(error).__mro__):
        return Verdict(kind="terminal", rule="default.integrity")
    return Verdict(kind="transient", rule="default.transient")


def _how_late(verdict: Verdict) -> tuple[bool, float]:
    """Orders verdicts of kind later. A time counts as later than any delay: only the database could compare them."""
    if verdict.at is not None:
        return True, verdict.at.timestamp()
    return False, (verdict.delay or timedelta()).total_seconds()


def _exception_classes(name: str, classes: object) -> tuple[type[BaseException], ...]:
    if not isinstance(classes, tuple | list | set | frozenset):
        raise SettingsError(f"RetryPolicy: {name} must be a tuple of exception classes: (CardDeclined,)")
    for kind in classes:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise SettingsError(f"RetryPolicy: {name} holds something that is no exception class")
        if issubclass(kind, RetryLater):
            raise SettingsError(f"RetryPolicy: {name} can't hold RetryLater, which is always judged first")
    return tuple(classes)


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise SettingsError(f"RetryPolicy: {name} must be an integer of at least 1")
