"""Handlers as a module with string annotations has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from pulse_outbox import Event

if TYPE_CHECKING:
    from decimal import Decimal


class OrderPaid(BaseModel):
    order_id: int


async def typed(event: Event[OrderPaid]) -> None: ...


def hidden(event: Event[Decimal]) -> None: ...


def other_annotations_do_not_matter(event: Event[OrderPaid], rate: Decimal | None = None) -> Decimal | None:
    return rate
