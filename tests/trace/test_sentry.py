"""Sentry around handlers: each job has its own scope, a failed attempt is a breadcrumb and never an event."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from pulse_outbox import Outbox
from pulse_outbox.dispatcher import sentry

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

# What would go over the wire is kept instead. The dispatcher is the application's own, with structlog sent through the
# standard library's logging: the configuration in which Sentry sees every log line.
PROGRAM = """
import asyncio, json, logging, sys

import sentry_sdk, structlog

from pulse_outbox import Dispatcher, Event, Outbox, RetryPolicy

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
structlog.configure(
    logger_factory=structlog.stdlib.LoggerFactory(), processors=[structlog.processors.JSONRenderer()]
)
sent = []


def keep(event, hint):
    sent.append(event)


sentry_sdk.init(dsn="http://public@127.0.0.1:1/1", before_send=keep, shutdown_timeout=0)
sentry_sdk.set_tag("service", "shop")
outbox = Outbox()


@outbox.handler("in.loop", retry=RetryPolicy(max_attempts=2, base_delay=0))
async def in_loop(event: Event) -> None:
    sentry_sdk.set_tag("mine", event.payload["n"])
    await asyncio.sleep(0.05)  # long enough for the others to be in between
    sentry_sdk.capture_message("from the handler")
    logging.getLogger("shop").error("the application's own error")


@outbox.handler("in.thread")
def in_thread(event: Event) -> None:
    sentry_sdk.capture_message("from a thread")


@outbox.handler("always.fails", retry=RetryPolicy(max_attempts=2, base_delay=0, jitter="none"))
async def fails(event: Event) -> None:
    raise RuntimeError("the post is on strike")


Dispatcher(outbox, dsn=sys.argv[1], burst=True).run()
sentry_sdk.capture_message("afterwards")
print(json.dumps(sent, default=str))
"""


@pytest.fixture
def sent(dsn, conn) -> list[dict[str, Any]]:
    """The Sentry events of a dispatcher that ran one event of each kind, three of the first."""
    trace = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
    outbox = Outbox()
    for number in range(3):
        outbox.enqueue(
            conn, "in.loop", {"n": number, "card": "4111"}, idempotency_key=str(number), headers=trace
        )
    outbox.enqueue(conn, "in.thread", {}, headers=trace)
    outbox.enqueue(conn, "always.fails", {"card": "4111"})
    conn.commit()
    answer = subprocess.run([sys.executable, "-c", PROGRAM, dsn], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    events: list[dict[str, Any]] = json.loads(answer.stdout)
    return events


def messages(event: dict[str, Any]) -> str:
    return str(event.get("message") or event.get("logentry", {}).get("message"))


def test_each_job_has_a_scope_of_its_own_and_failures_are_no_events(sent, conn):
    ids = {
        (topic, key): str(event_id)
        for topic, key, event_id in conn.execute(
            "select topic, idempotency_key, event_id from pulse.outbox where topic = 'in.loop'"
        )
    }
    [alert] = [event for event in sent if event.get("logger") == "pulse_outbox"]
    sent.remove(alert)
    kinds = sorted(messages(event) for event in sent)
    captured = [event for event in sent if messages(event) == "from the handler"]

    assert kinds == sorted(
        ["from the handler"] * 3 + ["the application's own error"] * 3 + ["from a thread", "afterwards"]
    ), "the application's own, and no failed attempt"
    assert messages(alert) == "always.fails: RuntimeError", (
        "one for the dead letter, not one for each attempt"
    )
    for event in captured:
        number = str(event["tags"]["mine"])
        assert event["tags"]["event_id"] == ids["in.loop", number]
        assert (event["tags"]["topic"], event["tags"]["service"]) == ("in.loop", "shop")
        assert event["contexts"]["trace"]["trace_id"] == TRACE_ID
        assert event["contexts"]["trace"]["parent_span_id"] == SPAN_ID
    [threaded] = [event for event in sent if messages(event) == "from a thread"]
    assert threaded["tags"]["topic"] == "in.thread"
    assert threaded["contexts"]["trace"]["trace_id"] == TRACE_ID
    [last] = [event for event in sent if messages(event) == "afterwards"]
    crumbs = [crumb for crumb in last["breadcrumbs"]["values"] if crumb["category"] == "outbox.failed"]
    assert [crumb["data"]["attempt"] for crumb in crumbs] == [1, 2]
    assert "4111" not in json.dumps(sent)


def test_without_sentry_there_is_nothing_around_a_job(monkeypatch):
    monkeypatch.delitem(sys.modules, "sentry_sdk", raising=False)
    assert sentry.connect() is None

    import sentry_sdk  # imported and not initialised

    assert sentry_sdk.get_client().is_active() is False
    assert sentry.connect() is None


BREADCRUMBS = """
import json, sentry_sdk
from pulse_outbox.dispatcher import sentry
sent = []
sentry_sdk.init(
    dsn="http://public@127.0.0.1:1/1", before_send=lambda event, hint: sent.append(event), shutdown_timeout=0
)
scope = sentry.connect()
scope.failed_attempt({"event_id": "1", "topic": "t", "attempt": 1, "error": "RuntimeError: x"})
sentry_sdk.capture_message("an alert")
print(json.dumps(sent, default=str))
"""


def test_a_failed_attempt_is_a_breadcrumb():
    answer = subprocess.run([sys.executable, "-c", BREADCRUMBS], capture_output=True, text=True, check=True)

    [event] = json.loads(answer.stdout)
    [crumb] = event["breadcrumbs"]["values"]
    assert (crumb["category"], crumb["level"]) == ("outbox.failed", "warning")
    assert crumb["data"]["error"] == "RuntimeError: x"
