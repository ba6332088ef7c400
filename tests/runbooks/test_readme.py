from __future__ import annotations

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night


@follows("README", "start", "status", "overview")
def test_first_look(shift: Shift, night: Night):
    night.alive("shop-1", "mail.send")
    night.die("mail.send", 3)
    night.enqueue("invoice.send")
    night.pause("invoice.send")

    assert "runbook_" in shift.run("start")
    shown = shift.run("status")
    assert "GatewayDown" in shown
    assert "runbooks/a-job-died.md" in shown
    shown = shift.run("overview")
    assert "GatewayDown" in shown
    assert "shop-1" in shown
    assert "maintenance" in shown
    assert "invoice.send" in shown
