"""`pulse-outbox pause` and `resume`."""

from __future__ import annotations

import asyncio

from pulse_outbox import Event, NewEvent, Outbox
from tests.cli.conftest import HOSTILE
from tests.support.dispatching import Table, dispatching


def test_paused_topic_is_not_claimed_until_it_is_resumed(command, calls):
    mail, fax = calls.enqueue("mail"), calls.enqueue("fax")
    paused = command("pause", "mail", "--reason", "the server is down", "--by", "ada")

    assert (paused.code, paused.err) == (0, "")
    assert paused.out == "mail paused by ada: the server is down; pulse-outbox resume mail goes on\n"
    assert calls.claim(["mail", "fax"]).ids == [fax]
    assert command("resume", "mail", "--by", "ada").out == "mail resumed by ada\n"
    assert calls.claim(["mail", "fax"]).ids == [mail]


def test_pause_of_all_and_of_one_are_two(command, calls):
    command("pause", "--all", "--reason", "one", "--by", "ada")
    command("pause", "mail", "--reason", "two", "--by", "bob")
    one = command("resume", "mail")

    assert "all topics are still paused by ada (one): pulse-outbox resume --all" in one.err
    assert command("resume", "--all", "--json").json["resumed"] is True
    assert command("resume", "--all", "--json").json == {
        "topic": None,
        "resumed": False,
        "by": one.out.strip().rpartition("by ")[2],
        "pauses": [],
    }


def test_misspelt_topic_is_paused_with_a_warning(command, calls):
    """It may be one that is about to come, so it is no error."""
    calls.enqueue("mail")

    assert "is that its name?" in command("pause", "mial", "--reason", "why").err
    assert command("pause", "mail", "--reason", "why").err == ""


def test_pausing_speaks_json(command):
    result = command("pause", "mail", "--reason", "why", "--by", "ada", "--json")

    assert result.json == {"topic": "mail", "paused": True, "reason": "why", "by": "ada"}
    [pause] = command("status", "--json").json["pauses"]
    assert (pause["topic"], pause["reason"], pause["paused_by"]) == ("mail", "why", "ada")


def test_hostile_names_are_data(command, calls):
    calls.enqueue(HOSTILE)
    paused = command("pause", HOSTILE, "--reason", HOSTILE, "--by", HOSTILE)

    assert "\x1b" not in paused.out
    assert calls.claim(HOSTILE) == []
    assert "\x1b" not in command("resume", HOSTILE, "--by", HOSTILE).out
    assert len(calls.claim(HOSTILE)) == 1


def test_topic_that_is_too_long_is_refused_in_one_line(command):
    result = command("pause", "x" * 201, "--reason", "why")

    assert (result.code, result.err.count("\n")) == (1, 1)


async def test_running_dispatcher_obeys(command, dsn):
    """Durable, and seen by a dispatcher that was there before."""
    outbox, table = Outbox(), Table(dsn)

    @outbox.handler("mail")
    async def handle(event: Event) -> None:
        pass

    async with dispatching(outbox, dsn):
        first = await table.enqueue(outbox, "mail")
        await table.until_status(first, "COMPLETED")
        command("pause", "mail", "--reason", "why")
        second = await table.enqueue(outbox, "mail")
        third = await table.enqueue(outbox, "mail")
        command("dead", "discard", third, "--reason", "still there to be discarded")
        assert (await table.row(second)).status == "PENDING"
        command("resume", "mail")
        await table.until_status(second, "COMPLETED")
    assert (await table.row(third)).status == "DISCARDED"
    await table.close()


async def test_nobody_claims_after_the_commit(command, dsn):
    """Two busy dispatchers, from the moment at which the command has ended; another topic goes on as before."""
    outbox, table = Outbox(), Table(dsn)

    @outbox.handler("mail")
    async def mail(event: Event) -> None:
        await asyncio.sleep(0.02)

    @outbox.handler("fax")
    async def fax(event: Event) -> None:
        pass

    await table.enqueue_many(outbox, [NewEvent("mail", {}) for _ in range(2000)])
    quick = {"concurrency": 5}
    async with dispatching(outbox, dsn, worker="a", **quick), dispatching(outbox, dsn, worker="b", **quick):
        for worker in "ab":
            await table.until(f"exists (select from pulse.outbox r where r.locked_by = '{worker}')", 2000)
        await asyncio.to_thread(command, "pause", "mail", "--reason", "why")
        [(paused_at,)] = await table.execute("select clock_timestamp()")
        await table.until("status = 'RUNNING'", 0)
        for _ in range(10):
            await table.until_status(await table.enqueue(outbox, "fax"), "COMPLETED")

        assert await table.count("topic = 'mail' and claimed_at > %s", paused_at) == 0
        assert await table.count("topic = 'mail' and status in ('PENDING', 'RETRYING')") > 0
        assert await table.count("topic = 'fax' and claimed_at > %s", paused_at) == 10, "the control"
    await table.close()
