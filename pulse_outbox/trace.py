"""Trace context: from the producer's active span into an event's headers, and back out of them.

Nothing is imported here. OpenTelemetry and Sentry are asked only where the application has loaded them itself, and
whatever goes wrong in them costs the trace, never the event.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import NamedTuple

HEADER = "traceparent"
# W3C Trace Context: a later version may append fields, which are not ours to read.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MAX_TRACESTATE = 512


class TraceContext(NamedTuple):
    """The producer's span."""

    trace_id: str
    span_id: str
    sampled: bool


def trace_of(headers: Mapping[str, object]) -> TraceContext | None:
    """The trace that an event's headers carry; None where they carry none, or nonsense."""
    value = headers.get(HEADER)
    if not isinstance(value, str) or len(value) > 512:
        return None
    match = _TRACEPARENT.fullmatch(value.strip().lower())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def trace_fields(headers: Mapping[str, object]) -> dict[str, str]:
    """The trace as fields of a log line: `trace_id` and `span_id`, or nothing."""
    trace = trace_of(headers) if headers else None
    return {"trace_id": trace.trace_id, "span_id": trace.span_id} if trace else {}


def current_trace_headers() -> dict[str, str]:
    """The headers of the span that is active here, as OpenTelemetry or else Sentry knows it; mostly none."""
    for library, ask in (("opentelemetry.trace", _of_opentelemetry), ("sentry_sdk", _of_sentry)):
        if library in sys.modules:
            try:
                headers = ask(sys.modules[library])
            except Exception:  # a half-imported library, another release of it: an event without a trace
                headers = {}
            if trace_of(headers):
                return headers
    return {}


def add_trace(headers: Mapping[str, object] | None, encoded: str, trace: Mapping[str, str]) -> str:
    """The encoded headers with the trace in front of them, unless the producer gave one himself."""
    if not trace or (headers and (HEADER in headers or "tracestate" in headers)):
        return encoded
    # Put together as text, so that nothing can be refused any more: no limit and no encoding.
    front = json.dumps(trace)
    return front if encoded == "{}" else f"{front[:-1]}, {encoded[1:]}"


def _of_opentelemetry(library: object) -> dict[str, str]:
    context = library.get_current_span().get_span_context()  # type: ignore[attr-defined]  # not a dependency
    if not context.is_valid:
        return {}
    flags = int(context.trace_flags) & 0xFF
    headers = {HEADER: f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"}
    state = context.trace_state.to_header() if context.trace_state else ""
    if state and len(state) <= _MAX_TRACESTATE and state.isascii() and state.isprintable():
        headers["tracestate"] = state
    return headers


def _of_sentry(library: object) -> dict[str, str]:
    span = library.get_current_span()  # type: ignore[attr-defined]  # not imported here
    if span is None:
        return {}
    return {HEADER: f"00-{span.trace_id}-{span.span_id}-{'01' if span.sampled else '00'}"}
