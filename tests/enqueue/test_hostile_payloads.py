"""Whatever encode_payload accepts PostgreSQL accepts, and it reads back equal."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from pulse_outbox import EnqueueError
from pulse_outbox.events import encode_payload

text = st.text(st.characters(), max_size=20)  # lone surrogates and NUL included
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | text
    | st.integers(4290, 4310).map(lambda size: 10**size)
)
payloads = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5)
)


@pytest.fixture(scope="module")
def server(server_dsn: str):
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        yield conn


def as_jsonb_keeps_it(value: Any) -> Any:
    """Numbers are numbers: 1e300 comes back as an integer, -0.0 without its sign."""
    match value:
        case bool() | None | str():
            return value
        case int() | float():
            try:
                return float(value)
            except OverflowError:
                return value
        case list():
            return [as_jsonb_keeps_it(item) for item in value]
        case dict():
            return {key: as_jsonb_keeps_it(item) for key, item in value.items()}
    raise AssertionError(value)


def nested(levels: int) -> Any:
    value: Any = "x"
    for level in range(levels):
        value = [value] if level % 2 else {"k": value}
    return value


@settings(max_examples=300, deadline=None)
@given(payloads)
@example({"a": "NaN Infinity \\u0000 \\\\u0000 \\"})
@example(5e-324)
@example(1.7976931348623157e308)
@example(-0.0)
@example({"": {"": ""}})
@example(10**4299)
@example(nested(200))
@example({"n": [0.1, 1e16, 123456789012345680000.0]})
def test_what_is_accepted_is_stored_and_reads_back_equal(server, payload):
    """By the parser of Python and by the one that decodes for handlers."""
    try:
        encoded = encode_payload(payload)
    except EnqueueError:
        return
    [stored] = server.execute("select %s::jsonb::text", [encoded]).fetchone()

    assert as_jsonb_keeps_it(json.loads(stored)) == as_jsonb_keeps_it(payload)
    assert as_jsonb_keeps_it(from_json(stored)) == as_jsonb_keeps_it(payload)


@settings(max_examples=300, deadline=None)
@given(payloads)
def test_nothing_is_refused_that_could_have_been_kept(server, payload):
    """The other direction: Python's own encoder or PostgreSQL refuses it too."""
    try:
        encode_payload(payload)
    except EnqueueError:
        with pytest.raises((ValueError, psycopg.DataError)):
            server.execute("select %s::jsonb", [json.dumps(payload, allow_nan=False, ensure_ascii=False)])
