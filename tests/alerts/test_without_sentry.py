"""Without Sentry: the application's hook pays, or the log line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pulse_outbox import DeadLetter, Outbox
from pulse_outbox.alerts import errands, paying
from tests.alerts.conftest import with_handlers
from tests.support.dispatching import Table, dispatching
from tests.support.sentry_receiver import Receiver
from tests.support.waiting import wait_until_async

Hook = Callable[[DeadLetter], Any]


def lines(logged: list[Any], event: str) -> list[Any]:
    return [line for line in logged if line["event"] == event]


async def test_the_log_line_pays(dsn, outbox: Outbox, table: Table, logged):
    async with dispatching(outbox, dsn):
        event_id = await table.enqueue(outbox, "dies", {}, source="shop")
        await table.until("alerted_at is not null", 1)

    [line] = lines(logged, "outbox.alert")
    row = await table.row(event_id)
    assert (line["log_level"], line["alert_id"], line["event_id"]) == (
        "error",
        str(row.alert_id),
        str(event_id),
    )
    assert (line["topic"], line["source"], line["count"], line["error"]) == (
        "dies",
        "shop",
        1,
        "TerminalHandlerError: no",
    )
    assert line["runbook"] == "runbooks/a-job-died.md"


def as_function(calls: list[DeadLetter]) -> Hook:
    return calls.append


def as_coroutine(calls: list[DeadLetter]) -> Hook:
    async def hook(letter: DeadLetter) -> None:
        await asyncio.sleep(0)
        calls.append(letter)

    return hook


def as_object(calls: list[DeadLetter]) -> Hook:
    class Hook:
        async def __call__(self, letter: DeadLetter) -> None:
            calls.append(letter)

    return Hook()


def as_function_of_a_coroutine(calls: list[DeadLetter]) -> Hook:
    return lambda letter: as_coroutine(calls)(letter)  # noqa: PLW0108  so that it is no coroutine function


@pytest.mark.parametrize("kind", [as_function, as_coroutine, as_object, as_function_of_a_coroutine])
async def test_the_hook_pays(dsn, table: Table, logged, kind: Callable[[list[DeadLetter]], Hook]):
    calls: list[DeadLetter] = []
    outbox = with_handlers(Outbox(on_dead_letter=kind(calls)))
    async with dispatching(outbox, dsn):
        event_id = await table.enqueue(outbox, "dies", {}, target="post")
        await table.until("alerted_at is not null", 1)

    [letter] = calls
    row = await table.row(event_id)
    assert (letter.alert_id, letter.event_id, letter.count) == (row.alert_id, event_id, 1)
    assert (letter.topic, letter.target, letter.last_error) == ("dies", "post", "TerminalHandlerError: no")
    assert letter.dead_lettered_at == row.completed_at
    assert lines(logged, "outbox.alert") == [], "the hook is the alert"
    assert [line["told_by"] for line in lines(logged, "outbox.alerted")] == [["hook"]]


@pytest.mark.parametrize("with_sentry", [True, False])
@pytest.mark.parametrize(
    "error", [ValueError("card 4111"), SystemExit(3), asyncio.CancelledError(), StopIteration()]
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_hook_that_fails_is_called_again_a_few_times(
    dsn, table: Table, logged, receiver: Receiver, monkeypatch, with_sentry, error, is_async
):
    """Never for ever, and never at the cost of dispatch; in the end the line about it is the alert."""
    if with_sentry:
        monkeypatch.setenv("SENTRY_DSN", receiver.dsn)
    monkeypatch.setattr(paying, "HOOK_TRIES", 2)
    calls: list[DeadLetter] = []

    def hook(letter: DeadLetter) -> None:
        calls.append(letter)
        raise error

    async def async_hook(letter: DeadLetter) -> None:
        hook(letter)

    outbox = with_handlers(
        Outbox(on_dead_letter=async_hook if is_async else hook, redact=lambda text: text.replace("4111", "…"))
    )
    async with dispatching(outbox, dsn):
        await table.enqueue(outbox, "dies", {})
        await table.until("alerted_at is not null", 1)
        await table.enqueue(outbox, "works", {})
        await table.until("status = 'COMPLETED'", 1)

    assert len({letter.alert_id for letter in calls}) == 1
    failed = lines(logged, "outbox.hook_failed")
    assert [(line["tries"], line["gave_up"]) for line in failed] == [(1, False), (2, True)]
    assert failed[1]["error"] == "TerminalHandlerError: no"
    assert "4111" not in str(logged)
    assert len(receiver.requests) == with_sentry, "Sentry has it, and is not told again for the hook's sake"
    assert lines(logged, "outbox.loop_failed") == []


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_hook_that_hangs_holds_up_nothing(dsn, table: Table, logged, monkeypatch, is_async):
    monkeypatch.setattr(paying, "HOOK_TRIES", 2)
    monkeypatch.setattr(errands, "CALL_DEADLINE", 0.3)
    end = threading.Event()

    def hook(letter: DeadLetter) -> None:
        end.wait(30)

    async def async_hook(letter: DeadLetter) -> None:
        while not end.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue  # as some libraries do

    outbox = with_handlers(Outbox(on_dead_letter=async_hook if is_async else hook))
    try:
        async with dispatching(outbox, dsn):
            await table.enqueue(outbox, "dies", {})
            await table.until("alerted_at is not null", 1)
            await table.enqueue(outbox, "works", {})
            await table.until("status = 'COMPLETED'", 1)
    finally:
        end.set()

    assert [line["gave_up"] for line in lines(logged, "outbox.hook_failed")] == [False, True]


async def test_hook_and_sentry_both_know(dsn, table: Table, sentry: Receiver):
    """The hook is called when Sentry has it, so that it isn't called again while Sentry is down."""
    calls: list[DeadLetter] = []
    outbox = with_handlers(Outbox(on_dead_letter=calls.append))
    sentry.status = 503
    async with dispatching(outbox, dsn):
        await table.enqueue(outbox, "dies", {})
        await table.until("alert_id is not null", 1)
        await wait_until_async(lambda: asyncio.sleep(0, len(sentry.requests) >= 2))
        assert calls == []
        sentry.status = 200
        await table.until("alerted_at is not null", 1)

    assert [letter.alert_id.hex for letter in calls] == [event["event_id"] for event in sentry.events]
