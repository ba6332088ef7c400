"""A loop that fails is run again, after a pause that an outage makes longer, but never long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pulse_outbox.dispatcher import loops
from pulse_outbox.dispatcher.loops import keep_going
from pulse_outbox.dispatcher.state import Condition


class Over(BaseException):
    pass


async def test_the_pause_grows_to_two_seconds_and_is_short_again_after_a_good_run(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 0.0
    pauses: list[float] = []
    lasts = iter([0.0] * 8 + [6.0] + [0.0] * 2)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def fails() -> None:
        nonlocal now
        if (seconds := next(lasts, None)) is None:
            raise Over
        now += seconds
        raise ConnectionError("no server")

    clock: Any = type("Clock", (), {"monotonic": staticmethod(lambda: now)})
    monkeypatch.setattr(loops, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", sleep)

    with pytest.raises(Over):
        await keep_going("claim", fails, Condition())

    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2, 0.1, 0.2, 0.4])
