"""Payloads looked at many at a time: never anything else than each for itself would give."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from pulse_outbox import EnqueueError, NewEvent
from pulse_outbox.events import encode_flat, encode_json

FLAT: list[dict[str, Any]] = [
    {},
    {"n": 1, "text": "ü😀", "none": None, "yes": True},
    {"quoted": 'a "b" \\ \n \x01', "": -(10**300)},
    {"long": "x" * 4000},
    {"n": 2**64},
]


class Text(str):
    __slots__ = ()


NOT_CERTAIN: list[Any] = [
    {"text": "\0"},
    {"text": "\\u0000"},
    {"\0": 1},
    {"text": "\ud800"},
    {"n": float("nan")},
    {"n": 1.5},
    {1: "a"},
    {"a": []},
    {"a": Text("a")},
    {"a": datetime(2026, 1, 1, tzinfo=UTC)},
    {"n": 10**4300},
    {"long": "x" * 5000},
    [],
    "text",
    None,
]


def test_flat_payloads_are_encoded_as_each_for_itself():
    assert encode_flat(FLAT, 10_000) == [encode_json("payload", payload, 10_000) for payload in FLAT]


@pytest.mark.parametrize("payload", NOT_CERTAIN, ids=range(len(NOT_CERTAIN)))
def test_one_that_is_not_certain_leaves_all_to_the_careful_way(payload):
    assert encode_flat([*FLAT, payload, *FLAT], 10_000) is None


def test_the_limit_holds_for_each():
    assert encode_flat([{"a": "x" * 92}], 100) == [b'{"a":"' + b"x" * 92 + b'"}']
    assert encode_flat([{"a": "x"}, {"a": "x" * 93}], 100) is None


def test_a_good_topic_is_remembered_and_a_bad_one_never():
    """Also where it compares equal to a good one, or can't be compared at all."""

    class Sly:
        def __hash__(self) -> int:
            return hash("good")

        def __eq__(self, other: object) -> bool:
            return True

    assert NewEvent("good", 1) == NewEvent("good", 1)
    bad: list[Any] = ["", "\0", "x" * 201, None, ["good"], b"good", Sly()]
    for topic in [*bad, *bad]:
        with pytest.raises(EnqueueError, match=r"^topic: "):
            NewEvent(topic, 1)
