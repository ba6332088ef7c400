"""The queue in front of the slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pulse_outbox.dispatcher.jobs import Completed, Job
from pulse_outbox.dispatcher.slots import Slots
from tests.support.waiting import wait_until_async


class Begins:
    """A runner whose handlers are over at once."""

    def begin(self, job: Job) -> Completed:
        return Completed(job)


def job(name: str, max_attempts: int = 5) -> Any:
    claim: Any = SimpleNamespace(name=name, max_attempts=max_attempts)
    handler: Any = None  # nobody asks for it
    return Job(claim, handler, claimed_at=0.0)


async def test_budgets_of_one_start_before_what_was_claimed_ahead():
    """They were promised a slot that was free, and must not wait in the memory of a process that may die."""
    ended: list[Any] = []
    runner: Any = Begins()
    slots = Slots(runner=runner, deliver=ended.append, concurrency=1, exhausted=ended.append)
    slots.start()
    slots.add([job("first"), job("second")])
    slots.add([job("third"), job("once", 1), job("once more", 1)])

    async def are_over() -> bool:
        return len(ended) == 5

    try:
        await wait_until_async(are_over)
    finally:
        await slots.close()

    assert [outcome.job.claim.name for outcome in ended] == ["once", "once more", "first", "second", "third"]
