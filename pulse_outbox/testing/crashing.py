"""Crash points: places where a run stops as if its process had been killed."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from pulse_outbox.errors import SettingsError

if TYPE_CHECKING:
    from pulse_outbox.events import Event
    from pulse_outbox.handlers import Handler

CrashPoint = Literal["after_claim", "before_handler", "after_handler", "before_complete", "after_complete"]
"""Claimed; in the handler's transaction, before its first line; after its last; when its result is about to be stored;
when it is stored and nobody has heard of it."""


class Killed(BaseException):
    """Ends a handler and its transaction the way the end of the process would."""


@dataclass(slots=True)
class Crash:
    """One armed crash point, and how often a run has reached it."""

    point: CrashPoint
    topic: str | None = None
    crashed: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.point not in get_args(CrashPoint):
            raise SettingsError(f"crash_at: one of {', '.join(get_args(CrashPoint))} is needed")

    def strikes(self, topic: str, *points: CrashPoint) -> bool:
        """Whether a run of this topic ends at one of these points."""
        return self.point in points and self.topic in (None, topic)

    def in_handler(self, handler: Handler) -> Handler:
        """The handler, with the crash before or after its function where that is the point.

        A transactional handler's completion commits with its work, so nothing lies between the two: there,
        `before_complete` is after the handler as well.
        """
        if self.strikes(handler.topic, "before_handler"):
            return replace(handler, function=_killed_before)
        at_end: tuple[CrashPoint, ...] = ("after_handler", "before_complete")
        if self.strikes(handler.topic, *at_end[: 2 if handler.transactional else 1]):
            return replace(handler, function=_killed_after(handler))
        return handler


def _killed_before(event: Event[Any]) -> Any:
    raise Killed


def _killed_after(handler: Handler) -> Any:
    async def wait_and_die(work: Awaitable[Any]) -> None:
        try:
            await work
        finally:
            raise Killed

    if handler.is_async:
        return lambda event: wait_and_die(handler.function(event))

    def run_and_die(event: Event[Any]) -> Any:
        try:
            returned = handler.function(event)
        except BaseException as error:
            raise Killed from error
        if inspect.isawaitable(returned):
            return wait_and_die(returned)
        raise Killed

    return run_and_die
