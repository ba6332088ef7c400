"""What a handler gets."""

from __future__ import annotations

import copy
import pickle
import threading
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from pulse_outbox import Event
from pulse_outbox.events import event_of_claim

FIELDS = [name for name in Event.__slots__ if not name.startswith("_")]


def an_event(payload: Any = None) -> Event[Any]:
    return Event(
        id=UUID(int=7),
        topic="order.paid",
        payload=payload,
        headers={"token": "secret"},
        idempotency_key="k",
        ordering_key=None,
        attempt=2,
        max_attempts=5,
        generation=0,
        lease_seq=9,
        created_at=datetime(2030, 1, 1, tzinfo=UTC),
    )


def test_event_has_what_the_specification_promises():
    """Handlers of other people read these names."""
    event = an_event({"a": 1})

    assert (event.id, event.topic, event.payload) == (UUID(int=7), "order.paid", {"a": 1})
    assert (event.attempt, event.max_attempts, event.lease_seq, event.generation) == (2, 5, 9, 0)
    assert (event.source, event.target, event.ordering_key) == (None, None, None)
    assert (event.snoozes, event.resources, event.connection) == (0, None, None)


def test_event_refuses_every_change():
    """Middleware that edits an event would make its log lines lie."""
    event: Any = an_event()

    with pytest.raises(AttributeError, match="can't be changed"):
        event.topic = "other"
    with pytest.raises(AttributeError):
        event.invented = 1
    with pytest.raises(AttributeError):
        del event.topic

    assert event.topic == "order.paid"


def test_event_is_an_event_and_shows_no_data():
    """A repr ends up in logs and in other people's error trackers."""
    event = an_event({"card": "4111"})

    assert isinstance(event, Event)
    assert type(event).__name__ == "Event"
    assert repr(event) == "<Event order.paid 00000000-0000-0000-0000-000000000007 attempt 2/5>"


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda event: pickle.loads(pickle.dumps(event))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_event_can_be_copied_and_sent_to_another_process(copied):
    """As a handler does that gives its work to a process pool; connections can't go along."""
    given: dict[str, Any] = {
        name: name for name in FIELDS if name not in ("payload", "resources", "connection")
    }
    event: Any = Event(**given, payload={"a": [1]}, resources=threading.Lock(), connection=threading.Lock())

    again: Any = copied(event)

    kept = {name: getattr(again, name) for name in FIELDS}
    assert kept == {**given, "payload": {"a": [1]}, "resources": None, "connection": None}
    with pytest.raises(AttributeError, match="can't be changed"):
        again.topic = "other"


def a_claim() -> Any:
    return SimpleNamespace(
        event_id=UUID(int=7), topic="order.paid", idempotency_key="k", ordering_key="o", attempts=2, max_attempts=5,
        generation=3, lease_seq=4, created_at=datetime(2030, 1, 1, tzinfo=UTC), source="shop", target="bank", snoozes=1,
    )  # fmt: skip


def test_event_of_a_claim_is_an_event_like_any_other():
    """A dispatcher fills in what a handler asks for, when it asks."""
    claim = a_claim()
    event: Event[Any] = event_of_claim(claim, {"a": 1}, {"h": 1}, "resources", "connection")

    eager = Event(
        claim.event_id, claim.topic, {"a": 1}, {"h": 1}, "k", "o", 2, 5, 3, 4, claim.created_at, "shop", "bank", 1,
        "resources", "connection",
    )  # fmt: skip
    assert {name: getattr(event, name) for name in FIELDS} == {name: getattr(eager, name) for name in FIELDS}
    assert (type(event), repr(event)) == (type(eager), repr(eager))


def test_event_of_a_claim_is_read_once():
    """What a handler holds does not change under its hands, and asking again costs nothing."""
    claim = a_claim()
    event: Event[Any] = event_of_claim(claim, {}, {}, None, None)
    first = event.id

    claim.event_id = UUID(int=8)

    assert event.id is first


def test_event_of_a_claim_is_sealed_and_has_nothing_else():
    """Also what was not asked for yet can't be assigned, and a misspelt name is an error."""
    event: Any = event_of_claim(a_claim(), {}, {}, None, None)

    with pytest.raises(AttributeError, match="can't be changed"):
        event.attempt = 9
    with pytest.raises(AttributeError, match="attempts"):
        event.attempts  # noqa: B018
    assert event.attempt == 2


def test_event_of_a_claim_can_be_copied_before_anything_was_asked():
    """A handler may give it to another process at once."""
    event: Event[Any] = event_of_claim(a_claim(), {"a": [1]}, {}, threading.Lock(), None)

    again = pickle.loads(pickle.dumps(event))

    assert (again.id, again.attempt, again.payload, again.resources) == (UUID(int=7), 2, {"a": [1]}, None)
