from __future__ import annotations

from pathlib import Path

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night

APPLICATION = """
from pulse_outbox import Event, Outbox
outbox = Outbox()

@outbox.handler("mail.send")
async def send(event: Event[dict]) -> None: ...
"""


@follows("roll-out-a-generation", "work", "who", "try", "move-one", "move-rest", "retired")
def test_new_one_in_old_one_out(shift: Shift, night: Night, tmp_path: Path):
    (tmp_path / "shop.py").write_text(APPLICATION)
    night.alive("old", "mail.send", generations=[1])
    dead = night.die("mail.send", 5, p_generation=1)
    old = night.enqueue("mail.send", p_generation=1)
    new = night.enqueue("mail.send", p_generation=2)
    shift.knows(old=1, new=2, app="shop:outbox", topic="mail.send")

    assert "DEAD_LETTERED" in shift.run("work")
    assert "{1}" in shift.run("who")
    shift.run("try")
    assert night.statuses(old, new) == ["PENDING", "COMPLETED"]

    night.work("mail.send", p_generations=[1])
    shift.run("move-one")
    assert night.count(status="PENDING", generation=2) == 1
    shift.run("try")
    assert night.statuses(*dead).count("COMPLETED") == 1
    assert "4" in shift.run("move-rest")
    shift.run("try")
    night.call("dispatcher_gone", "old")

    assert set(night.statuses(*dead)) == {"COMPLETED"}
    assert {night.last_cycle(event_id)["replayed_by"] for event_id in dead} == {"ada"}
    assert shift.run("retired").split("\n")[2].split("|") == ["         0 ", "               0"]
