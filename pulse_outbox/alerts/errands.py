"""Calls of strangers, the Sentry SDK's and the application's, that may block or hang and must keep nobody waiting."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

CALL_DEADLINE = 12.0
"""After so many seconds a call counts as failed, whatever still becomes of it."""


class Errand:
    """Calls that may block, one at a time, in a thread that keeps neither the loop nor the process's end waiting."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = False

    async def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """What the function returns or raises, or TimeoutError; then the thread is left to itself."""
        if self._busy:
            raise TimeoutError("the last call has not ended yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def take(result: tuple[Any, BaseException | None]) -> None:
            self._busy = False
            if not answer.done():
                answer.set_result(result)

        def work() -> None:
            result: tuple[Any, BaseException | None]
            try:
                result = (function(*arguments), None)
            except BaseException as error:
                result = (None, error)
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(take, result)

        self._busy = True
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(work,), name=f"pulse-outbox-{self._name}", daemon=True
        ).start()
        async with asyncio.timeout(CALL_DEADLINE):
            value, error = await answer
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(type(error).__name__) from error
        return value


async def awaited(awaitable: Awaitable[object]) -> None:
    """Awaits what an application gave us; what ignores its cancellation is left behind."""

    async def guarded() -> None:
        try:
            await awaitable
        except (SystemExit, KeyboardInterrupt) as error:
            # Out of a task these would end the event loop.
            raise RuntimeError(f"the hook raised {type(error).__name__}") from error

    task = asyncio.ensure_future(guarded())
    try:
        done, _ = await asyncio.wait({task}, timeout=CALL_DEADLINE)
    finally:
        if not task.done():
            task.cancel()
    if not done:
        raise TimeoutError(f"no answer within {CALL_DEADLINE:g} s")
    if task.cancelled():
        raise RuntimeError("the hook was cancelled")
    task.result()
