"""Encoding: what is accepted reads back, what is refused is named by its place and never quoted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, field_serializer

from pulse_outbox import EnqueueError
from pulse_outbox.events import MAX_DEPTH, encode_headers, encode_payload

nan = float("nan")


class Anything(BaseModel):
    """Of a field without a type pydantic writes NaN as null."""

    value: Any


class Renamed(BaseModel):
    value: Any = Field(validation_alias="given", serialization_alias="written")


class Item(BaseModel):
    sku: str
    price: float | None = None
    stock: dict[int, int] = {}


class Order(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    items: list[Item] = []
    extra: Any = None


@dataclass
class Parcel:
    weight: Any


class Colour(Enum):
    RED = "red"


def nested(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


def cycle() -> Any:
    inner: list[Any] = []
    inner.append({"again": inner})
    return {"start": inner}


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        ({"a": [{"b": "x\0"}]}, "payload.a[0].b: a NUL character"),
        ({"a": {"x\0": 1}}, "payload.a: the key 'x\\x00': a NUL character"),
        ({"a": ["ok", "\ud800"]}, "payload.a[1]: a lone surrogate"),
        ({"a": {"\udc00": 1}}, "payload.a: the key '\\udc00': a lone surrogate"),
        ({"items": [{}, {"price": nan}]}, "payload.items[1].price: NaN"),
        ({"a": float("-inf")}, "payload.a: NaN and infinity"),
        ({"a": Decimal("NaN")}, "payload.a: NaN"),
        (nan, "payload: NaN"),
        (Order(items=[Item(sku="a"), Item(sku="b", price=nan)]), "payload.items[1].price: NaN"),
        (
            {"deep": {"order": Order(items=[Item(sku="b", price=nan)])}},
            "payload.deep.order.items[0].price: NaN",
        ),
        (RootModel[list[float]]([1.0, nan]), "payload[1]: NaN"),
        (Parcel(weight=nan), "payload.weight: NaN"),
        (Anything(value=nan), "payload.value: NaN"),
        (Anything(value={"a": [None, (1, float("inf"))]}), "payload.value.a[1][1]: NaN"),
        ({"deep": [Anything(value=Parcel(weight=nan))]}, "payload.deep[0].value.weight: NaN"),
        (Renamed.model_validate({"given": nan}), "payload.written: NaN"),
        ({"n": 10**4300}, "payload.n: an integer of more than 4,300 digits"),
        ({"n": [-(10**5000)]}, "payload.n[0]: an integer of more than 4,300 digits"),
        ({"a": [{1: 2}]}, "payload.a[0]: a key is int"),
        ({None: 1}, "payload: a key is NoneType"),
        ({("a", "b"): 1}, "payload: a key is tuple"),
        ({"a": {True: 1}}, "payload.a: a key is bool"),
        (MappingProxyType({1: 1}), "payload: a key is int"),
        (cycle(), "payload.start[0].again: refers back"),
        (nested(MAX_DEPTH + 2), "nested deeper than 200 levels"),
        (nested(230), "nested deeper than 200 levels"),
        (nested(100_000), "nested deeper than 200 levels"),
        ({"a": [object()]}, "payload.a[0]: object can't be written as JSON"),
        ({"a": b"\xff"}, "payload.a: bytes can't be written as JSON"),
        ({"a": {1, object()}}, "object can't be written as JSON"),
        (Order(extra={"f": print}), "payload.extra.f: builtin_function_or_method can't"),
        (Parcel(weight=[object()]), "payload.weight[0]: object can't"),
        ({"strange key": {'"': nan}}, "payload['strange key']['\"']: NaN"),
        ({"a": (text for text in ["\0"])}, "payload.a[0]: a NUL"),
        ("x" * 2_000_000, "payload: 2,000,002 bytes of JSON, above the limit of 1,048,576"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_place(payload: Any, complaint: str):
    """The producer learns where it is, without an aborted transaction."""
    with pytest.raises(EnqueueError) as caught:
        encode_payload(payload)

    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (None, "null"),
        (3, "3"),
        ("x", '"x"'),
        ([1, "a", None, True], '[1,"a",null,true]'),
        ({"a": "NaN, Infinity and \\u0000 as words"}, '{"a":"NaN, Infinity and \\\\u0000 as words"}'),
        (Item(sku="a", stock={1: 2}), '{"sku":"a","price":null,"stock":{"1":2}}'),
        (Parcel(weight={1: None}), '{"weight":{"1":null}}'),
        (MappingProxyType({"a": MappingProxyType({"b": 1})}), '{"a":{"b":1}}'),
        ({"t": (1, 2), "c": Colour.RED}, '{"t":[1,2],"c":"red"}'),
        ({"d": Decimal("1.10"), "u": UUID(int=1)}, '{"d":"1.10","u":"00000000-0000-0000-0000-000000000001"}'),
        ({"t": datetime(2030, 1, 2, tzinfo=UTC)}, '{"t":"2030-01-02T00:00:00Z"}'),
        ({"s": "9" * 5000}, '{"s":"' + "9" * 5000 + '"}'),
        ({"n": 10**4299}, '{"n":1' + "0" * 4299 + "}"),
        ({"é😀": "é😀"}, '{"é😀":"é😀"}'),
    ],
)
def test_what_can_be_stored_is_written_as_pydantic_writes_it(payload: Any, text: str):
    """Words that only look like trouble are no trouble."""
    assert encode_payload(payload) == text


@dataclass(eq=False)
class Incomparable(Parcel):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        ("x\0", "a NUL character"),
        ({"x\0": 1}, "the key 'x\\x00': a NUL character"),
        (nan, "NaN and infinity"),
        (float("inf"), "NaN and infinity"),
        ([{"a": float("-inf")}], "payload.it[0].a: NaN and infinity"),
        (Decimal("NaN"), "NaN"),
        (Item(sku="b", price=nan), ".price: NaN"),
        ([10**4300], "an integer of more than 4,300 digits"),
        ({1: 2}, "a key is int"),
        (nested(MAX_DEPTH), "nested deeper than 200 levels"),
    ],
)
def test_it_is_refused_in_a_long_payload_too(item: Any, complaint: str):
    """Long ones are read back, and what comes back unchanged is not looked at more closely."""
    with pytest.raises(EnqueueError) as caught:
        encode_payload({"long": "x" * 1000, "it": item})

    assert str(caught.value).startswith("payload.it")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"a": [1, 2.5, None, True, "é"]}, '{"a":[1,2.5,null,true,"é"]}'),
        ("NaN, Infinity and \\u0000 as words", '"NaN, Infinity and \\\\u0000 as words"'),
        ((1, Colour.RED), '[1,"red"]'),
        (Incomparable(weight=1), '{"weight":1}'),
    ],
)
def test_a_long_payload_is_written_as_a_short_one(item: Any, text: str):
    long = "x" * 1000

    assert encode_payload({"long": long, "it": item}) == f'{{"long":"{long}","it":{text}}}'


@pytest.mark.parametrize("infinity", [float("inf"), float("-inf")])
def test_infinity_in_long_headers_is_refused_too(infinity: float):
    with pytest.raises(EnqueueError, match=r"headers\.it: NaN and infinity"):
        encode_headers({"long": "x" * 1000, "it": infinity})


def test_the_deepest_accepted_payload_reads_back():
    """The limit is the parser's that will read it: one level less would refuse too much, one more too little."""
    text = encode_payload(nested(MAX_DEPTH))

    assert json.loads(text) == nested(MAX_DEPTH)


