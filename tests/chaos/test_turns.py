"""The rule about turns: the transaction that ends an event gives the turn to the next one of its key."""

from __future__ import annotations

import pytest

from chaos.evidence import Fault, Turn
from tests.chaos.story import TICK, Story


def queue(length: int, *, given: int, parked_for: float = 5.0) -> Story:
    """So many events of one key run one after the other, of which the first few got their turn from the one before."""
    story = Story()
    for number in range(length):
        story.enqueue(f"e{number}", ordering_key="k", seq=number, parked=number > 0)
    story.now += parked_for
    for number in range(length):
        story.work(f"e{number}")
        transaction = story.row(f"e{number}").transaction
        healed = transaction if number < given else -1
        story.evidence.turns.append(
            Turn(story.row(f"e{number}").id, story.now, healed, f"e{number + 1}", False)
        )
    return story


@pytest.mark.parametrize(("given", "rules"), [(8, set()), (2, set()), (1, {"turn"}), (0, {"turn"})])
def test_whoever_ends_gives_the_turn(given: int, rules: set[str]):
    """Some may be missed because somebody had locked the row; not nearly all."""
    assert queue(8, given=given).rules() == rules


def test_few_prove_nothing():
    assert queue(5, given=0).rules() == set()


def test_what_was_parked_a_moment_ago_may_be_missed():
    assert queue(8, given=0, parked_for=-8 * 3 * TICK).rules() == set()


def test_what_was_locked_may_be_missed():
    locked = [Fault(100.0, "fault", {"fault": "lock-rows", "seconds": 60.0})]

    assert queue(8, given=0).rules(faults=locked) == set()
