"""Sentry around the handlers of an application that has initialised it, by itself or in its lifespan.

Nothing here sends anything. Each job gets a scope of its own, so that whatever the handler captures says which event
it was about and continues the producer's trace; each failed attempt leaves a breadcrumb.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from pulse_outbox.trace import trace_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pulse_outbox.events import Event

OUR_LOGGER = "pulse_outbox"


def connect() -> Sentry | None:
    """What to put around handlers, or None where the application uses no Sentry."""
    sdk = sys.modules.get("sentry_sdk")
    if sdk is None or not sdk.get_client().is_active():
        return None
    from sentry_sdk.integrations.logging import ignore_logger

    # An application may send structlog through the standard library's logging, where Sentry makes events of errors:
    # a failed attempt is none, and a dead letter has its own alert.
    ignore_logger(OUR_LOGGER)
    # From here on all tasks share a scope: the one that breadcrumbs go to.
    sdk.get_isolation_scope()
    return Sentry(sdk)


class Sentry:
    """The application's own sentry_sdk, which is active."""

    def __init__(self, sdk: Any) -> None:
        self._sdk = sdk

    @contextmanager
    def around(self, event: Event[Any]) -> Iterator[None]:
        """A scope of its own for one job: who it is, and the trace that it belongs to."""
        with self._sdk.isolation_scope() as scope:
            with suppress(Exception):  # nothing of this is worth failing a job for
                scope.clear_breadcrumbs()
                scope.set_tag("event_id", str(event.id))
                scope.set_tag("topic", event.topic)
                self._continue_trace(scope, event.headers)
            yield

    def _continue_trace(self, scope: Any, headers: Mapping[str, Any]) -> None:
        trace = trace_of(headers) if headers else None
        if trace is None:
            scope.set_new_propagation_context()
            return
        incoming = {"sentry-trace": f"{trace.trace_id}-{trace.span_id}-{trace.sampled:d}"}
        if isinstance(baggage := headers.get("baggage"), str):
            incoming["baggage"] = baggage
        scope.generate_propagation_context(incoming)

    def failed_attempt(self, fields: Mapping[str, Any]) -> None:
        """A breadcrumb: seen on whatever is sent next, sent by itself never."""
        with suppress(Exception):
            self._sdk.add_breadcrumb(
                type="error", category="outbox.failed", level="warning", data=dict(fields)
            )
