"""The rule about leases: who lives and reaches the database keeps them. The witness is a thread of its own."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.alive import time_lost
from chaos.evidence import Fault, Sweep
from tests.chaos.story import LEASE, Story


def reaped() -> tuple[Story, float]:
    """One job was reaped and run again; and when its first lease began."""
    story = Story().enqueue("e")
    began = story.now
    return story.claim("e").run("e", None).reap("e").work("e"), began


def seen(began: float, ended: float) -> dict[str, list[float]]:
    """A worker that was well all the while."""
    return {"worker": [began + 0.2 * number for number in range(int((ended - began) / 0.2))]}


def test_a_living_worker_lost_its_lease():
    story, began = reaped()

    assert story.rules(lease=LEASE, alive=seen(began - 1, began + 9)) == {"lease"}


def test_a_worker_that_was_stopped_may_lose_it():
    story, began = reaped()

    assert story.rules(lease=LEASE, alive=seen(began - 1, began + 1)) == set()


def test_a_worker_without_a_network_may_lose_it():
    story, began = reaped()
    cut_off = [Fault(began + 0.5, "fault", {"fault": "forget", "seconds": 2.0})]

    assert story.rules(lease=LEASE, alive=seen(began - 1, began + 9), faults=cut_off) == set()


def test_an_outage_is_no_excuse():
    """The watchdog holds off until the living have reported."""
    story, began = reaped()
    frozen = [Fault(began + 0.5, "fault", {"fault": "freeze", "seconds": 2.0})]

    assert story.rules(lease=LEASE, alive=seen(began - 1, began + 9), faults=frozen) == {"lease"}


def test_time_is_lost_when_nobody_saw_it():
    """A starved process leaves many gaps, none of which is long."""
    assert time_lost([], 1, 4) == pytest.approx(2.8)
    assert time_lost([0.5, 2, 3.5, 9], 1, 4) == pytest.approx(0.8 + 1.3 + 0.3)
    assert time_lost([1 + 0.2 * number for number in range(1, 15)], 1, 4) == pytest.approx(0)


def test_a_terminal_failure_is_the_end():
    story = Story().enqueue("first").work("first")
    story.enqueue("e").claim("e").run("e", "terminal").fail("e", verdict="terminal").work("e")

    assert story.rules() == {"result"}


def swept(story: Story, *ago: float) -> dict[str, Any]:
    """The watchdog looked so many seconds before the reaping, and then."""
    step = next(step for step in story.evidence.steps if step.who == "watchdog")
    looks = [Sweep(step.at - seconds, 1) for seconds in ago]
    return {"sweeps": [*looks, Sweep(step.at, step.transaction)], "lease": LEASE}


def test_a_watchdog_that_looks_all_the_time_may_reap():
    story, _ = reaped()

    assert story.rules(**swept(story, 5, 4, 3, 2, 1)) == set()


def test_a_watchdog_holds_off_after_a_silence():
    story, _ = reaped()

    assert story.rules(**swept(story, 9, 8, 7, 6, 5)) == {"hold"}
    assert story.rules(**swept(story, 9, 8, 2, 1)) == {"hold"}
    assert story.rules(**swept(story, 9, 4, 3, 2, 1)) == set()
