"""Waiting on a condition with a deadline: what tests do instead of sleeping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], *, within: float = 10, what: str = "") -> T:
    """The condition's first true value; an AssertionError that names it after *within* seconds."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within} s: {what or condition}"
        time.sleep(0.01)
    return value


async def wait_until_async(condition: Callable[[], Awaitable[T]], *, within: float = 10, what: str = "") -> T:
    deadline = time.monotonic() + within
    while not (value := await condition()):
        assert time.monotonic() < deadline, f"not within {within} s: {what or condition}"
        await asyncio.sleep(0.01)
    return value
