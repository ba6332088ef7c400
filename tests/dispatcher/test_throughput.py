"""How fast each topic goes: counted by the dispatcher, told with its heartbeats, added up by the view."""

from __future__ import annotations

import pytest

from pulse_outbox import Event, Outbox
from pulse_outbox.dispatcher import state
from pulse_outbox.dispatcher.state import RATE_WINDOW, Throughput
from tests.support.dispatching import Table, dispatching
from tests.support.waiting import wait_until_async


def test_rates_are_taken_over_the_last_few_seconds():
    throughput = Throughput(["fax", "mail"], 100.0)
    throughput.completed["mail"] += 50

    assert throughput.rates(100.0 + RATE_WINDOW - 0.1) is None
    assert throughput.rates(100.0 + RATE_WINDOW) == [0, 50 / RATE_WINDOW]
    throughput.completed["fax"] += 20
    assert throughput.rates(100.0 + RATE_WINDOW + 1) == [0, 50 / RATE_WINDOW], "too early for new ones"
    assert throughput.rates(100.0 + RATE_WINDOW + 10) == [2, 0]


async def test_status_tells_a_busy_topic_from_an_idle_one(dsn: str, table: Table, monkeypatch):
    """One dispatcher serves both: its own rate would hide that one of them stands still."""
    monkeypatch.setattr(state, "RATE_WINDOW", 0.2)
    outbox = Outbox()

    @outbox.handler("mail")
    async def send(event: Event[dict[str, str]]) -> None: ...

    @outbox.handler("fax")
    async def fax(event: Event[dict[str, str]]) -> None: ...

    async with dispatching(outbox, dsn):

        async def moves() -> bool:
            await table.enqueue(outbox, "mail")
            rates = dict(await table.execute("select topic, rate from pulse.topic_status"))
            return (rates.get("mail") or 0) > 0 and rates["fax"] == 0

        await wait_until_async(moves)


@pytest.mark.parametrize("outcome", ["fails", "completes"])
async def test_only_what_completes_counts(dsn: str, table: Table, outcome: str):
    outbox = Outbox()

    @outbox.handler("mail")
    async def send(event: Event[dict[str, str]]) -> None:
        if outcome == "fails":
            raise TypeError

    event_id = await table.enqueue(outbox, "mail", max_attempts=1)
    async with dispatching(outbox, dsn) as dispatcher:
        await table.until_status(event_id, "DEAD_LETTERED" if outcome == "fails" else "COMPLETED")

        assert dispatcher._throughput.completed == {"mail": int(outcome == "completes")}
