"""Rules about what is kept of a failure: on the row, and in the history."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.story import LEASE, TICK, Story

FAILURE: dict[str, Any] = {"error_class": "ValueError", "handler": "chaos.app.raises", "verdict": "transient"}
NONE: dict[str, Any] = {"error": "", "failure": {}, "first_failed_at": None, "completed_at": None}


def failed(said: str = "e, lease 1", **values: Any) -> Story:
    """A handler raised a ValueError, and the row says so, unless it is told to say something else."""
    story = Story().enqueue("first").work("first")
    story.enqueue("e", "raises", budget=1, error="", failure={}).claim("e").run("e", "transient")
    story.evidence.runs[-1] = story.evidence.runs[-1]._replace(raised="ValueError", said=said)
    at = story.now + TICK
    given: dict[str, Any] = {"error": f"ValueError: {said}", "failure": FAILURE}
    given |= {"first_failed_at": at, "completed_at": at}
    return story.fail("e", dead=True, **given | values).alert("e")


def test_a_row_tells_what_its_handler_raised():
    assert failed().rules() == set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"error": "ValueError: f, lease 1"},
        {"error": ""},
        {"failure": FAILURE | {"error_class": "KeyError"}},
        {"failure": FAILURE | {"handler": "chaos.app.fast"}},
        {"failure": {}},
        {"first_failed_at": None},
        {"first_failed_at": 7.0},
        {"completed_at": 7.0},
    ],
)
def test_a_row_tells_of_another_failure(wrong: dict[str, Any]):
    assert failed(**wrong).rules() == {"failure"}


def test_a_timeout_may_come_after_what_was_raised():
    story = Story().enqueue("first").work("first")
    story.enqueue("e", "hangs", budget=1).claim("e").run("e", "transient")
    story.evidence.runs[-1] = story.evidence.runs[-1]._replace(raised="CancelledError")
    at = story.now + TICK
    timeout = {"error_class": "TimedOut", "handler": "chaos.app.hangs"}
    story.fail("e", dead=True, error="too long", failure=timeout, first_failed_at=at, completed_at=at).alert(
        "e"
    )

    assert story.rules() == set()


@pytest.mark.parametrize(("error", "rules"), [("worker lease expired", set()), ("boom", {"failure"})])
def test_what_was_reaped_tells_that_its_lease_ran_out(error: str, rules: set[str]):
    story = Story().enqueue("e", error="", failure={}).claim("e")
    at = story.now + LEASE + TICK
    story.run("e", None)
    story.reap("e", error=error, failure={"error_class": "LeaseExpired"}, first_failed_at=at)

    assert story.work("e").rules() == rules


@pytest.mark.parametrize(
    ("error", "rules"),
    [
        ("worker process died: signal 9 (SIGKILL)", set()),
        ("worker process ended with exit code 3 in the middle of a job", set()),
        ("worker process killed: it did not answer", set()),
        ("worker lease expired", {"failure"}),
    ],
)
def test_what_lapsed_tells_how_its_process_ended(error: str, rules: set[str]):
    story = Story().enqueue("e", error="", failure={}).claim("e").run("e", None)
    given: dict[str, Any] = {"lease_until": None, "locked_by": None, "attempts": 0, "lapses": 1}
    died = {"error": error, "failure": {"error_class": "WorkerDied"}, "first_failed_at": story.now + TICK}

    assert story.step("e", "RETRYING", **given | died).work("e").rules() == rules


def test_words_stay_until_the_next_failure_or_a_replay():
    story = failed()
    assert story.step("e", "DEAD_LETTERED", error="another").rules() == {"state machine"}

    story = failed().replay("e", **NONE | {"error": "ValueError: still there"}).work("e")
    assert story.rules() == {"state machine"}


def replayed(**entry: Any) -> Story:
    """The dead letter is replayed, and its cycle becomes an entry, unless that is to be another one."""
    story = failed()
    dead = story.row("e")
    cycle = {
        "request": "r1",
        "attempts": 1,
        "last_error": dead.error,
        "last_failure": FAILURE,
        "first_failed_at": dead.first_failed_at,
        "dead_lettered_at": dead.completed_at,
        "generation": 0,
        "replayed_by": "ann",
        "replayed_at": story.now + 2 * TICK,
    }
    story.replay("e", asked={"by": "ann", "generation": 0}, cycle=cycle | entry, **NONE)
    story.evidence.histories["e"] = [cycle | entry]
    return story.work("e")


def test_an_entry_tells_of_the_cycle_that_has_ended():
    assert replayed().rules() == set()


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"last_error": "ValueError: f, lease 1"},
        {"last_error": None},
        {"last_failure": None},
        {"first_failed_at": None},
        {"dead_lettered_at": 7.0},
        {"generation": 1},
        {"replayed_by": "bob"},
        {"replayed_at": None},
        {"replayed_at": 7.0},
    ],
)
def test_an_entry_tells_of_something_else(wrong: dict[str, Any]):
    assert replayed(**wrong).rules() == {"history"}


def test_an_entry_is_never_changed():
    story = replayed()

    assert story.rules(histories={"e": [{"attempts": 1}]}) == {"history"}
    assert story.rules(histories={}) == set()


def test_a_discard_says_who_and_why():
    story = Story().enqueue("first").work("first").enqueue("e", error="", failure={})
    cycle = {"attempts": 0, "generation": 0, "discarded_by": "ann", "discarded_at": story.now + 2 * TICK}
    asked = {"by": "ann", "reason": "no longer wanted"}
    story.discard("e", asked=asked, cycle=cycle | {"reason": "no longer wanted"})
    assert story.rules() == set()

    *others, discard = story.evidence.steps
    assert story.rules(steps=[*others, discard._replace(cycle=cycle)]) == {"history"}
