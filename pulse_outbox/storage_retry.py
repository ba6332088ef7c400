"""How storage calls are tried again, and which of their failures are worth it.

Handlers never see any of this, and are never wrapped in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import psycopg
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

from pulse_outbox.errors import SettingsError
from pulse_outbox.events import as_timedelta

if TYPE_CHECKING:
    from random import Random

    from tenacity import RetryCallState

# Classes are no guide here: psycopg files 25006 under InternalError and 26000 under ProgrammingError.
RETRYABLE_CLASSES: Final = ("08", "53", "57P0")
RETRYABLE_STATES: Final = frozenset(
    {
        "40001",  # serialization failure
        "40P01",  # deadlock
        "55P03",  # a lock could not be had in time
        "25006",  # read-only: the server has become, or still is, a standby
        "25P03",  # idle-in-transaction timeout
        "25P04",  # transaction timeout
        "0A000",  # "cached plan must not change result type", after a migration
        "26000",  # a prepared statement that a pooler's other server does not know
        "42P05",  # and one that it knows already
    }
)
# After these the connection itself is of no more use, whatever it says of itself.
CONNECTION_IS_LOST: Final = ("08", "57P0", "25006", "25P03", "25P04", "0A000", "26000", "42P05")
ONE_RUNNING_PER_KEY: Final = "outbox_one_running_per_key"


class CallTimedOut(psycopg.OperationalError):
    """A storage call outlived its client-side deadline; its connection has been thrown away."""


def is_retryable(error: BaseException) -> bool:
    """Whether the same call may succeed later: an allow-list, so that a programming error is never repeated."""
    if not isinstance(error, psycopg.Error):
        return False
    sqlstate = error.sqlstate
    if sqlstate is None:
        # No server said anything: the connection was lost, or could not be made.
        return isinstance(error, psycopg.OperationalError)
    if sqlstate == "23505":
        # Two claims of one ordering key crossed; the table let one through, and the other looks again.
        return error.diag.constraint_name == ONE_RUNNING_PER_KEY
    return sqlstate in RETRYABLE_STATES or sqlstate.startswith(RETRYABLE_CLASSES)


def loses_connection(error: BaseException) -> bool:
    """Whether a connection that raised this must be thrown away."""
    if not isinstance(error, psycopg.Error):
        return True
    return error.sqlstate is None or error.sqlstate.startswith(CONNECTION_IS_LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRetry:
    """How often and how quickly one kind of storage call is tried. Times are seconds or timedeltas."""

    attempts: int = 5
    first: float | timedelta = timedelta(milliseconds=100)
    cap: float | timedelta = timedelta(seconds=5)
    multiplier: float = 2
    jitter: float = 0.1
    """The wait d becomes anything between d·(1 − jitter) and d·(1 + jitter)."""

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise SettingsError("StorageRetry: attempts must be an integer of at least 1 (1: no retry)")
        for name in ("first", "cap"):
            value = as_timedelta(f"StorageRetry: {name}", getattr(self, name), SettingsError)
            object.__setattr__(self, name, value)
        if not 1 <= self.multiplier < float("inf"):
            raise SettingsError("StorageRetry: multiplier must be finite and at least 1")
        if not 0 <= self.jitter <= 1:
            raise SettingsError("StorageRetry: jitter must be between 0 and 1")

    def wait(self, attempt: int, random: Random) -> timedelta:
        """How long to wait after *attempt* (the first is 1)."""
        first, cap = as_timedelta("first", self.first), as_timedelta("cap", self.cap)
        try:
            delay = min(cap, first * float(self.multiplier) ** (attempt - 1))
        except OverflowError:
            delay = cap if first else first
        # Symmetric. The stock jitter of tenacity only ever adds.
        return delay * (1 + random.uniform(-self.jitter, self.jitter))

    def retrying(self, random: Random = random.Random()) -> AsyncRetrying:  # noqa: B008  shared on purpose
        """The tenacity object that tries a call as this says, and raises the last error as it was."""

        def wait(state: RetryCallState) -> float:
            return self.wait(state.attempt_number, random).total_seconds()

        return AsyncRetrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait,
            retry=retry_if_exception(is_retryable),
            reraise=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageRetries:
    """The two configurations: for claims, which poll, and for all other calls, which carry a result."""

    storage: StorageRetry = field(default_factory=StorageRetry)
    dequeue: StorageRetry = field(
        default_factory=lambda: StorageRetry(
            attempts=3, first=timedelta(milliseconds=500), cap=timedelta(seconds=10), jitter=0.2
        )
    )

    @classmethod
    def of_attempts(cls, attempts: int) -> StorageRetries:
        """The usual waits, another number of attempts for storage calls."""
        return cls(storage=StorageRetry(attempts=attempts))

    @classmethod
    def off(cls) -> StorageRetries:
        """Every call is tried once: for tests, or where something in between retries already."""
        return cls(storage=StorageRetry(attempts=1), dequeue=StorageRetry(attempts=1))
