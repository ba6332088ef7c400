from __future__ import annotations

from pathlib import Path

import pytest

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night
from tests.support.command import running
from tests.support.waiting import wait_until

TOPICS = ("invoice.send", "mail.send")


@pytest.fixture
def outage(night: Night) -> Night:
    """Three kinds in two topics; of mail.send one kind will be fixed and the other not."""
    night.alive("shop-1", *TOPICS)
    night.die("mail.send", 30, error_class="GatewayDown")
    night.die("mail.send", 20, error_class="BadTemplate")
    night.die("invoice.send", 25, error_class="TaxServiceDown", p_generation=3)
    return night


def run_what_is_due(night: Night, *, broken: str | None = None) -> None:
    """A dispatcher's round: what died of *broken* before dies of it again."""
    for topic in TOPICS:
        while claim := night.claim(topic, 1):
            [event_id] = claim.ids
            last = night.last_cycle(event_id)["last_failure"]
            if last["error_class"] == broken:
                night.fail(claim, terminal=True, failure=last)
            else:
                night.complete(claim)


LOOK = ("kinds", "still-dying")


@follows("many-jobs-died", *LOOK, "canary", "verdict", "rest", "outcome")
def test_what_is_fixed_comes_back_and_the_rest_stays(shift: Shift, outage: Night):
    night = outage
    assert "(3 rows)" in shift.run("kinds")
    assert "BadTemplate" in shift.run("still-dying")

    shift.run("canary")
    assert night.count(status="PENDING") == 3, "one of each kind"
    assert shift.run("verdict").count("pending: wait") == 3
    run_what_is_due(night, broken="BadTemplate")
    verdict = shift.run("verdict")
    assert verdict.count("lived") == 2
    assert verdict.count("NOT FIXED") == 1

    shift.knows(slice=10)
    shift.run("rest")
    assert night.count(status="PENDING", topic="mail.send") == 10
    assert night.count(status="PENDING", topic="invoice.send", generation=3) == 10
    run_what_is_due(night, broken="BadTemplate")
    shift.knows(slice=1000)
    shift.run("rest")
    run_what_is_due(night, broken="BadTemplate")
    assert "(0 rows)" in shift.run("rest")

    assert night.count(status="COMPLETED") == 55
    assert night.ask("select topic, error_class, dead, died_before from pulse.dead_kind") == [
        {"topic": "mail.send", "error_class": "BadTemplate", "dead": 20, "died_before": 1}
    ]
    assert (
        night.one("select count(*) from pulse.outbox where failure_history -> -1 ->> 'replayed_by' = 'ada'")
        == 56
    )
    assert "BadTemplate" in shift.run("outcome")


@follows("many-jobs-died", "canary", "rest")
def test_it_stops_when_they_die_again(shift: Shift, outage: Night):
    """The canary lived, and then the downstream went away again: the brake is in the block."""
    night = outage
    shift.knows(slice=5)
    shift.run("canary")
    run_what_is_due(night)
    shift.run("rest")
    run_what_is_due(night, broken="TaxServiceDown")
    shown = shift.run("rest")

    assert shown.count("STOPPED") == 1
    assert night.count(status="PENDING", topic="invoice.send") == 0
    assert night.count(status="PENDING", topic="mail.send") == 10


@follows("many-jobs-died", "canary", "rest")
def test_it_stops_when_they_fail_again(shift: Shift, outage: Night):
    """Transient errors take a while to become deaths: retries count too."""
    night = outage
    shift.knows(slice=15)
    shift.run("canary")
    run_what_is_due(night)
    shift.run("rest")
    night.fail(night.claim("invoice.send", 15), delay=60)

    assert shift.run("rest").count("STOPPED") == 1
    assert night.count(status="PENDING", topic="invoice.send") == 0


@follows("many-jobs-died", "pause", "began", "resume", "one-kind", "would-discard", "discard", "outcome")
def test_one_kind_is_replayed_and_one_discarded(shift: Shift, outage: Night):
    night = outage
    shift.knows(topic="mail.send", reason="mail server down")
    shift.run("pause")
    assert night.ask("select topic, reason, paused_by from pulse.pause") == [
        {"topic": "mail.send", "reason": "mail server down", "paused_by": "ada"}
    ]
    shift.knows(error_class="GatewayDown", generation="null", slice=1)
    assert " 1\n" in shift.run("began", "one-kind")
    run_what_is_due(night)
    assert night.count(status="PENDING") == 1, "it is paused"
    shift.run("resume")
    assert night.ask("select * from pulse.pause") == []
    run_what_is_due(night)

    shift.knows(slice=100)
    assert " 29\n" in shift.run("one-kind")
    run_what_is_due(night)
    assert " 0\n" in shift.run("one-kind")
    shift.knows(error_class="BadTemplate", reason="obsolete template")
    assert " 20\n" in shift.run("would-discard")
    assert night.count(status="DEAD_LETTERED") == 45
    assert " 20\n" in shift.run("discard")
    shift.run("outcome")

    assert night.count(status="DISCARDED") == 20
    reasons = night.ask(
        "select distinct failure_history -> -1 ->> 'reason' as why from pulse.outbox where status = 'DISCARDED'"
    )
    assert reasons == [{"why": "obsolete template"}]
    assert night.count(status="DEAD_LETTERED") == 25, "the third kind was left alone"


APPLICATION = """
from pulse_outbox import Event, Outbox, TerminalHandlerError
outbox = Outbox()

class BadTemplate(TerminalHandlerError): ...

@outbox.handler("mail.send")
async def send(event: Event[dict]) -> None:
    if event.payload.get("template") == "bad":
        raise BadTemplate

@outbox.handler("invoice.send")
async def invoice(event: Event[dict]) -> None: ...
"""


@follows("many-jobs-died", "plan-sh", "replay-sh", "outcome")
def test_the_short_way(shift: Shift, night: Night, logins: dict[str, str], tmp_path: Path):
    """With a real dispatcher: what is fixed completes, of what isn't one dies again."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    night.die("mail.send", 30)
    night.die("mail.send", 20, error_class="BadTemplate", payload={"template": "bad"})
    night.die("invoice.send", 25, error_class="TaxServiceDown")
    with running(tmp_path, "shop:outbox", dsn=logins["dispatcher"]):
        wait_until(lambda: night.ask("select 1 from pulse.dispatcher_status where alive"))
        assert "75 dead letters would be replayed" in shift.run("plan-sh")
        assert night.count(status="DEAD_LETTERED") == 75
        assert "some are left" in shift.run("replay-sh")
        wait_until(lambda: night.count(status="COMPLETED") == 55)

    assert night.ask("select topic, error_class, dead, died_before from pulse.dead_kind order by dead") == [
        {"topic": "mail.send", "error_class": "shop.BadTemplate", "dead": 1, "died_before": 1},
        {"topic": "mail.send", "error_class": "BadTemplate", "dead": 19, "died_before": 0},
    ]
    assert "BadTemplate" in shift.run("outcome")


@follows("many-jobs-died", "canary", "verdict")
def test_a_canary_that_was_not_sent(shift: Shift, outage: Night):
    """The replay was refused, by a lock for one: the verdict does not call that a second death."""
    night = outage
    shift.run("canary")
    run_what_is_due(night, broken="BadTemplate")
    assert "NOT FIXED" in shift.run("verdict")
    night.conn.execute(
        "update pulse.outbox set completed_at = completed_at - interval '1 day' where status = 'DEAD_LETTERED'"
    )

    shown = shift.run("verdict")
    assert "not replayed: run the canary block again" in shown
    assert "NOT FIXED" not in shown
