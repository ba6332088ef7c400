"""The classifier: the order of judgement, and the rule in the verdict."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel, ValidationError

from pulse_outbox import RetryLater, RetryPolicy, SettingsError, TerminalHandlerError, Verdict
from pulse_outbox.failures import PayloadError


class CardDeclined(Exception):
    pass


class CardExpired(CardDeclined):
    pass


class Order(BaseModel):
    order_id: int


def validation_error() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Order.model_validate({})
    return caught.value


def judged(error: BaseException, policy: RetryPolicy | None = None, **facts: Any) -> tuple[str, str]:
    verdict = (policy or RetryPolicy()).judge(error, **facts)
    return verdict.kind, verdict.rule


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TerminalHandlerError("no"), ("terminal", "default.terminal")),
        (type("Mine", (TerminalHandlerError,), {})(), ("terminal", "default.terminal")),
        (PayloadError("no"), ("terminal", "default.terminal")),
        (psycopg.IntegrityError("no"), ("terminal", "default.integrity")),
        (psycopg.errors.UniqueViolation("no"), ("terminal", "default.integrity")),
        (
            type("IntegrityError", (Exception,), {"__module__": "sqlalchemy.exc"})(),
            ("terminal", "default.integrity"),
        ),
        (
            type("IntegrityError", (Exception,), {"__module__": "django.db.utils"})(),
            ("terminal", "default.integrity"),
        ),
        (
            type("IntegrityError", (Exception,), {"__module__": "elsewhere"})(),
            ("transient", "default.transient"),
        ),
        (psycopg.OperationalError("no"), ("transient", "default.transient")),
        (psycopg.errors.DeadlockDetected("no"), ("transient", "default.transient")),
        (ConnectionError(), ("transient", "default.transient")),
        (TimeoutError(), ("transient", "default.transient")),
        (ValueError("<html>"), ("transient", "default.transient")),
        (json.JSONDecodeError("no", "<html>", 0), ("transient", "default.transient")),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "no"), ("transient", "default.transient")),
        (SystemExit(0), ("transient", "default.transient")),
        (KeyboardInterrupt(), ("transient", "default.transient")),
        (asyncio.CancelledError(), ("transient", "default.transient")),
        (GeneratorExit(), ("transient", "default.transient")),
    ],
)
def test_defaults(error: BaseException, expected: tuple[str, str]):
    """Without a policy's own rules."""
    assert judged(error) == expected


def test_validation_errors_are_terminal():
    """The data will not fit better next time."""
    assert judged(validation_error()) == ("terminal", "default.validation")


def test_the_real_integrity_errors_of_sqlalchemy_and_django_are_known():
    """They are recognised by name; this tells when a name changes."""
    sqlalchemy = pytest.importorskip("sqlalchemy.exc")
    django = pytest.importorskip("django.db.utils")

    assert judged(sqlalchemy.IntegrityError("", {}, Exception())) == ("terminal", "default.integrity")
    assert judged(django.IntegrityError()) == ("terminal", "default.integrity")
    assert judged(sqlalchemy.OperationalError("", {}, Exception())) == ("transient", "default.transient")


def test_decoding_makes_anything_terminal():
    """The same ValueError out of a handler's body would be transient."""
    assert judged(ValueError(), decoding=True) == ("terminal", "default.decoding")
    assert judged(RecursionError(), decoding=True) == ("terminal", "default.decoding")
    assert judged(RetryLater(5), decoding=True) == ("terminal", "default.decoding")


def test_the_policys_lists_come_before_the_defaults():
    """An application that repairs integrity errors by hand may retry them."""
    policy = RetryPolicy(terminal_errors=(CardDeclined,), transient_errors=(psycopg.IntegrityError,))

    assert judged(CardExpired(), policy) == ("terminal", "policy.terminal_errors:CardDeclined")
    assert judged(psycopg.errors.UniqueViolation(), policy) == (
        "transient",
        "policy.transient_errors:IntegrityError",
    )


