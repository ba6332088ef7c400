"""An event loop for tests that have none: in a thread of its own, while sync handlers run in the test's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class TestThread(Executor):
    """Runs what it is given in the thread that waits for the loop: the test's.

    There a sync handler finds what belongs to that thread: Django's connection, a debugger's terminal.
    """

    __test__ = False

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """To be called by the waiting thread."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*arguments, **named)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._work.put(call)
        return future

    def wait_for(self, future: Future[T]) -> T:
        """Does the work until the future is done."""
        future.add_done_callback(lambda _: self._work.put(None))
        try:
            while (call := self._work.get()) is not None:
                call()
        except BaseException:
            future.cancel()  # Ctrl-C in the test
            raise
        return future.result()


class Loop:
    """One event loop, started when it is first needed. Tests of a run share it, and so may what they keep open."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, make: Callable[[TestThread], Coroutine[Any, Any, T]]) -> T:
        """Runs the coroutine that *make* returns to its end; sync handlers may use the given executor."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="pulse-outbox-testkit", daemon=True
            )
            self._thread.start()
        here = TestThread()
        return here.wait_for(asyncio.run_coroutine_threadsafe(make(here), self._loop))

    def close(self) -> None:
        """Ends the loop, if there is one."""
        if self._loop is None or self._thread is None:
            return
        ending = asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None
