"""The rule about priorities: who may choose between an older event and a more important one takes the latter."""

from __future__ import annotations

import pytest

from chaos.evidence import Fault
from tests.chaos.story import Story


def pairs(number: int, *, right: int, waited: float = 5.0) -> Story:
    """So many times an older and a more important event wait; the first few times the latter is taken first."""
    story = Story()
    for pair in range(number):
        first, second = f"old {pair}", f"important {pair}"
        story.enqueue(first, priority=0).enqueue(second, priority=5)
        story.now += waited
        for event in (second, first) if pair < right else (first, second):
            story.work(event)
    return story


@pytest.mark.parametrize(
    ("right", "rules"), [(30, set()), (15, set()), (14, {"priority"}), (0, {"priority"})]
)
def test_what_is_important_is_claimed_first(right: int, rules: set[str]):
    """Some are passed over because their process stood still with a plan in its hands; not most."""
    assert pairs(30, right=right).rules() == rules


def test_few_prove_nothing():
    assert pairs(9, right=0).rules() == set()


def test_what_has_just_come_need_not_be_known():
    assert pairs(30, right=0, waited=1.0).rules() == set()


def test_what_is_locked_is_passed_over():
    locked = [Fault(100.0, "fault", {"fault": "lock-rows", "seconds": 900.0})]

    assert pairs(30, right=0).rules(faults=locked) == set()


def test_other_topics_and_generations_are_other_queues():
    story = pairs(30, right=0)
    steps = [
        step._replace(generation=1) if step.event_id.startswith("important") else step
        for step in story.evidence.steps
    ]

    assert story.rules(steps=steps) == set()
