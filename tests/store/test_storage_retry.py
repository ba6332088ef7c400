"""Which storage errors are worth another try, how often, and after which waits."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import errors

from pulse_outbox.errors import SettingsError
from pulse_outbox.storage_retry import (
    CallTimedOut,
    StorageRetries,
    StorageRetry,
    is_retryable,
    loses_connection,
)

WORTH_IT = [
    "08000",
    "08001",
    "08003",
    "08004",
    "08006",
    "08007",
    "40001",
    "40P01",
    "53000",
    "53100",
    "53200",
    "53300",
    "53400",
    "55P03",
    "57P01",
    "57P02",
    "57P03",
    "57P05",
    "25006",
    "25P03",
    "25P04",
    "0A000",
    "26000",
    "42P05",
]
POINTLESS = [
    "22001",
    "22P02",
    "23502",
    "23505",
    "23514",
    "25001",
    "25P02",
    "42501",
    "42601",
    "42703",
    "42883",
    "42P01",
    "3F000",
    "57014",
    "PO001",
    "PO002",
    "PO003",
    "P0001",
    "XX000",
]


def error_of(sqlstate: str) -> psycopg.Error:
    """As psycopg makes it; psycopg does not know ours."""
    try:
        kind: type[psycopg.Error] = errors.lookup(sqlstate)
    except KeyError:
        kind = type("Unknown", (psycopg.DatabaseError,), {"sqlstate": sqlstate})
    return kind("on purpose")


@pytest.mark.parametrize("sqlstate", WORTH_IT)
def test_what_may_pass_is_tried_again(sqlstate: str):
    """By SQLSTATE: psycopg's classes say other things (25006 is an InternalError, 26000 a ProgrammingError)."""
    assert is_retryable(error_of(sqlstate))


@pytest.mark.parametrize("sqlstate", POINTLESS)
def test_what_will_not_pass_is_not(sqlstate: str):
    assert not is_retryable(error_of(sqlstate))


def test_errors_without_a_server():
    assert is_retryable(psycopg.OperationalError("server closed the connection unexpectedly"))
    assert is_retryable(CallTimedOut("no answer"))
    for other in (
        psycopg.ProgrammingError("the query has 2 placeholders"),
        psycopg.DataError("can't dump"),
        psycopg.InterfaceError("the cursor is closed"),
        ValueError(),
        OSError(),
        TimeoutError(),
        asyncio.CancelledError(),
        KeyboardInterrupt(),
    ):
        assert not is_retryable(other), other


@pytest.mark.parametrize("sqlstate", ["08006", "57P01", "25006", "26000", "42P05", "25P03"])
def test_connections_that_are_of_no_more_use(sqlstate: str):
    assert loses_connection(error_of(sqlstate))


@pytest.mark.parametrize("sqlstate", ["40001", "53100", "PO002", "23505", "42601"])
def test_connections_that_are_fine(sqlstate: str):
    assert not loses_connection(error_of(sqlstate))


@pytest.mark.parametrize(
    ("retry", "attempts", "first", "cap", "jitter"),
    [(StorageRetries().storage, 5, 0.1, 5, 0.1), (StorageRetries().dequeue, 3, 0.5, 10, 0.2)],
)
def test_the_two_configurations(retry: StorageRetry, attempts: int, first: float, cap: float, jitter: float):
    """SPEC 5, and a jitter that goes both ways: uniform in [−f·d, +f·d]."""
    dice = random.Random(1)

    assert retry.attempts == attempts
    for attempt in (1, 2, 3, 4, 20, 5000):
        ideal = min(cap, first * 2 ** min(attempt - 1, 60))
        waits = [retry.wait(attempt, dice).total_seconds() for _ in range(2000)]
        assert ideal * (1 - jitter) <= min(waits) < ideal * (1 - 0.9 * jitter)
        assert ideal * (1 + 0.9 * jitter) < max(waits) <= ideal * (1 + jitter)
        assert abs(sum(waits) / len(waits) - ideal) < ideal * jitter * 0.1


class Flaky:
    """Fails a number of times, then succeeds."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self, *arguments: Any) -> str:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"


QUICK = StorageRetry(first=0.001, cap=0.002)


async def test_it_tries_as_often_as_it_says_and_raises_the_last_error_itself():
    lost = [psycopg.OperationalError(str(number)) for number in range(9)]
    flaky = Flaky(*lost)
    with pytest.raises(psycopg.OperationalError) as caught:
        await QUICK.retrying()(flaky)

    assert flaky.calls == 5
    assert caught.value is lost[4]


async def test_four_failures_are_survived():
    flaky = Flaky(*[psycopg.OperationalError() for _ in range(4)])

    assert await QUICK.retrying()(flaky) == "done"
    assert flaky.calls == 5


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), KeyboardInterrupt(), TimeoutError(), ValueError(), error_of("42601")]
)
async def test_nothing_else_is_tried_twice(error: BaseException):
    """tenacity catches BaseException: the caller's cancellation and deadline must pass through untouched."""
    flaky = Flaky(error)
    with pytest.raises(type(error)):
        await QUICK.retrying()(flaky)

    assert flaky.calls == 1


async def test_a_cancellation_between_two_tries_ends_it():
    slow = StorageRetry(first=60, cap=60)
    flaky = Flaky(*[psycopg.OperationalError() for _ in range(4)])
    task: asyncio.Task[str] = asyncio.create_task(slow.retrying()(flaky))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert flaky.calls == 1


async def test_many_calls_share_one_configuration():
    """One tenacity object serves all calls of a store at once, and mixes none of them up."""
    retrying = QUICK.retrying()
    calls = [Flaky(*[psycopg.OperationalError() for _ in range(number % 5)]) for number in range(50)]
    answers: list[str] = await asyncio.gather(*[retrying(call) for call in calls])

    assert answers == ["done"] * 50
    assert [call.calls for call in calls] == [number % 5 + 1 for number in range(50)]


def test_shorthand_and_off_switch():
    few = StorageRetries.of_attempts(2)
    off = StorageRetries.off()

    assert (few.storage.attempts, few.storage.first) == (2, timedelta(milliseconds=100))
    assert (off.storage.attempts, off.dequeue.attempts) == (1, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"attempts": True},
        {"attempts": 2.5},
        {"multiplier": 0.5},
        {"jitter": 1.5},
        {"first": -1},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]):
    with pytest.raises(SettingsError):
        StorageRetry(**wrong)
