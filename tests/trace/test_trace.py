"""Trace context: read from headers with care, added to them only where a span is active."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse_outbox import Outbox
from pulse_outbox.bulk import encode_events
from pulse_outbox.enqueue import encode_event
from pulse_outbox.events import NewEvent
from pulse_outbox.trace import current_trace_headers, trace_fields, trace_of

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", False),
        (f"00-{TRACE_ID}-{SPAN_ID}-03", True),
        (f" {GOOD.upper()} ", True),
        (f"01-{TRACE_ID}-{SPAN_ID}-01-what-comes-later", True),
    ],
)
def test_a_traceparent_is_read(value, sampled):
    assert trace_of({"traceparent": value}) == (TRACE_ID, SPAN_ID, sampled)
    assert trace_fields({"traceparent": value}) == {"trace_id": TRACE_ID, "span_id": SPAN_ID}


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [GOOD],
        {},
        "",
        "nonsense",
        GOOD[:-1],
        GOOD + "-more",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        GOOD.replace("-", "_"),
        GOOD.replace("0", "٠"),
        GOOD + "\n" + GOOD,
        "01" + GOOD[2:] + "-" + "x" * 100_000,
    ],
)
def test_a_bad_one_is_none(value):
    """Whatever a producer in another language wrote there: it costs the trace and never the job."""
    assert trace_of({"traceparent": value}) is None
    assert trace_fields({"traceparent": value}) == {}


@given(st.one_of(st.text(), st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")))
def test_reading_never_raises(text):
    trace = trace_of({"traceparent": text})

    assert trace is None or (len(trace.trace_id), len(trace.span_id)) == (32, 16)


def headers_of(event: NewEvent, max_bytes: int = 1000) -> dict[str, object]:
    return dict(json.loads(encode_event(event, max_bytes).headers))


@pytest.fixture
def opentelemetry(monkeypatch):
    """The part of OpenTelemetry's API that is asked, with an active span."""
    context = SimpleNamespace(
        is_valid=True,
        trace_id=int(TRACE_ID, 16),
        span_id=int(SPAN_ID, 16),
        trace_flags=1,
        trace_state=SimpleNamespace(to_header=lambda: "vendor=1"),
    )
    api = SimpleNamespace(context=context)
    api.get_current_span = lambda: SimpleNamespace(get_span_context=lambda: api.context)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", api)
    return api


def test_an_active_span_goes_into_the_headers(opentelemetry, conn):
    Outbox().enqueue(conn, "t", {}, headers={"tenant": "x"})
    Outbox().enqueue_many(conn, [NewEvent("t", {})])

    found = [headers for (headers,) in conn.execute("select headers from pulse.outbox order by seq")]
    trace = {"traceparent": GOOD, "tracestate": "vendor=1"}
    assert found == [{"tenant": "x", **trace}, trace]


def test_the_producers_own_traceparent_wins(opentelemetry):
    other = GOOD.replace("b7", "b8")

    assert headers_of(NewEvent("t", {}, headers={"traceparent": other})) == {"traceparent": other}


def test_without_a_span_nothing_is_added(opentelemetry):
    opentelemetry.context.is_valid = False

    assert headers_of(NewEvent("t", {}, headers={"a": 1})) == {"a": 1}
    assert headers_of(NewEvent("t", {})) == {}


@pytest.mark.parametrize("state", ["x" * 513, "a\nb", "ä"])
def test_a_tracestate_that_is_none_is_left_out(opentelemetry, state):
    opentelemetry.context.trace_state = SimpleNamespace(to_header=lambda: state)

    assert headers_of(NewEvent("t", {})) == {"traceparent": GOOD}


@pytest.mark.parametrize("broken", [None, "text", RuntimeError])
def test_a_broken_library_fails_no_enqueue(opentelemetry, broken):
    def fail() -> object:
        raise RuntimeError

    opentelemetry.context = SimpleNamespace(is_valid=True, trace_id=broken)
    assert current_trace_headers() == {}
    opentelemetry.get_current_span = fail
    assert headers_of(NewEvent("t", {})) == {}


def test_the_trace_is_not_held_against_the_size_limit(opentelemetry):
    """A small limit must not make an event refusable by whether it is traced."""
    assert headers_of(NewEvent("t", 1), max_bytes=5)["traceparent"] == GOOD


def test_a_batch_asks_once(opentelemetry):
    asked = []
    ask = opentelemetry.get_current_span

    def count() -> object:
        asked.append(1)
        return ask()

    opentelemetry.get_current_span = count

    batch = encode_events([NewEvent("t", {}) for _ in range(100)], 1000)

    assert len(asked) == 1
    assert all(GOOD in event.headers for part in batch.first for event in part.events)


SENTRY = """
import sentry_sdk, sys
from pulse_outbox.trace import current_trace_headers, trace_of
print(current_trace_headers())
sentry_sdk.init(dsn="http://public@127.0.0.1:1/1", traces_sample_rate=1.0, shutdown_timeout=0)
print(current_trace_headers())
with sentry_sdk.start_transaction(name="request") as span:
    trace = trace_of(current_trace_headers())
    print(trace == (span.trace_id, span.span_id, True))
"""


def test_a_span_of_sentry_does_as_well():
    """In a process of its own: Sentry's client is global."""
    answer = subprocess.run([sys.executable, "-c", SENTRY], capture_output=True, text=True, check=True)

    assert answer.stdout.splitlines() == ["{}", "{}", "True"]


def test_enqueueing_imports_no_tracer():
    code = (
        "import sys, pulse_outbox.enqueue as e, pulse_outbox.events as v; e.encode_event(v.NewEvent('t', 1), 9);"
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert not {"sentry_sdk", "opentelemetry", "structlog"} & set(loaded.stdout.split())
