from __future__ import annotations

from uuid import UUID

import pytest

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night


@pytest.fixture
def suspect(night: Night) -> UUID:
    """It has killed its worker twice, and is tried again."""
    night.ago(hours=1)
    event_id = night.enqueue("report.render")
    night.kill("report.render", 2)
    night.ago()
    assert night.row(event_id)["lapses"] == 2
    return event_id


@pytest.fixture
def dead(night: Night) -> UUID:
    """It has killed its worker until its budget was spent."""
    night.ago(hours=3)
    event_id = night.enqueue("report.render", p_max_attempts=2)
    night.kill("report.render", 4)
    night.ago()
    assert night.status(event_id) == "DEAD_LETTERED"
    return event_id


@follows("a-poison-job", "suspects", "together", "stop", "outcome")
def test_stop_one_that_is_still_tried(shift: Shift, night: Night, suspect: UUID):
    assert "killed by signal 9" in shift.run("suspects")
    shift.run("together")
    shift.knows(event_id=suspect, reason="kills its worker")
    shift.run("stop")

    assert night.status(suspect) == "DISCARDED"
    assert night.last_cycle(suspect)["reason"] == "kills its worker"
    assert "DISCARDED" in shift.run("outcome")


@follows("a-poison-job", "suspects", "pause", "replay", "outcome")
def test_replay_after_the_fix(shift: Shift, night: Night, dead: UUID):
    assert str(dead) in shift.run("suspects")
    shift.knows(event_id=dead, reason="kills its worker")
    shift.run("pause")
    assert night.one("select topic from pulse.pause") == "report.render"
    shift.run("replay")

    assert night.ask("select * from pulse.pause") == []
    assert night.last_cycle(dead)["replayed_by"] == "ada"
    assert night.row(dead)["lapses"] == 0
    assert night.work("report.render") == [dead]
    assert "COMPLETED" in shift.run("outcome")
