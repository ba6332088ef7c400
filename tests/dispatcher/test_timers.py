"""The event loop of a dispatcher that has the process for itself."""

from __future__ import annotations

import asyncio
import selectors
import socket
import subprocess
import sys
import time

import pytest

from pulse_outbox.dispatcher import timers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loops are exact by themselves")

MILLISECOND = 0.001
APPLICATION = """
import asyncio, sys
from pulse_outbox import Dispatcher, Event, Outbox

outbox = Outbox()

@outbox.handler("job")
async def job(event: Event) -> None:
    loop = asyncio.get_running_loop()
    print("exact:", loop._selector.select.__name__ == "exact_select")
    print("current:", asyncio.get_event_loop_policy().get_event_loop() is loop)

Dispatcher(outbox, dsn=sys.argv[1], burst=True).run()
"""


def exact_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.SelectorEventLoop()
    timers.make_exact(loop)
    return loop


def shortest_wait(loop: asyncio.AbstractEventLoop) -> float:
    """Of a hundred waits for a tenth of a millisecond: all but one may be longer on a busy machine."""

    async def waits() -> list[float]:
        lengths = []
        for _ in range(100):
            began = time.perf_counter()
            await asyncio.sleep(MILLISECOND / 10)
            lengths.append(time.perf_counter() - began)
        return lengths

    try:
        return min(loop.run_until_complete(waits()))
    finally:
        loop.close()


def test_a_short_wait_is_not_made_a_millisecond_long():
    """Three hundred handlers that wait for ten milliseconds each are a tenth more jobs a second."""
    assert MILLISECOND / 10 <= shortest_wait(exact_loop()) < MILLISECOND


def test_asyncios_own_loop_makes_it_a_millisecond():
    """The control: when this fails, timers.py is not needed any more."""
    assert shortest_wait(asyncio.SelectorEventLoop()) >= MILLISECOND


def test_a_descriptor_that_select_cannot_look_at_is_left_to_epoll(monkeypatch):
    monkeypatch.setattr(timers, "FD_SETSIZE", 0)

    assert shortest_wait(exact_loop()) >= MILLISECOND


@pytest.mark.parametrize("timeout", [timers.NEAR / 2, 10.0])
def test_what_arrives_ends_a_wait_short_or_long(timeout):
    async def first_byte(one: socket.socket, other: socket.socket) -> bytes:
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        loop.add_reader(other, lambda: arrived.set_result(other.recv(1)))
        timer = loop.call_later(timeout, lambda: None)
        loop.call_soon(one.send, b"x")
        try:
            return await asyncio.wait_for(arrived, 5)
        finally:
            timer.cancel()
            loop.remove_reader(other)

    one, other = socket.socketpair()
    with one, other, asyncio.Runner(loop_factory=exact_loop) as runner:
        assert runner.run(first_byte(one, other)) == b"x"


def test_a_loop_that_waits_in_another_way_stays_as_it_is():
    """As an application chose it, by its policy."""
    loop = asyncio.SelectorEventLoop(selectors.PollSelector())
    timers.make_exact(loop)

    assert shortest_wait(loop) >= MILLISECOND


def test_without_epoll_it_can_be_imported():
    """gevent takes it away, also in a web process that names the dispatcher and never runs it."""
    script = "import selectors; del selectors.EpollSelector; from pulse_outbox import Dispatcher"

    subprocess.run([sys.executable, "-c", script], timeout=30, check=True)


def test_a_dispatcher_of_its_own_process_runs_handlers_in_it(dsn, conn):
    conn.execute("select pulse.outbox_enqueue('job', '{}')")
    conn.commit()

    done = subprocess.run(
        [sys.executable, "-c", APPLICATION, dsn], capture_output=True, text=True, timeout=30, check=True
    )

    assert {"exact: True", "current: True"} <= {*done.stdout.splitlines()}
