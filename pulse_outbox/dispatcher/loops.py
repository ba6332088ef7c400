"""Loops that never exit: whatever goes wrong in one is said once, and after a pause it goes on."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pulse_outbox.failures import describe_error
from pulse_outbox.log import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pulse_outbox.dispatcher.state import Condition

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
GOOD_RUN = 5.0
"""After having gone well for so long, in seconds, an error is the first one again."""


async def keep_going(
    subject: str, loop: Callable[[], Awaitable[None]], condition: Condition, *, pause: float = FIRST_PAUSE
) -> None:
    """Runs *loop*, which never returns by itself, again and again after its errors."""
    first_pause = pause
    while True:
        started = time.monotonic()
        try:
            await loop()
        except Exception as error:
            text = describe_error(error)
            if condition.complain(subject, f"{subject}: {text}"):
                log.warning("outbox.loop_failed", loop=subject, error=text)
        if time.monotonic() - started > GOOD_RUN:
            pause = first_pause
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE)