def test_aliases_are_written_as_the_model_reads_them():
    """A handler validates by alias; the field's name would not come back."""

    class Aliased(BaseModel):
        order_id: int = Field(alias="orderId")

    text = encode_payload(Aliased(orderId=7))

    assert Aliased.model_validate_json(text).order_id == 7


def test_a_serialiser_that_deals_with_nan_is_respected():
    """What counts is what would be written, not what the object holds."""

    class Careful(BaseModel):
        value: float

        @field_serializer("value")
        def write(self, value: float) -> str:
            return "not a number" if value != value else str(value)

    assert encode_payload(Careful(value=nan)) == '{"value":"not a number"}'


def test_no_complaint_quotes_a_value():
    """Refusals are logged by applications; a secret beside the fault must not be."""
    for bad in ("\0", "\ud800", nan, object(), 10**5000):
        with pytest.raises(EnqueueError) as caught:
            encode_payload({"card": "4111-secret", "bad": bad, "text": f"secret{bad}" if bad == "\0" else ""})

        assert "secret" not in str(caught.value)


def test_size_counts_bytes_and_not_characters():
    """The limit is about the database, which stores bytes."""
    assert encode_payload("é" * 4, max_bytes=10) == '"éééé"'

    with pytest.raises(EnqueueError, match="12 bytes"):
        encode_payload("é" * 5, max_bytes=10)


def test_headers_obey_the_same_rules():
    """They are a jsonb column too."""
    assert encode_headers(None) == encode_headers({}) == "{}"
    assert encode_headers({"traceparent": "00-1"}) == '{"traceparent":"00-1"}'

    with pytest.raises(EnqueueError, match=r"headers\.a: a NUL"):
        encode_headers({"a": "\0"})
