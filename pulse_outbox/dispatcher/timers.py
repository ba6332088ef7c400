"""Timers that end when they should, and not up to a millisecond later."""

from __future__ import annotations

import asyncio
import select
import selectors
from collections.abc import Callable
from typing import Any

NEAR = 0.01
"""For a timer that ends sooner than this, in seconds, a millisecond counts."""
FD_SETSIZE = 1024
"""select(2) can look at descriptors below this."""
_Ready = list[tuple[selectors.SelectorKey, int]]
# gevent takes it away.
_EPOLL = getattr(selectors, "EpollSelector", None)


def make_exact(loop: asyncio.AbstractEventLoop) -> None:
    """Lets the loop wait for microseconds, if it is asyncio's own and waits with epoll.

    epoll takes whole milliseconds, so asyncio rounds up; select(2) takes microseconds and can wait for an epoll. Of
    handlers that wait for ten milliseconds that is a tenth more in a second.
    """
    # asyncio shows it to nobody, and a loop of our own would not be the one that the application's policy makes.
    selector: Any = getattr(loop, "_selector", None)
    if _EPOLL is None or type(selector) is not _EPOLL or selector.fileno() >= FD_SETSIZE:
        return
    epoll_select: Callable[[float | None], _Ready] = selector.select

    def exact_select(timeout: float | None = None) -> _Ready:
        if timeout is not None and 0 < timeout < NEAR:
            select.select([selector], [], [], timeout)
            timeout = 0
        return epoll_select(timeout)

    selector.select = exact_select
