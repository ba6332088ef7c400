"""Calls of the store with something around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any

from pulse_outbox.store import Asking


class Around:
    """Is sent as the call itself is; what it gives is up to *answer*, which gets the call."""

    def __init__(self, asking: Asking[Any], answer: Callable[[Asking[Any]], Awaitable[Any]]) -> None:
        self._asking = asking
        self._answer = answer
        self.prepare = asking.prepare
        self.send = asking.send

    @property
    def is_lost(self) -> bool:
        return self._asking.is_lost

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer(self._asking).__await__()
