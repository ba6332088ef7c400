"""A small shop: one transaction writes an order and four events, and a handler for each of them.

Run by `pulse-outbox run pulse_outbox.demo.shop:outbox`. Three of its orders mean trouble.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from pulse_outbox import Event, Outbox, RetryPolicy

if TYPE_CHECKING:
    from uuid import UUID

    import psycopg

TABLES = """
create table demo_shop.orders (number integer primary key, customer text not null);
create table demo_shop.reservation (order_number integer not null);  -- nothing here forbids a second one
"""
RELEASE = int(os.environ.get("PULSE_OUTBOX_DEMO_RELEASE", "1"))
"""Which release of the shop this process runs. The second one has repaired its invoices."""

outbox = Outbox()


class Order(BaseModel):
    """The payload of all four topics."""

    number: int
    customer: str


class CardDeclined(Exception):
    """The bank says no, and will say it again."""


class CustomerLeft(Exception):
    """The customer went away before the order was complete."""


def place_order(conn: psycopg.Connection[Any], order: Order, *, customer_leaves: bool = False) -> list[UUID]:
    """Writes the order and its events: all of it is there at the end, or nothing."""
    with conn.transaction():
        conn.execute("insert into demo_shop.orders values (%s, %s)", (order.number, order.customer))
        event_ids = [outbox.enqueue(conn, topic, order, generation=RELEASE) for topic in outbox.handlers]
        if customer_leaves:
            raise CustomerLeft
        return event_ids


@outbox.handler("stock.reserve", transactional=True)
async def reserve_stock(event: Event[Order]) -> None:
    """Its row and the event's completion commit together: once and only once, whoever dies."""
    await asyncio.sleep(0.1)
    await event.connection.execute("insert into demo_shop.reservation values (%s)", (event.payload.number,))


@outbox.handler("card.charge", retry=RetryPolicy(terminal_errors=(CardDeclined,)))
async def charge_card(event: Event[Order]) -> None:
    """Another attempt would be declined too: CardDeclined is terminal."""
    await asyncio.sleep(0.15)
    if event.payload.customer == "Bankrupt Bob":
        raise CardDeclined("the bank says no")


@outbox.handler("receipt.mail", retry=RetryPolicy(max_attempts=5, base_delay=0.6, jitter="equal"))
async def mail_receipt(event: Event[Order]) -> None:
    """Some mail servers want to be asked three times."""
    await asyncio.sleep(0.2)
    if event.payload.customer == "Greylisted Grace" and event.attempt < 3:
        raise ConnectionError("451 try again later")


@outbox.handler("invoice.render", retry=RetryPolicy(max_attempts=2))
async def render_invoice(event: Event[Order]) -> None:
    """The first release takes so much memory for one customer that the kernel ends the process."""
    await asyncio.sleep(0.25)
    if event.payload.customer == "Poisonous Pete" and RELEASE < 2:
        await asyncio.sleep(0.15)
        os.kill(os.getpid(), signal.SIGKILL)
