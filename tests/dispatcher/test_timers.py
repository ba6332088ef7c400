"""The event loop that a dispatcher makes where it has the process for itself."""

from __future__ import annotations

import asyncio
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
    print(type(asyncio.get_running_loop()._selector).__name__)

Dispatcher(outbox, dsn=sys.argv[1], burst=True).run()
"""


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
    assert MILLISECOND / 10 <= shortest_wait(timers.new_event_loop()) < MILLISECOND


def test_asyncios_own_loop_makes_it_a_millisecond():
    """The control: when this fails, timers.py is not needed any more."""
    assert shortest_wait(asyncio.SelectorEventLoop()) >= MILLISECOND


def test_a_descriptor_that_select_cannot_look_at_is_left_to_epoll(monkeypatch):
    monkeypatch.setattr(timers, "FD_SETSIZE", 0)

    assert shortest_wait(timers.new_event_loop()) >= MILLISECOND


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
    with one, other, asyncio.Runner(loop_factory=timers.new_event_loop) as runner:
        assert runner.run(first_byte(one, other)) == b"x"


def test_a_loop_that_the_application_chose_stays(monkeypatch):
    class Chosen(asyncio.SelectorEventLoop):
        pass

    monkeypatch.setattr(asyncio, "new_event_loop", Chosen)

    loop = timers.new_event_loop()
    loop.close()

    assert type(loop) is Chosen


def test_a_dispatcher_of_its_own_process_runs_handlers_in_it(dsn, conn):
    conn.execute("select pulse.outbox_enqueue('job', '{}')")
    conn.commit()

    done = subprocess.run(
        [sys.executable, "-c", APPLICATION, dsn], capture_output=True, text=True, timeout=30, check=True
    )

    assert "_ExactSelector" in done.stdout.splitlines()
