from __future__ import annotations

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night


@follows("the-backlog-grows", "backlog", "dispatchers", "status-sh", "pauses", "resume", "resume-all", "pace")
def test_a_pause_that_was_forgotten(shift: Shift, night: Night):
    night.ago(minutes=30)
    night.enqueue_many(3, "mail.send")
    night.pause("mail.send")
    night.pause(None)
    night.ago()
    night.alive("shop-1", "mail.send")

    assert "maintenance" in shift.run("backlog")
    assert "shop-1" in shift.run("dispatchers")
    assert "maintenance" in shift.run("status-sh")
    assert "(all topics)" in shift.run("pauses")
    shift.knows(topic="mail.send")
    shift.run("resume")
    assert night.one("select count(*) from pulse.pause") == 1
    assert night.claim("mail.send") == []
    shift.run("resume-all")

    assert night.one("select count(*) from pulse.pause") == 0
    assert len(night.work("mail.send")) == 3
    assert "mail.send" in shift.run("pace")


@follows("the-backlog-grows", "backlog", "generations", "discard-topic")
def test_work_that_nobody_takes(shift: Shift, night: Night):
    """Of a generation that no dispatcher has, and of a topic that has no handler."""
    night.alive("shop-1", "mail.send", generations=[2])
    night.enqueue("mail.send", p_generation=1)
    night.enqueue("mail.send", p_generation=2)
    wrong = night.enqueue_many(2, "mial.send")

    assert "mial.send" in shift.run("backlog")
    shown = shift.run("generations")
    assert "(1 row)" in shown
    assert "mail.send" in shown
    shift.knows(topic="mial.send")
    assert "2" in shift.run("discard-topic")

    assert night.statuses(*wrong) == ["DISCARDED", "DISCARDED"]
    assert night.last_cycle(wrong[0])["discarded_by"] == "ada"
    assert night.count(status="PENDING") == 2


@follows("the-backlog-grows", "backlog", "blocked", "busy")
def test_a_blocked_key_and_a_busy_one(shift: Shift, night: Night):
    [dead] = night.die("mail.send", key="customer:7")
    night.enqueue("mail.send", key="customer:7")
    running = night.enqueue("invoice.send", key="customer:8")
    night.claim("invoice.send")
    night.enqueue_many(3, "invoice.send", key="customer:8")
    night.claim(["mail.send", "invoice.send"])  # parks what waits for its key

    assert "invoice.send" in shift.run("backlog")
    blocked = shift.run("blocked")
    assert str(dead) in blocked
    assert "customer:8" not in blocked
    shift.knows(topic="invoice.send")
    assert str(running) in shift.run("busy")


@follows("the-backlog-grows", "failing", "pause", "pause-sh", "resume-sh")
def test_a_downstream_that_fails(shift: Shift, night: Night):
    night.enqueue_many(3, "mail.send")
    night.fail(night.claim("mail.send"), "the server does not answer", delay=0)

    assert "the server does not answer" in shift.run("failing")
    shift.knows(topic="mail.send", reason="mail server down")
    shift.run("pause")

    assert night.one("select reason || ' ' || paused_by from pulse.pause") == "mail server down ada"
    assert night.claim("mail.send") == []

    shift.run("resume-sh")
    assert night.ask("select * from pulse.pause") == []
    shift.run("pause-sh")
    assert night.one("select reason || ' ' || paused_by from pulse.pause") == "mail server down ada"
