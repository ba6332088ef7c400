"""Named points in a dispatcher's life, at which it may be told to die or to stand still.

The product has no hooks for this: the methods through which every step goes are wrapped from outside. The rig writes
an order into a file of the process's name and sends SIGUSR1: `after_claim:3:KILL` means at the third time from now.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from pulse_outbox.alerts import sentry
from pulse_outbox.dispatcher import transactions
from pulse_outbox.operations import Operations
from pulse_outbox.store import Store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from pathlib import Path

    from chaos.journal import Journal
    from pulse_outbox.store import Asking

STORE_STEPS = (
    "claim",
    "heartbeat",
    "complete",
    "fail",
    "snooze",
    "release",
    "lapse",
    "reap",
    "heal",
    "next_alert",
    "pay_alert",
)
OPERATOR_STEPS = ("replay", "replay_many", "discard", "discard_many", "pause", "resume")
DISPATCHER_POINTS = (
    *(f"{when}_{step}" for step in STORE_STEPS for when in ("before", "after")),
    "before_handler",
    "after_handler",
    "before_send_alert",
    "after_send_alert",
    "before_commit",
)
CHILD_POINTS = ("before_handler", "after_handler", "before_commit")
OPERATOR_POINTS = tuple(f"{when}_{step}" for step in OPERATOR_STEPS for when in ("before", "after"))
PRODUCER_POINTS = ("before_enqueue", "after_enqueue", "after_commit")


class Points:
    """The orders of one process, and how often it has been where."""

    def __init__(self, orders: Path, journal: Journal) -> None:
        self._orders = orders
        self._journal = journal
        self._left: dict[str, tuple[int, str]] = {}
        self._lock = threading.Lock()
        signal.signal(signal.SIGUSR1, self._take_order)

    def _take_order(self, *_: object) -> None:
        point, number, action = self._orders.read_text().split(":")
        self._left = {point: (int(number), action)}

    def reached(self, point: str) -> None:
        """Does what was ordered for this point, if it is the time."""
        if point not in self._left:
            return
        with self._lock:
            number, action = self._left.pop(point, (0, ""))
            if number > 1:
                self._left[point] = (number - 1, action)
        if number == 1:
            self._journal.write("order", point=point, action=action, pid=os.getpid())
            os.kill(os.getpid(), signal.SIGKILL if action == "KILL" else signal.SIGSTOP)

    def wrap_store(self) -> None:
        """From now on every store of this process has points before and after its steps."""
        for step in STORE_STEPS:
            around = self._around_asking if step == "claim" else self._around_async
            setattr(Store, step, around(step, getattr(Store, step)))
        sentry.send = self._around("send_alert", sentry.send)
        is_locked = transactions._is_locked

        def before_commit(answers: list[tuple[Any, ...]], give_up_at: float) -> bool:
            locked = is_locked(answers, give_up_at)
            self.reached("before_commit")
            return locked

        transactions._is_locked = before_commit

    def wrap_operations(self) -> None:
        """The same for an operator."""
        for step in OPERATOR_STEPS:
            setattr(Operations, step, self._around(step, getattr(Operations, step)))

    def _around(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.reached(f"before_{step}")
            result = call(*arguments, **named)
            self.reached(f"after_{step}")
            return result

        return wrapped

    def _around_asking(self, step: str, call: Callable[..., Asking[Any]]) -> Callable[..., AskingWithPoints]:
        @functools.wraps(call)
        def wrapped(*arguments: Any, **named: Any) -> AskingWithPoints:
            return AskingWithPoints(self, step, call(*arguments, **named))

        return wrapped

    def _around_async(self, step: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(call)
        async def wrapped(*arguments: Any, **named: Any) -> Any:
            self.reached(f"before_{step}")
            result = await call(*arguments, **named)
            self.reached(f"after_{step}")
            return result

        return wrapped


class AskingWithPoints:
    """A call of the store with a point before it is sent, ahead or when it is awaited, and one after its answer."""

    def __init__(self, points: Points, step: str, asking: Asking[Any]) -> None:
        self._points = points
        self._step = step
        self._asking = asking
        self._was_sent = False

    def prepare(self) -> None:
        self._asking.prepare()

    def send(self) -> None:
        self._points.reached(f"before_{self._step}")
        self._was_sent = True
        self._asking.send()

    @property
    def is_lost(self) -> bool:
        return self._asking.is_lost

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._was_sent:
            self._points.reached(f"before_{self._step}")
        answer = yield from self._asking.__await__()
        self._points.reached(f"after_{self._step}")
        return answer
