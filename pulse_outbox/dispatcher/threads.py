"""Threads for handlers that are plain functions.

`concurrent.futures` would do, at more than twice the price: a lock and a condition for each call, and a wake-up of the
event loop for each result. Here the loop is woken once for all results that have gathered.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor


class Call(Protocol):
    """A call that some thread makes."""

    @property
    def answer(self) -> asyncio.Future[Any]:
        """What the function returns or raises."""

    def withdraw(self) -> bool:
        """Nobody waits for it any more. False: a thread is at it, and nothing can stop a thread."""


class Threads:
    """Calls functions in threads of its own, up to *most* at once, started as they are needed. For one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._started: list[threading.Thread] = []
        self._unanswered = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: SimpleQueue[_ThreadCall | None] = SimpleQueue()
        self._ended: deque[_ThreadCall] = deque()
        self._is_told = False
        """The loop has been told to look at what has ended, and has not yet."""
        self._is_closed = False

    def call(self, function: Callable[..., Any], *arguments: Any) -> Call:
        """Has the function called as soon as a thread is free."""
        loop = asyncio.get_running_loop()
        if self._is_closed or self._loop not in (None, loop):
            raise RuntimeError("these threads are closed, or belong to another event loop")
        self._loop = loop
        if len(self._started) < min(self._unanswered + 1, self._most):
            self._start_another()
        call = _ThreadCall(function, arguments, loop.create_future())
        self._unanswered += 1
        self._calls.put(call)
        return call

    def close(self) -> None:
        """Lets the threads go: what has not begun is not called any more, and one that is stuck is not waited for."""
        self._is_closed = True
        with contextlib.suppress(Empty):
            while True:
                if call := self._calls.get_nowait():
                    call.withdraw()
                    call.answer.cancel()
        self._let_go()

    def _start_another(self) -> None:
        # A daemon: for others Python waits before it asks anybody to let them go. So finish_all waits for these.
        thread = threading.Thread(
            target=self._work, name=f"pulse-outbox-handler-{len(self._started) + 1}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            if not self._started:
                raise  # the system has no more of them: without any, nobody would ever make the call
            return
        _in_use.add(self)
        self._started.append(thread)

    def finish(self) -> None:
        """Lets the threads go, each when the call that it is at is over, and waits for that."""
        self._let_go()
        for thread in self._started:
            thread.join()

    def _let_go(self) -> None:
        for _ in self._started:
            self._calls.put(None)

    def _work(self) -> None:
        while call := self._calls.get():
            if call.begin():
                call.make()
            self._ended.append(call)
            del call  # else an idle thread would keep the last event alive
            if not self._is_told:
                self._is_told = True
                assert self._loop is not None
                try:
                    self._loop.call_soon_threadsafe(self._answer)
                except RuntimeError:
                    return  # the loop is closed: nobody waits any more

    def _answer(self) -> None:
        self._is_told = False  # before looking: whoever ends later tells again
        while self._ended:
            self._unanswered -= 1
            self._ended.popleft().give()


_in_use: WeakSet[Threads] = WeakSet()


@atexit.register
def finish_all() -> None:
    """Python ends, and somebody may still be inside a handler: as with concurrent.futures, it comes to its end."""
    for threads in list(_in_use):
        threads.finish()


class _ThreadCall:
    __slots__ = ("_arguments", "_error", "_function", "_undecided", "_value", "answer", "is_idle")

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._value: Any = None
        self._error: BaseException | None = None
        self._undecided = [None]
        self.answer = answer
        self.is_idle = False
        """It is over, or was withdrawn before it began."""

    def begin(self) -> bool:
        """False: it was withdrawn before."""
        # A thread and the event loop may both want to decide: taking the one item is one step for either.
        try:
            self._undecided.pop()
        except IndexError:
            return False
        return True

    def withdraw(self) -> bool:
        if self.begin():
            self.is_idle = True
        return self.is_idle

    def make(self) -> None:
        try:
            self._value = self._function(*self._arguments)
            self.is_idle = True
        except BaseException as error:
            self._error = error
            self.is_idle = True
            del self  # the error's traceback holds this frame, which must not hold the error in turn

    def give(self) -> None:
        if self.answer.done():
            return
        if self._error is not None:
            self.answer.set_exception(self._error)
        else:
            self.answer.set_result(self._value)


class InExecutor:
    """The same by an executor of somebody else's."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def call(self, function: Callable[..., Any], *arguments: Any) -> Call:
        """Has the function called."""
        return _ExecutorCall(self._executor, function, arguments)

    def close(self) -> None:
        """It isn't ours."""


class _ExecutorCall:
    def __init__(self, executor: Executor, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._work = executor.submit(function, *arguments)
        self.answer = asyncio.wrap_future(self._work)

    def withdraw(self) -> bool:
        return self._work.cancel() or self._work.done()
