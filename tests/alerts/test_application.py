"""An application with a Sentry of its own: its DSN and before_send are used, and nothing that must not leave does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from psycopg import sql

from pulse_outbox import Outbox
from tests.support.sentry_receiver import Receiver

HEAD = """
import json, logging, os, sys
import sentry_sdk, structlog
from pulse_outbox import Dispatcher, Event, Outbox, TerminalHandlerError

outbox = Outbox()

@outbox.handler("dies")
async def dies(event: Event) -> None:
    raise TerminalHandlerError("no")

"""
INITIALISED = """
def before_send(event, hint):
    if os.environ.get("BEFORE_SEND") == "drops":
        return None
    if os.environ.get("BEFORE_SEND") == "raises":
        raise ValueError("secret")
    if os.environ.get("BEFORE_SEND") == "spoils":
        event["extra"] = {"object": object()}
    event["tags"]["seen"] = "yes"
    event["event_id"] = "0" * 32
    return event

sentry_sdk.init(
    dsn=sys.argv[2], release="shop@7", environment="stage", before_send=before_send, attach_stacktrace=True,
    sample_rate=0.0, shutdown_timeout=0,
)
client = sentry_sdk.get_client()
"""
RUN = """
from pulse_outbox.dispatcher import core
core.FINAL_ALERTS = 30      # for a busy machine: importing the SDK alone may take two seconds
Dispatcher(outbox, dsn=sys.argv[1], burst=True).run()
"""


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("SENTRY_")}
    answer = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**mine, **environment},
    )
    assert answer.returncode == 0, answer.stderr + answer.stdout
    return answer


@pytest.fixture
def owed(conn) -> Any:
    """One event that is going to die; afterwards how it is: paid or not."""
    event_id = Outbox().enqueue(conn, "dies", {})
    conn.commit()

    def look() -> tuple[Any, bool]:
        [(alert_id, is_paid)] = conn.execute(
            "select alert_id, alerted_at is not null from pulse.outbox where event_id = %s", (event_id,)
        )
        conn.rollback()
        return alert_id, is_paid

    return look


def test_its_dsn_options_and_before_send_are_used(dsn, receiver: Receiver, owed):
    """But not its sampling: a dead letter that is not told was lost. And its own client is left as it was."""
    run(
        HEAD + INITIALISED + RUN + "assert sentry_sdk.get_client() is client and client.is_active()",
        dsn,
        receiver.dsn,
    )

    [event] = receiver.events
    alert_id, is_paid = owed()
    assert (event["event_id"], is_paid) == (alert_id.hex, True), "whatever before_send did to it"
    assert (event["release"], event["environment"], event["tags"]["seen"]) == ("shop@7", "stage", "yes")
    assert "threads" not in event
    assert "stacktrace" not in json.dumps(event)


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("drops", "before_send dropped it"),
        ("raises", "before_send raised ValueError"),
        ("spoils", "before_send made it unsendable: TypeError"),
    ],
)
def test_what_before_send_refuses_is_logged_and_paid(dsn, receiver: Receiver, owed, does, why):
    answer = run(HEAD + INITIALISED + RUN, dsn, receiver.dsn, BEFORE_SEND=does)

    assert receiver.requests == []
    assert "outbox.alert_refused" in answer.stdout
    assert why in answer.stdout
    assert "secret" not in answer.stdout + answer.stderr
    assert owed()[1] is True


def test_a_transport_of_its_own_gets_the_alert(dsn, owed):
    """Where it goes from there is its own business."""
    program = """
from sentry_sdk.transport import Transport

class Mine(Transport):
    def capture_envelope(self, envelope):
        print("SENT", json.dumps(envelope.get_event()))

