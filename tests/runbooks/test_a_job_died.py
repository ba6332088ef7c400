from __future__ import annotations

from uuid import UUID

import pytest

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night


@pytest.fixture
def dead(night: Night) -> UUID:
    """A dead letter that holds its ordering key, and an event that waits behind it."""
    night.alive("shop-1", "mail.send")
    [event_id] = night.die(
        "mail.send", error_class="BadAddress", error="no such mailbox", key="customer:7",
        payload={"email": "ada@exmaple.org", "order": 7}, p_idempotency_key="mail-7", p_source="shop",
    )  # fmt: skip
    night.enqueue("mail.send", key="customer:7", payload={"order": 8})
    night.claim("mail.send")
    return event_id


@follows("a-job-died", "list", "show", "behind", "served", "replay", "outcome")
def test_fix_and_replay(shift: Shift, night: Night, dead: UUID):
    assert str(dead) in shift.run("list")
    shift.knows(event_id=dead)
    shown = shift.run("show")
    assert "no such mailbox" in shown
    assert "exmaple" in shown
    assert "mail.send" in shift.run("behind")
    assert "shop-1" in shift.run("served")

    shift.run("replay")
    assert "PENDING" in shift.run("outcome")
    assert night.last_cycle(dead)["replayed_by"] == "ada"
    assert night.last_cycle(dead)["last_error"] == "no such mailbox"

    # Once more, by a colleague who was too late: nothing happens.
    assert "(0 rows)" in shift.run("replay")
    assert len(night.row(dead)["failure_history"]) == 1

    assert night.work("mail.send") == [dead]
    assert "COMPLETED" in shift.run("outcome")
    assert len(night.work("mail.send")) == 1, "what waited behind it goes on"


@follows("a-job-died", "correct", "correct-commit", "outcome")
def test_correct_the_payload(shift: Shift, night: Night, dead: UUID):
    shift.knows(event_id=dead, change='{"email": "ada@example.org"}')

    assert "ada@example.org" in shift.run("correct")
    assert night.status(dead) == "DEAD_LETTERED", "until it is committed"
    shift.run("correct-commit")

    assert night.status(dead) == "DISCARDED"
    assert night.last_cycle(dead)["discarded_by"] == "ada"
    assert night.last_cycle(dead)["reason"] == "payload corrected in a copy"
    [copy] = night.ask("select * from pulse.outbox where headers ->> 'corrects' = %s", str(dead))
    assert copy["payload"] == {"email": "ada@example.org", "order": 7}
    assert copy["headers"]["corrected_by"] == "ada"
    assert (copy["ordering_key"], copy["source"], copy["holds_key"]) == ("customer:7", "shop", True)
    first, second = night.work("mail.send"), night.work("mail.send")
    assert len(first) == 1
    assert second == [copy["event_id"]], "it goes to the end of its key, as the text says"
    shift.knows(event_id=copy["event_id"])
    assert "COMPLETED" in shift.run("outcome")


@follows("a-job-died", "discard", "outcome")
def test_discard(shift: Shift, night: Night, dead: UUID):
    shift.knows(event_id=dead, reason="it's cancelled")
    shift.run("discard")

    assert night.status(dead) == "DISCARDED"
    assert night.last_cycle(dead)["reason"] == "it's cancelled"
    assert night.last_cycle(dead)["discarded_by"] == "ada"
    assert "DISCARDED" in shift.run("outcome")
    assert len(night.work("mail.send")) == 1, "what waited behind it goes on"


@follows("a-job-died", "show-sh", "replay-sh", "discard-sh")
def test_the_same_in_a_shell(shift: Shift, night: Night, dead: UUID):
    shift.knows(event_id=dead, reason="it's cancelled")
    shown = shift.run("show-sh")
    assert "no such mailbox" in shown
    assert "exmaple" not in shown, "the payload is shown only when asked for"

    shift.run("replay-sh")
    assert night.status(dead) == "PENDING"
    assert night.last_cycle(dead)["replayed_by"] == "ada"

    night.fail(night.claim("mail.send"), terminal=True)
    shift.run("discard-sh")

    assert night.status(dead) == "DISCARDED"
    assert night.last_cycle(dead)["reason"] == "it's cancelled"
    assert night.last_cycle(dead)["discarded_by"] == "ada"
