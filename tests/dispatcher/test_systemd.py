"""A service manager hears when the dispatcher is ready, that it lives, and that it stops."""

from __future__ import annotations

import socket

from pulse_outbox import Event, Outbox
from pulse_outbox.dispatcher import systemd
from tests.support.dispatching import dispatching


async def test_systemd_is_told(dsn, outbox: Outbox, tmp_path, monkeypatch):
    """Type=notify: started means ready to work, and a watchdog sees a loop that is blocked for good."""
    outbox.handler("job")(_does_nothing)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        async with dispatching(outbox, dsn) as dispatcher:
            heard = {b""}
            while not any(said.startswith(b"READY=1") for said in heard) or b"WATCHDOG=1" not in heard:
                heard.add(await _next(listener))
            dispatcher.stop()
            while b"STOPPING=1" not in heard:
                heard.add(await _next(listener))


def test_without_systemd_nothing_is_told(monkeypatch):
    """A socket that is not there, or that nobody reads, is no reason to fail."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    systemd.tell("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    systemd.tell("READY=1")

    assert systemd.watchdog_interval() is None


async def _next(listener: socket.socket) -> bytes:
    import asyncio

    return await asyncio.to_thread(listener.recv, 1000)


async def _does_nothing(event: Event) -> None:
    return None
