"""Threads for handlers that are plain functions.

`concurrent.futures` would do, at more than twice the price: a lock and a condition for each call, and a wake-up of the
event loop for each result. Here the loop is woken once for all results that have gathered.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

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
        self._started = 0
        self._unanswered = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: SimpleQueue[_ThreadCall | None] = SimpleQueue()
        self._ended: deque[_ThreadCall] = deque()
        self._is_told = False
        """The loop has been told to look at what has ended, and has not yet."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Call:
        """Has the function called as soon as a thread is free."""
        self._loop = asyncio.get_running_loop()
        call = _ThreadCall(function, arguments, self._loop.create_future())
        self._unanswered += 1
        if self._started < min(self._unanswered, self._most):
            self._started += 1
            threading.Thread(target=self._work, name=f"pulse-outbox-handler-{self._started}").start()
        self._calls.put(call)
        return call

    def close(self) -> None:
        """Lets the threads go: what has not begun is not called any more, and one that is stuck is not waited for."""
        while not self._calls.empty():
            if call := self._calls.get():
                call.withdraw()
                call.answer.cancel()
        for _ in range(self._started):
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


class _ThreadCall:
    __slots__ = ("_arguments", "_error", "_function", "_undecided", "_value", "answer", "is_over")

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        self._function = function
        self._arguments = arguments
        self._value: Any = None
        self._error: BaseException | None = None
        self._undecided = [None]
        self.answer = answer
        self.is_over = False

    def begin(self) -> bool:
        """False: it was withdrawn before."""
        # A thread and the event loop may both want to decide: taking the one item is one step for either.
        try:
            self._undecided.pop()
        except IndexError:
            return False
        return True

    def withdraw(self) -> bool:
        return self.begin() or self.is_over

    def make(self) -> None:
        try:
            self._value = self._function(*self._arguments)
            self.is_over = True
        except BaseException as error:
            self._error = error
            self.is_over = True
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
