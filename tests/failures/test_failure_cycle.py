"""The typed entry of failure_history."""

from __future__ import annotations

from pulse_outbox import FailureCycle


def test_an_entry_as_replay_writes_it():
    """Names are those of the specification."""
    cycle = FailureCycle.model_validate(
        {
            "attempts": 5,
            "last_error": "ValueError: no",
            "last_failure": {"rule": "default.transient"},
            "first_failed_at": "2030-01-01T00:00:00+00:00",
            "dead_lettered_at": "2030-01-01T00:01:00+00:00",
            "generation": 3,
            "replayed_by": "ops",
            "replayed_at": "2030-01-02T00:00:00+00:00",
        }
    )

    assert (cycle.attempts, cycle.generation, cycle.replayed_by) == (5, 3, "ops")
    assert cycle.first_failed_at is not None
    assert cycle.discarded_by is None


def test_an_entry_of_a_newer_release_is_readable():
    """The previous release runs on the new schema."""
    cycle = FailureCycle.model_validate({"attempts": 1, "invented_later": {"x": 1}})

    assert cycle.model_dump()["invented_later"] == {"x": 1}