sentry_sdk.init(dsn="http://public@127.0.0.1:1/1", transport=Mine, shutdown_timeout=0)
"""
    answer = run(HEAD + program + RUN, dsn)

    [line] = [line for line in answer.stdout.splitlines() if line.startswith("SENT ")]
    alert_id, is_paid = owed()
    assert json.loads(line[5:])["event_id"] == alert_id.hex
    assert is_paid is True


@pytest.mark.parametrize("initialise", ["", "sentry_sdk.init(default_integrations=False)"])
def test_without_a_dsn_the_log_line_pays(dsn, owed, initialise):
    answer = run(HEAD + initialise + RUN, dsn)

    assert "outbox.alert " in answer.stdout
    assert owed()[1] is True


def test_a_dsn_that_is_none_leaves_the_debt(dsn, owed):
    """To be put right: nothing is lost until then, and the dispatcher works."""
    answer = run(HEAD + RUN, dsn, SENTRY_DSN="https://nonsense")

    assert "outbox.alert_failed" in answer.stdout
    assert owed()[1] is False


def test_the_sdk_is_not_imported_where_there_is_no_sentry(dsn, owed):
    """It takes half a second."""
    program = (HEAD + RUN).replace("import sentry_sdk, structlog", "import structlog")
    run(program + "assert 'sentry_sdk' not in sys.modules", dsn)
    assert owed()[1] is True


CANARIES = """
import psycopg
from pydantic import BaseModel

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
structlog.configure(
    logger_factory=structlog.stdlib.LoggerFactory(), processors=[structlog.processors.JSONRenderer()]
)
if sys.argv[2]:
    sentry_sdk.init(dsn=sys.argv[2], attach_stacktrace=True, include_local_variables=True, shutdown_timeout=0)

class Card(BaseModel):
    number: int

@outbox.handler("validated")
async def validated(event: Event[Card]) -> None: ...

@outbox.handler("inside")
async def inside(event: Event) -> None:
    Card.model_validate(event.payload)

@outbox.handler("locals")
async def with_locals(event: Event) -> None:
    password = event.payload["number"]
    raise TerminalHandlerError("could not log in")

@outbox.handler("database")
def database(event: Event) -> None:
    with psycopg.connect(sys.argv[1]) as conn:
        conn.execute("create temp table card (number text unique)")
        for _ in range(2):
            conn.execute("insert into card values (%s)", (event.payload["number"],))

@outbox.handler("dict")
async def keyed(event: Event[dict[str, int]]) -> None: ...
"""


@pytest.mark.parametrize("initialised", [True, False])
def test_canaries_are_found_nowhere(dsn, conn, receiver: Receiver, initialised):
    """FAULTS 37: payload values, inputs of validation errors, DETAIL of database errors, local variables."""
    outbox, canary = Outbox(), "4111-CANARY"
    topics = ["validated", "inside", "locals", "database"]
    for topic in topics:
        outbox.enqueue(conn, topic, {"number": canary}, headers={"x-secret": canary})
    outbox.enqueue(conn, "dict", {canary: "x"})
    conn.commit()
    environment = {} if initialised else {"SENTRY_DSN": receiver.dsn}
    answer = run(HEAD + CANARIES + RUN, dsn, receiver.dsn if initialised else "", **environment)
    dead = conn.execute("select event_id from pulse.outbox where alerted_at is not null").fetchall()
    conn.execute("select pulse.outbox_replay(event_id, 0, 'me') from pulse.outbox where topic = 'locals'")
    tables = {
        name: conn.execute(
            sql.SQL("select to_jsonb(t) - 'payload' - 'headers' from pulse.{} t").format(sql.Identifier(name))
        ).fetchall()
        for (name,) in conn.execute("select tablename from pg_tables where schemaname = 'pulse'").fetchall()
    }

    assert len(receiver.events) == len(dead) == 5
    assert {event["tags"]["topic"] for event in receiver.events} == {*topics, "dict"}
    assert canary not in receiver.text
    assert canary not in answer.stdout + answer.stderr
    assert "TerminalHandlerError" in str(tables)
    assert canary not in str(tables), "nor in any column of any table but those that producers write"
    for event in receiver.events:
        assert not {"threads", "breadcrumbs", "user", "request", "modules"} & set(event)
