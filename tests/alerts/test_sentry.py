"""The real client over a socket: one event for each death or kind of death, and only Sentry's success pays."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import UUID

import pytest

from pulse_outbox import Event, NewEvent, Outbox, RetryPolicy
from pulse_outbox.alerts import sentry as sending
from tests.support.dispatching import Table, dispatching
from tests.support.sentry_receiver import Receiver
from tests.support.waiting import wait_until_async
from tests.support.worker import working

ALERT_LOCK = "select pg_advisory_xact_lock(hashtextextended('pulse.outbox_next_alert', 0))"


async def arrived(receiver: Receiver, count: int = 1, within: float = 15) -> list[dict[str, Any]]:
    return await asyncio.to_thread(receiver.wait_for, count, within=within)


async def paid(table: Table, count: int) -> None:
    await table.until("alerted_at is not null", count)
    assert await table.count("status = 'DEAD_LETTERED' and alerted_at is null") == 0


def names(events: list[Any]) -> list[str]:
    return [line["event"] for line in events]


async def test_a_death_is_one_event_that_says_what_died(dsn, outbox: Outbox, table: Table, sentry: Receiver):
    """At once, long before the next poll. Failed attempts before it are none."""

    @outbox.handler("fails", retry=RetryPolicy(max_attempts=3, base_delay=0.01, jitter="none"))
    async def fails(event: Event[dict]) -> None:
        raise RuntimeError("the post is on strike")

    async with dispatching(outbox, dsn, worker="anna", poll=30):
        event_id = await table.enqueue(outbox, "fails", {}, source="shop", target="post")
        row = await table.until_status(event_id, "DEAD_LETTERED")
        [event] = await arrived(sentry)
        await paid(table, 1)

    row = await table.row(event_id)
    assert UUID(event["event_id"]) == row.alert_id
    assert event["fingerprint"] == ["pulse-outbox", "fails", "RuntimeError"]
    assert (event["message"], event["level"]) == ("fails: RuntimeError", "error")
    assert event["environment"] == "test"
    assert event["tags"] == {
        "topic": "fails",
        "handler": row.last_failure["handler"],
        "rule": row.last_failure["rule"],
        "worker": "anna",
        "outbox.event_id": str(event_id),
    }
    letter = event["contexts"]["dead_letter"]
    assert {name: letter[name] for name in ("event_id", "source", "target", "last_error", "verdict")} == {
        "event_id": str(event_id),
        "source": "shop",
        "target": "post",
        "last_error": "RuntimeError: the post is on strike",
        "verdict": "transient",
    }
    assert (letter["attempts"], letter["count"]) == (3, 1)
    assert letter["runbook"] == "runbooks/a-job-died.md"
    assert len(sentry.requests) == 1


async def test_a_thousand_leases_in_one_sweep_are_one_alert(
    dsn, outbox: Outbox, table: Table, sentry: Receiver
):
    """FAULTS 36."""
    await table.enqueue_many(outbox, [NewEvent("works", {}, max_attempts=1) for _ in range(1000)])
    await table.execute(
        "select count(*) from pulse.outbox_claim(gen_random_uuid(), 'ghost', '{works}', 1000, p_slots => 1000)"
    )
    await table.execute("update pulse.outbox set lease_until = clock_timestamp() - interval '1 hour'")
    async with dispatching(outbox, dsn):
        await paid(table, 1000)

    [event] = sentry.events
    letter = event["contexts"]["dead_letter"]
    assert letter["count"] == 1000
    assert letter["runbook"] == "runbooks/a-poison-job.md"
    assert letter["handler_name"] == outbox.handlers["works"].name, "nobody lived to report it"
    assert event["fingerprint"] == ["pulse-outbox", "works", "LeaseExpired"]


async def test_a_thousand_deaths_by_a_handler_are_a_few_alerts(
    dsn, outbox: Outbox, table: Table, sentry: Receiver
):
    """They are stored batch by batch: what dies while an alert is under way gathers for the next."""
    await table.enqueue_many(outbox, [NewEvent("dies", {}) for _ in range(1000)])
    async with dispatching(outbox, dsn):
        await table.until("alerted_at is not null", 1000, within=20)

    letters = [event["contexts"]["dead_letter"] for event in sentry.events]
    counts = [letter["count"] for letter in letters]
    assert {letter["runbook"] for letter in letters if letter["count"] >= 10} == {
        "runbooks/many-jobs-died.md"
    }
    assert sum(counts) == 1000
    assert len(counts) <= 3
    assert len({event["event_id"] for event in sentry.events}) == len(counts)


async def test_each_kind_has_its_own(dsn, outbox: Outbox, table: Table, sentry: Receiver):
    await table.enqueue_many(
        outbox, [NewEvent("dies", {"kind": kind}) for kind in ("value", "key") for _ in range(10)]
    )
    async with dispatching(outbox, dsn, batch=100):
        await paid(table, 20)

    kinds = {event["fingerprint"][2].rpartition(".")[2] for event in sentry.events}
    assert kinds == {"TerminalHandlerError", "NoSuchKey"}
    assert len({tuple(event["fingerprint"]) for event in sentry.events}) == 2


async def test_two_dispatchers_send_it_once(dsn, outbox: Outbox, table: Table, sentry: Receiver):
    async with dispatching(outbox, dsn, worker="a"), dispatching(outbox, dsn, worker="b"):
        await table.enqueue_many(outbox, [NewEvent("dies", {}) for _ in range(20)])
        await paid(table, 20)

    counts = [event["contexts"]["dead_letter"]["count"] for event in sentry.events]
    assert sum(counts) == 20
    assert len(sentry.requests) == len({event["event_id"] for event in sentry.events})


@pytest.mark.parametrize("trouble", ["down", "503", "429", "403", "hangs up"])
async def test_trouble_delays_an_alert_and_nothing_else(
    dsn, outbox: Outbox, table: Table, sentry: Receiver, logged, trouble: str
):
    """FAULTS 35: still owed, under the same id, until Sentry says success. Work goes on meanwhile."""
    match trouble:
        case "down":
            sentry.down()
        case "hangs up":
            sentry.hangs_up = True
        case "429":
            sentry.status, sentry.headers = 429, {"Retry-After": "0.3"}
        case _:
            sentry.status = int(trouble)
    async with dispatching(outbox, dsn):
        event_id = await table.enqueue(outbox, "dies", {})

        async def said() -> bool:
            return "outbox.alert_failed" in names(logged)

        await wait_until_async(said)
        await table.enqueue_many(outbox, [NewEvent("works", {}) for _ in range(500)])
        await table.until("status = 'COMPLETED'", 500)
        stamped = await table.row(event_id)
        assert (stamped.alert_id is not None, stamped.alerted_at) == (True, None)
        assert sentry.events == []
        sentry.status, sentry.headers, sentry.hangs_up = 200, {}, False
        if trouble == "down":
            sentry.up()
        await paid(table, 1)

    assert {UUID(event["event_id"]) for event in sentry.events} == {stamped.alert_id}
    assert {UUID(request.event["event_id"]) for request in sentry.requests} == {stamped.alert_id}
    assert names(logged).count("outbox.alert_failed") == 1, "said once"
    assert "outbox.alert_recovered" in names(logged)
    assert "outbox.loop_failed" not in names(logged)


async def test_what_died_while_sentry_was_down_is_one_alert(
    dsn, outbox: Outbox, table: Table, sentry: Receiver, monkeypatch
):
    """An hour without Sentry is not an alert for each minute of it: deaths get their id when they can be sent."""
    sentry.down()
    async with dispatching(outbox, dsn):
        for number in range(1, 31):
            await table.enqueue(outbox, "dies", {})
            await table.until("status = 'DEAD_LETTERED'", number)
        sentry.up()
        await paid(table, 30)

    assert sum(event["contexts"]["dead_letter"]["count"] for event in sentry.events) == 30
    assert len(sentry.events) < 15


async def test_retry_after_is_kept(dsn, outbox: Outbox, table: Table, sentry: Receiver):
    """No request before the time that Sentry asked for, though another kind is owed and more die."""
    sentry.status, sentry.headers = 429, {"Retry-After": "1"}
    await table.enqueue_many(outbox, [NewEvent("dies", {"kind": kind}) for kind in ("value", "key")])
    async with dispatching(outbox, dsn):
        await wait_until_async(lambda: asyncio.sleep(0, len(sentry.requests)))
        await table.enqueue(outbox, "dies", {})
        await table.until("status = 'DEAD_LETTERED'", 3)
        sentry.status = 200
        await paid(table, 3)

    first, second, *_ = sentry.requests
    assert second.at - first.at >= 1


async def test_a_limit_beside_a_success_is_kept(dsn, outbox: Outbox, table: Table, sentry: Receiver):
    sentry.headers = {"X-Sentry-Rate-Limits": "1:error;transaction:organization, 2700:security:project"}
    async with dispatching(outbox, dsn):
        await table.enqueue(outbox, "dies", {})
        await paid(table, 1)
        await table.enqueue(outbox, "dies", {"kind": "key"})
        await paid(table, 2)

    first, second = sentry.requests
    assert second.at - first.at >= 1


async def test_slow_sentry_slows_nothing(dsn, outbox: Outbox, table: Table, sentry: Receiver):
    """A thousand jobs are done while one alert is under way, and that is not given up too early."""
    sentry.answering.clear()
    async with dispatching(outbox, dsn):
        event_id = await table.enqueue(outbox, "dies", {})
        await wait_until_async(lambda: asyncio.sleep(0, len(sentry.requests)))
        await table.enqueue_many(outbox, [NewEvent("works", {}) for _ in range(1000)])
        await table.until("status = 'COMPLETED'", 1000)
        done_at = time.monotonic()
        assert (await table.row(event_id)).alerted_at is None
        sentry.answering.set()
        await paid(table, 1)

    [request] = sentry.requests
    assert done_at - request.at < sending.SEND_TIMEOUT


async def test_a_sentry_that_never_answers_is_given_up(
    dsn, outbox: Outbox, table: Table, sentry: Receiver, monkeypatch
):
    monkeypatch.setattr(sending, "SEND_TIMEOUT", 0.3)
    sentry.answering.clear()
    async with dispatching(outbox, dsn):
        await table.enqueue(outbox, "dies", {})
        await wait_until_async(lambda: asyncio.sleep(0, len(sentry.requests) > 1))
        sentry.answering.set()
        await paid(table, 1)

    assert len({request.event["event_id"] for request in sentry.requests}) == 1


async def test_an_alert_that_sentry_refuses_is_logged_and_paid(
    dsn, outbox: Outbox, table: Table, sentry: Receiver, logged
):
    """It would be refused for ever; the line says all that the alert would have said."""
    sentry.status = 400
    async with dispatching(outbox, dsn):
        event_id = await table.enqueue(outbox, "dies", {})
        await paid(table, 1)

    [line] = [line for line in logged if line["event"] == "outbox.alert_refused"]
    assert (line["event_id"], line["why"], line["log_level"]) == (str(event_id), "status 400", "error")
    assert line["error"] == "TerminalHandlerError: no"
    assert len(sentry.requests) == 1


async def test_replay_cancels_what_is_owed(dsn, outbox: Outbox, table: Table, sentry: Receiver):
    """Who replays or discards knows of it already."""
    sentry.down()
    async with dispatching(outbox, dsn):
        cancelled = [await table.enqueue(outbox, "dies", {}) for _ in range(2)]
        await table.until("alert_id is not null", 2)
    await table.execute("select pulse.outbox_replay(%s, 0, 'ada')", cancelled[0])
    await table.execute("select pulse.outbox_discard(%s, 'never', 'ada')", cancelled[1])
    await table.execute(
        "update pulse.outbox set status = 'COMPLETED', completed_at = now() where status = 'PENDING'"
    )
    sentry.up()
    async with dispatching(outbox, dsn):
        other = await table.enqueue(outbox, "dies", {"kind": "key"})
        await paid(table, 1)

    [event] = sentry.events
    assert event["contexts"]["dead_letter"]["event_id"] == str(other)


async def test_killed_between_the_death_and_the_stamp(
    dsn, outbox: Outbox, table: Table, sentry: Receiver, connect
):
    """FAULTS 3: the death is committed, nobody has alerted it, and the process is gone."""
    holder = connect()
    holder.execute(ALERT_LOCK)
    with working(dsn) as worker:
        event_id = await table.enqueue(outbox, "exits in a task", {})
        row = await table.until_status(event_id, "DEAD_LETTERED")
        worker.process.kill()
        worker.process.wait()
    holder.rollback()
    assert (row.alert_id, sentry.requests) == (None, [])
    async with dispatching(outbox, dsn):
        [event] = await arrived(sentry)
        await paid(table, 1)

    assert event["contexts"]["dead_letter"]["event_id"] == str(event_id)


async def test_killed_while_sending(dsn, outbox: Outbox, table: Table, sentry: Receiver):
    """Sentry may have it or not: it is sent again under the same id, and Sentry keeps one."""
    sentry.answering.clear()
    with working(dsn) as worker:
        event_id = await table.enqueue(outbox, "exits in a task", {})
        await wait_until_async(lambda: asyncio.sleep(0, len(sentry.requests)))
        worker.process.kill()
        worker.process.wait()
    row = await table.row(event_id)
    assert (row.alert_id is not None, row.alerted_at) == (True, None)
    sentry.answering.set()
    async with dispatching(outbox, dsn):
        [event] = await arrived(sentry)
        await paid(table, 1)

    assert UUID(event["event_id"]) == row.alert_id
    assert [UUID(request.event["event_id"]) for request in sentry.requests] == [row.alert_id] * 2


async def test_a_burst_alerts_before_it_ends(dsn, outbox: Outbox, table: Table, sentry: Receiver):
    """Started by cron, it may be the only dispatcher there is until tomorrow."""
    from tests.support.dispatching import drain

    await table.enqueue(outbox, "dies", {})
    await drain(outbox, dsn)

    assert len(sentry.events) == 1
    await paid(table, 1)


async def test_a_database_that_is_away_while_an_alert_is_sent(
    dsn, outbox: Outbox, table: Table, sentry: Receiver
):
    """The payment is offered until the database takes it, and the alert is not sent again meanwhile."""
    await table.execute(
        """create function public.refuse() returns trigger language plpgsql as $$
           begin
             if new.alerted_at is not null then
               raise exception 'on purpose' using errcode = '53100';
             end if;
             return new;
           end $$;
           create trigger refuse before update on pulse.outbox for each row execute function public.refuse()"""
    )
    async with dispatching(outbox, dsn) as dispatcher:
        await table.enqueue(outbox, "dies", {})
        await arrived(sentry)

        async def complains() -> bool:
            return "alerts" in dispatcher._condition.complaints

        await wait_until_async(complains)
        await table.execute("drop trigger refuse on pulse.outbox")
        await paid(table, 1)

    assert len(sentry.requests) == 1