@pytest.mark.parametrize(
    ("terminal", "transient", "expected"),
    [
        ((Exception,), (CardDeclined,), "transient"),
        ((CardDeclined,), (Exception,), "terminal"),
        ((CardExpired,), (CardDeclined,), "terminal"),
        ((CardDeclined,), (CardExpired,), "transient"),
    ],
)
def test_the_nearest_class_wins(terminal: Any, transient: Any, expected: str):
    """Whichever list it stands in."""
    policy = RetryPolicy(terminal_errors=terminal, transient_errors=transient)

    assert policy.judge(CardExpired()).kind == expected


def test_classify_comes_before_the_lists():
    """It sees the exception itself: a status code, for one."""
    policy = RetryPolicy(
        terminal_errors=(CardDeclined,),
        classify=lambda error: "transient" if isinstance(error, CardExpired) else None,
    )

    assert judged(CardExpired(), policy) == ("transient", "classify")
    assert judged(CardDeclined(), policy) == ("terminal", "policy.terminal_errors:CardDeclined")


def test_classify_may_return_a_verdict_with_a_rule_of_its_own():
    """The rule reaches the alert."""
    terminal = RetryPolicy(classify=lambda _: Verdict(kind="terminal", rule="http.410"))
    later = RetryPolicy(classify=lambda _: Verdict(kind="later", delay=timedelta(seconds=30)))

    assert judged(ValueError(), terminal) == ("terminal", "classify:http.410")
    assert later.judge(ValueError()).delay == timedelta(seconds=30)


@pytest.mark.parametrize("answer", ["dead", 3, True, object()])
def test_a_classify_that_returns_nonsense_is_passed_over(answer: Any):
    """And the rule says so."""
    kind, rule = judged(
        CardDeclined(), RetryPolicy(terminal_errors=(CardDeclined,), classify=lambda _: answer)
    )

    assert kind == "terminal"
    assert rule.startswith("policy.terminal_errors:CardDeclined (classify returned ")


