"""What a producer writes, refused early where it makes no sense."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from pulse_outbox import EnqueueError, NewEvent


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"topic": ""}, "topic: must not be empty"),
        ({"topic": "x" * 201}, "topic: 201 characters"),
        ({"topic": "x" * 10_000}, "topic: 10,000 characters"),
        ({"topic": "a\0b"}, "topic: a NUL character"),
        ({"topic": "a\ud800"}, "topic: a lone surrogate"),
        ({"topic": 3}, "topic: a string is needed, not int"),
        ({"idempotency_key": ""}, "idempotency_key: must not be empty"),
        ({"idempotency_key": "x" * 401}, "idempotency_key: 401 characters"),
        ({"ordering_key": "\0"}, "ordering_key: a NUL"),
        ({"ordering_key": 7}, "ordering_key: a string is needed"),
        ({"source": "\udfff"}, "source: a lone surrogate"),
        ({"target": b"x"}, "target: a string is needed, not bytes"),
        ({"priority": 10}, "priority: must be between -9 and 9"),
        ({"priority": -10}, "priority: must be between"),
        ({"priority": 1.0}, "priority: an integer is needed, not float"),
        ({"priority": True}, "priority: an integer is needed, not bool"),
        ({"generation": -1}, "generation: must be between 0"),
        ({"generation": 2**63}, "generation: must be between 0"),
        ({"max_attempts": 0}, "max_attempts: must be between 1"),
        ({"max_attempts": 2**31}, "max_attempts: must be between 1"),
        ({"event_id": "7"}, "event_id: a uuid.UUID is needed, not str"),
        ({"dead_key": "drop"}, "dead_key: 'hold' or 'skip'"),
        ({"headers": [1]}, "headers: a mapping is needed, not list"),
        ({"run_at": datetime(2030, 1, 1)}, "run_at: needs a time zone"),  # noqa: DTZ001  that is the point
        ({"run_at": "tomorrow"}, "run_at: a datetime is needed, not str"),
        ({"run_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1}, "give one of them"),
        ({"delay": -1}, "delay: must be between"),
        ({"delay": float("nan")}, "delay: must be between"),
        ({"delay": float("inf")}, "delay: must be between"),
        ({"delay": timedelta(days=40_000)}, "delay: must be between"),
        ({"delay": "5"}, "delay: seconds or a timedelta are needed, not str"),
        ({"delay": True}, "delay: seconds or a timedelta are needed, not bool"),
    ],
)
def test_nonsense_is_refused_with_its_place(options: dict[str, Any], complaint: str):
    """PostgreSQL would refuse most of these too, and abort the producer's transaction doing so."""
    with pytest.raises(EnqueueError) as caught:
        NewEvent(**{"topic": "t", "payload": {}, **options})

    assert complaint in str(caught.value)


def test_the_widest_values_are_accepted():
    """The limits themselves are inside."""
    event = NewEvent(
        "é" * 200,
        None,
        idempotency_key="k" * 400,
        ordering_key="😀" * 400,
        priority=-9,
        generation=2**63 - 1,
        max_attempts=2**31 - 1,
        delay=timedelta(days=36_525),
        event_id=UUID(int=0),
        dead_key="skip",
    )

    assert event.topic == "é" * 200


def test_it_can_be_copied_pickled_and_changed():
    """A value like any other: what is made of it is checked as it was."""
    event = NewEvent("t", {"a": 1}, priority=3, delay=2)

    assert pickle.loads(pickle.dumps(event)) == event
    assert copy.deepcopy(event) == event
    assert event._replace(priority=4).priority == 4
    with pytest.raises(EnqueueError, match="priority"):
        event._replace(priority=40)
