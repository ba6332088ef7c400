"""What a service manager is told: ready, alive, stopping. Without systemd's socket in the environment, nothing."""

from __future__ import annotations

import contextlib
import os
import socket


def tell(state: str) -> None:
    """Sends one state, such as READY=1, to systemd (`Type=notify`). Never fails: nobody may be listening."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address)


def watchdog_interval() -> float | None:
    """How often systemd wants to hear that the process is alive, in seconds: half of what it allows; None: never."""
    allowed = os.environ.get("WATCHDOG_USEC", "")
    if not allowed.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(allowed) / 2_000_000