@pytest.mark.parametrize(
    "failure", [RuntimeError("x"), SystemExit(), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_a_classify_that_raises_is_passed_over(failure: BaseException):
    """Judging must not fail."""

    def classify(_: BaseException) -> None:
        raise failure

    kind, rule = judged(ValueError(), RetryPolicy(classify=classify))

    assert kind == "transient"
    assert rule.startswith("default.transient (classify raised ")


def test_an_async_classify_is_passed_over_without_a_warning():
    """A mistake that looks right."""

    async def classify(_: BaseException) -> None: ...

    _, rule = judged(ValueError(), RetryPolicy(classify=classify))  # type: ignore[arg-type]  # that is the mistake

    assert rule == "default.transient (classify returned coroutine, which is no verdict)"


@pytest.mark.parametrize(
    ("leaves", "expected"),
    [
        ([TerminalHandlerError(), TerminalHandlerError()], "terminal"),
        ([TerminalHandlerError(), ValueError()], "transient"),
        ([TerminalHandlerError(), ExceptionGroup("", [psycopg.IntegrityError()])], "terminal"),
        ([TerminalHandlerError(), ExceptionGroup("", [ExceptionGroup("", [ValueError()])])], "transient"),
        ([RetryLater(1), RetryLater(9), RetryLater(3)], "later"),
        ([RetryLater(1), ValueError()], "transient"),
        ([RetryLater(1), TerminalHandlerError()], "transient"),
    ],
)
def test_a_group_is_terminal_only_if_every_leaf_is(leaves: list[Exception], expected: str):
    """One leaf that may heal is worth another attempt."""
    verdict = RetryPolicy().judge(ExceptionGroup("tasks", leaves))

    assert verdict.kind == expected
    assert verdict.error_class == "ExceptionGroup"
    if expected == "later":
        assert verdict.delay == timedelta(seconds=9), "when the last of them is ready"


def test_a_groups_leaves_are_judged_by_the_policys_lists():
    """`Exception` in a list is about the leaves: every group is an Exception too."""
    policy = RetryPolicy(terminal_errors=(Exception,), transient_errors=(CardDeclined,))

    assert policy.judge(ExceptionGroup("", [ValueError(), CardDeclined()])).kind == "transient"
    assert policy.judge(ExceptionGroup("", [ValueError()])).kind == "terminal"


def test_a_group_class_may_be_listed_itself():
    """An application's own group class can be told apart."""

    class Batch(ExceptionGroup[Exception]):
        pass

    policy = RetryPolicy(terminal_errors=(Batch,))

    assert judged(Batch("", [ValueError()]), policy) == ("terminal", "policy.terminal_errors:Batch")


def test_a_base_exception_group_is_judged_by_its_leaves():
    """A task group that was cancelled from inside."""
    assert judged(BaseExceptionGroup("", [SystemExit()])) == ("transient", "group:default.transient")


def test_retry_later_is_judged_before_everything_else():
    """Not even classify sees it: it is no failure."""
    policy = RetryPolicy(classify=lambda _: "terminal", terminal_errors=(Exception,))
    at = datetime(2030, 1, 1, tzinfo=UTC)

    assert policy.judge(RetryLater(timedelta(minutes=1))).delay == timedelta(minutes=1)
    assert policy.judge(RetryLater(at)).at == at
    assert judged(RetryLater(1), policy) == ("later", "retry_later")


def test_retry_later_ends_at_its_limits():
    """Something that waits for ever is never noticed."""
    counted, aged = RetryLater(1, max_snoozes=3), RetryLater(1, max_age=60)

    assert judged(counted, snoozes=2) == ("later", "retry_later")
    assert judged(counted, snoozes=3) == ("terminal", "retry_later.max_snoozes")
    assert judged(aged, age=timedelta(seconds=59)) == ("later", "retry_later")
    assert judged(aged, age=timedelta(seconds=60)) == ("terminal", "retry_later.max_age")


@pytest.mark.parametrize(
    "when",
    [
        *(
            0,
            -1,
            float("nan"),
            float("inf"),
            timedelta(),
            timedelta(seconds=-1),
            timedelta.max,
            True,
            "soon",
            None,
        ),
        datetime(2030, 1, 1),  # noqa: DTZ001  a time without a zone is one of them
    ],
)
def test_retry_later_must_be_in_the_future(when: Any):
    """At once would be a loop without a budget."""
    with pytest.raises(SettingsError):
        RetryLater(when)


@pytest.mark.parametrize("limits", [{"max_snoozes": -1}, {"max_snoozes": True}, {"max_age": -1}])
def test_retry_later_refuses_limits_without_sense(limits: dict[str, Any]):
    """They would turn every wait into a dead letter."""
    with pytest.raises(SettingsError):
        RetryLater(5, **limits)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "dead"},
        {"kind": "later"},
        {"kind": "later", "delay": timedelta()},
        {"kind": "later", "delay": timedelta(1), "at": datetime(2030, 1, 1, tzinfo=UTC)},
        {"kind": "later", "delay": 5},
        {"kind": "transient", "delay": 5},
        {"kind": "transient", "delay": timedelta(seconds=-1)},
        {"kind": "transient", "at": datetime(2030, 1, 1)},  # noqa: DTZ001  that is the point
    ],
)
def test_an_impossible_verdict_can_not_be_made(fields: dict[str, Any]):
    """Whoever gets one may rely on it."""
    with pytest.raises(SettingsError):
        Verdict(**fields)


def test_the_verdict_is_recorded_for_alerts():
    """Any dispatcher may have to send the alert."""
    verdict = RetryPolicy().judge(psycopg.errors.UniqueViolation())

    assert verdict.record("shop.handlers.receipt") == {
        "handler": "shop.handlers.receipt",
        "error_class": "psycopg.errors.UniqueViolation",
        "verdict": "terminal",
        "rule": "default.integrity",
    }
