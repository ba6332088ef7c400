"""Every state that two workers, two jobs and some bad luck can reach; and the mistakes that must show."""

from __future__ import annotations

import pytest

from tests.explorer.conformance import compare
from tests.explorer.database import Rules, Scenario
from tests.explorer.scenarios import SCENARIOS, VARIANTS, Variant
from tests.explorer.search import explore


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_nothing_goes_wrong_and_the_sql_agrees(dsn: str, scenario: Scenario):
    """The invariants hold in all states, from each an end can be reached, and every call does the same in SQL."""
    found = explore(scenario)

    assert not found.wrong, "\n".join(found.story)
    assert compare(dsn, scenario, found.calls) > 20


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_mistake_is_found(variant: Variant):
    """The test of the test: a product with this mistake does something that must not be."""
    found = explore(SCENARIOS[variant.scenario], variant.rules)

    assert found.wrong
    assert found.story


def test_a_story_can_be_read():
    found = explore(SCENARIOS["lost answers"], Rules(fence="nothing"))

    assert list(found.story) == [
        "worker 1 claims job A",
        "worker 1 starts job A",
        "worker 1 ends job A: ok",
        "watchdog reaps job A, whose holder lives and was not heard",
        "worker 2 claims job A",
        "worker 1 stores job A: complete",
    ]
    assert found.wrong == "a complete of an older claim of job A was accepted"
