"""How long a failed event waits."""

from __future__ import annotations

from datetime import timedelta
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_outbox import RetryLater, RetryPolicy, SettingsError


def seconds(*values: float) -> list[timedelta]:
    return [timedelta(seconds=value) for value in values]


def test_defaults_are_those_of_the_specification():
    """Others build on them."""
    policy = RetryPolicy()

    assert (policy.max_attempts, policy.multiplier, policy.jitter) == (5, 2, "full")
    assert (policy.base_delay, policy.max_delay) == (timedelta(seconds=1), timedelta(minutes=5))
    assert (policy.terminal_errors, policy.transient_errors, policy.classify) == ((), (), None)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (RetryPolicy(), seconds(1, 2, 4, 8, 16)),
        (RetryPolicy(base_delay=0.5, multiplier=3, max_delay=5), seconds(0.5, 1.5, 4.5, 5, 5)),
        (RetryPolicy.quadratic(), seconds(1, 4, 9, 16, 25)),
        (RetryPolicy(curve="linear"), seconds(1, 2, 3, 4, 5)),
        (RetryPolicy(curve="constant", base_delay=7), seconds(7, 7, 7, 7, 7)),
        (RetryPolicy(base_delay=0), seconds(0, 0, 0, 0, 0)),
    ],
)
def test_curves(policy: RetryPolicy, expected: list[timedelta]):
    """The first run is attempt 1."""
    assert [policy.ceiling(attempt) for attempt in range(1, 6)] == expected


@pytest.mark.parametrize("curve", ["exponential", "quadratic", "linear"])
@pytest.mark.parametrize("attempt", [10_000, 10**9, 10**400])
def test_a_late_attempt_waits_for_the_cap(curve: Any, attempt: int):
    """2.0 ** 10_000 is an OverflowError."""
    assert RetryPolicy(curve=curve).ceiling(attempt) == timedelta(minutes=5)


def test_a_zero_delay_stays_zero_however_late():
    """Tests of applications switch waiting off this way."""
    assert RetryPolicy(base_delay=0).ceiling(10_000) == timedelta()


@given(attempt=st.integers(1, 3000), seed=st.integers())
def test_jitter_stays_within_its_bounds(attempt: int, seed: int):
    """Full jitter: uniform between nothing and the ceiling; equal: the upper half of it."""
    ceiling = RetryPolicy().ceiling(attempt)

    assert timedelta() <= RetryPolicy().delay(attempt, Random(seed)) <= ceiling
    assert ceiling / 2 <= RetryPolicy(jitter="equal").delay(attempt, Random(seed)) <= ceiling
    assert RetryPolicy(jitter="none").delay(attempt, Random(seed)) == ceiling


def test_full_jitter_is_uniform():
    """10,000 jobs that failed together must not come back together."""
    random = Random(7)
    delays = [RetryPolicy().delay(7, random) / timedelta(seconds=64) for _ in range(10_000)]
    tenths = [sum(low / 10 <= delay < (low + 1) / 10 for delay in delays) for low in range(10)]

    assert all(850 < count < 1150 for count in tenths)


def test_quadratic_has_a_budget_of_three_and_takes_other_settings():
    """1, 4, 9 seconds exactly: with three points there is nothing for jitter to smooth."""
    policy = RetryPolicy.quadratic(max_attempts=4, terminal_errors=(KeyError,))

    assert RetryPolicy.quadratic().max_attempts == 3
    assert RetryPolicy.quadratic().delay(3, Random()) == timedelta(seconds=9)
    assert (policy.max_attempts, policy.terminal_errors) == (4, (KeyError,))


def test_policies_are_values():
    """Seconds and timedelta say the same."""
    assert RetryPolicy(base_delay=2) == RetryPolicy(base_delay=timedelta(seconds=2))
    assert len({RetryPolicy(), RetryPolicy()}) == 1


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": 2.5}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"base_delay": -1}, "base_delay"),
        ({"base_delay": float("nan")}, "base_delay"),
        ({"max_delay": float("inf")}, "max_delay"),
        ({"max_delay": "5"}, "max_delay: seconds or a timedelta"),
        ({"multiplier": 0.5}, "multiplier"),
        ({"multiplier": float("nan")}, "multiplier"),
        ({"multiplier": "2"}, "multiplier"),
        ({"jitter": "some"}, "jitter must be one of full, equal, none"),
        ({"curve": "cubic"}, "curve must be one of"),
        ({"terminal_errors": ValueError}, "must be a tuple of exception classes"),
        ({"terminal_errors": ("ValueError",)}, "no exception class"),
        ({"transient_errors": (int,)}, "no exception class"),
        (
            {"terminal_errors": (KeyError,), "transient_errors": (KeyError,)},
            "both terminal and transient: KeyError",
        ),
        ({"terminal_errors": (RetryLater,)}, "always judged first"),
        ({"classify": "terminal"}, "classify must be callable"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(settings: dict[str, Any], complaint: str):
    """At import, not at the first failure at night."""
    with pytest.raises(SettingsError) as caught:
        RetryPolicy(**settings)

    assert complaint in str(caught.value)
