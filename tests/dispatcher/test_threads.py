"""Threads for plain functions: what they promise to the slots, whatever the functions do."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from pulse_outbox.dispatcher.threads import Threads
from tests.support.waiting import wait_until

PATIENCE = 10


class Payload:
    """Something that can be referred to weakly."""


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(2)
    yield threads
    threads.close()


def handler_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pulse-outbox-handler")]


async def test_a_function_is_called_in_a_thread_of_its_own(threads: Threads):
    name = await threads.call(lambda: threading.current_thread().name).answer

    assert name.startswith("pulse-outbox-handler")


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
async def test_what_a_function_raises_is_its_answer_and_its_thread_lives_on(threads: Threads, error: type):
    def fail() -> None:
        raise error("no")

    with pytest.raises(error):
        await threads.call(fail).answer

    assert await threads.call(lambda: 7).answer == 7
    assert len(handler_threads()) == 1


async def test_no_more_are_called_at_once_than_there_are_threads(threads: Threads):
    """And no fewer: a function that waits holds up no other while a thread is to be had."""
    both, go = threading.Barrier(3), threading.Event()

    def wait() -> None:
        both.wait(PATIENCE)
        go.wait(PATIENCE)

    first, second = threads.call(wait), threads.call(wait)
    third = threads.call(lambda: "third")
    await asyncio.to_thread(both.wait, PATIENCE)  # both are at it

    assert not third.answer.done()
    go.set()
    await asyncio.gather(first.answer, second.answer)
    assert await third.answer == "third"


async def test_the_loop_is_woken_once_for_all_that_has_ended(threads: Threads, monkeypatch):
    """A wake-up for each result would cost more than everything else."""
    loop, woken = asyncio.get_running_loop(), []
    real = loop.call_soon_threadsafe

    def counted(*arguments: Any, **named: Any) -> Any:
        woken.append(arguments)
        return real(*arguments, **named)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    calls = [threads.call(int) for _ in range(500)]
    wait_until(lambda: len(threads._ended) == 500)  # this blocks the loop: nobody has looked yet

    assert len(woken) == 1
    assert await asyncio.gather(*[call.answer for call in calls]) == [0] * 500


async def test_a_call_that_is_withdrawn_before_it_begins_is_never_made(threads: Threads):
    go = threading.Event()
    called: list[int] = []
    busy = [threads.call(go.wait, PATIENCE) for _ in range(2)]
    waiting = threads.call(called.append, 1)

    assert waiting.withdraw()
    assert waiting.withdraw()  # no thread has got at it since
    go.set()
    await asyncio.gather(*[call.answer for call in busy])
    assert await threads.call(lambda: "after it").answer == "after it"
    assert called == []


async def test_a_call_that_a_thread_is_at_can_not_be_withdrawn(threads: Threads):
    """The process must know that somebody is still inside a handler."""
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(PATIENCE)

    call = threads.call(work)
    await asyncio.to_thread(begun.wait, PATIENCE)
    assert not call.withdraw()
    go.set()
    await call.answer

    assert call.withdraw()


async def test_closed_it_calls_nothing_more_and_its_threads_end(threads: Threads):
    all_begun, go = threading.Barrier(3), threading.Event()
    called: list[int] = []

    def work() -> None:
        all_begun.wait(PATIENCE)
        go.wait(PATIENCE)

    busy = [threads.call(work) for _ in range(2)]
    waiting = threads.call(called.append, 1)
    await asyncio.to_thread(all_begun.wait, PATIENCE)
    threads.close()

    assert waiting.answer.cancelled()
    go.set()
    await asyncio.gather(*[call.answer for call in busy])
    await asyncio.to_thread(wait_until, lambda: handler_threads() == [])
    assert called == []


def test_a_thread_that_outlives_its_loop_ends_without_a_word(capfd):
    """A handler that could not be stopped, in an application that goes on without its dispatcher."""
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(PATIENCE)

    async def leave_behind() -> None:
        threads = Threads(1)
        threads.call(work)
        await asyncio.to_thread(begun.wait, PATIENCE)
        threads.close()

    asyncio.run(leave_behind())
    go.set()
    wait_until(lambda: handler_threads() == [])

    assert capfd.readouterr() == ("", "")


async def test_threads_that_the_system_does_not_give_are_done_without(threads: Threads, monkeypatch):
    """They come and go, as the limits of a container are reached and left; what is counted must be there."""
    real = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        threads.call(int)
    monkeypatch.setattr(threading.Thread, "start", real)
    go = threading.Event()
    first = threads.call(go.wait, PATIENCE)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    second = threads.call(int)
    go.set()

    assert [await first.answer, await second.answer] == [True, 0]


async def test_closed_or_in_another_loop_it_takes_no_calls(threads: Threads):
    """Nobody would answer them."""
    await threads.call(int).answer

    async def elsewhere() -> None:
        threads.call(int)

    with pytest.raises(RuntimeError):
        await asyncio.to_thread(asyncio.run, elsewhere())
    threads.close()
    with pytest.raises(RuntimeError):
        threads.call(int)


PROGRAM = """
import asyncio, threading, time
from pulse_outbox.dispatcher.threads import Threads

begun = threading.Event()

def work():
    begun.set()
    time.sleep(0.5)
    print("ended")

async def main():
    threads = Threads(3)
    await asyncio.gather(threads.call(int).answer, threads.call(int).answer)
    threads.call(work)
    while not begun.is_set():
        await asyncio.sleep(0.01)
    {end}

{run}
"""
RUNS = {
    "the loop is closed": "asyncio.run(main())",
    "the loop is left open": "asyncio.new_event_loop().run_until_complete(main())",
    "in a daemon thread": "threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start(); begun.wait()",
}


@pytest.mark.parametrize("end", ["pass", "threads.close()"], ids=["left", "closed"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_program_that_ends_waits_for_the_function_and_not_for_idle_threads(run: str, end: str):
    """Else it would never end, and its heart would go on keeping leases."""
    program = PROGRAM.format(run=run, end=end)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)

    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


@pytest.mark.parametrize("fails", [False, True])
async def test_nothing_of_a_call_stays_in_memory(threads: Threads, fails: bool):
    """Not in an idle thread, and not until a garbage collector comes by."""

    def work(payload: Payload) -> None:
        if fails:
            raise ValueError(payload)

    payload = Payload()
    seen = weakref.ref(payload)
    gc.disable()
    try:
        call = threads.call(work, payload)
        await asyncio.wait([call.answer])
        call.answer.exception()
        del call, payload

        assert seen() is None
    finally:
        gc.enable()
