"""An application with a handler of each kind, for tests of the test kit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from pulse_outbox import Event, Outbox, RetryLater, RetryPolicy, TerminalHandlerError, Verdict

STEADY = RetryPolicy(max_attempts=3, base_delay=60, multiplier=1, jitter="none")


class Order(BaseModel):
    order_id: int


@dataclass
class Shop:
    """Its outbox, and what its handlers have done."""

    outbox: Outbox = field(default_factory=Outbox)
    done: list[Any] = field(default_factory=list)
    trouble: BaseException | None = None
    """What handlers raise, while it is set."""
    opened: int = 0

    def did(self, what: object) -> None:
        self.done.append(what)
        if self.trouble is not None:
            raise self.trouble


def make_shop() -> Shop:
    shop = Shop()
    outbox = shop.outbox

    @outbox.lifespan
    async def resources() -> AsyncIterator[str]:
        shop.opened += 1
        yield "the mailer"

    @outbox.handler("order.async", retry=STEADY)
    async def handle_async(event: Event[Order]) -> None:
        shop.did(event.payload.order_id)

    @outbox.handler("order.sync", retry=STEADY)
    def handle_sync(event: Event[Order]) -> None:
        shop.did(event.payload.order_id)

    @outbox.handler("order.gone", completed="delete")
    def delete(event: Event[Order]) -> None:
        shop.did(event.payload.order_id)

    @outbox.handler("resources")
    def use_resources(event: Event) -> None:
        shop.did(event.resources)

    @outbox.handler("ledger.sync", transactional=True, retry=STEADY)
    def book(event: Event[Order]) -> None:
        event.connection.execute("insert into ledger values (%s)", (event.payload.order_id,))
        shop.did(event.payload.order_id)

    @outbox.handler("ledger.async", transactional=True, retry=STEADY)
    async def book_async(event: Event[Order]) -> None:
        await event.connection.execute("insert into ledger values (%s)", (event.payload.order_id,))
        shop.did(event.payload.order_id)

    return shop


__all__ = ["STEADY", "Order", "RetryLater", "Shop", "TerminalHandlerError", "Verdict", "make_shop"]
