"""Pays: one effect in our own database, one at a gateway, and neither of them twice."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import psycopg
from psycopg_pool import AsyncConnectionPool
from pydantic import BaseModel, PositiveInt

from pulse_outbox import Event, Outbox, RetryPolicy, TerminalHandlerError

outbox = Outbox()


class PaymentRequested(BaseModel):
    account: int
    cents: PositiveInt


class AccountOverdrawn(TerminalHandlerError):
    """Trying again would not make the account any fuller."""


@dataclass(frozen=True)
class Resources:
    pool: AsyncConnectionPool
    gateway: httpx.AsyncClient


@outbox.lifespan
async def open_resources() -> AsyncIterator[Resources]:
    """Once in each process; a handler finds it in event.resources."""
    async with (
        AsyncConnectionPool(os.environ["PULSE_OUTBOX_DSN"], open=False) as pool,
        httpx.AsyncClient(base_url=os.environ["GATEWAY_URL"], timeout=10) as gateway,
    ):
        yield Resources(pool, gateway)


@outbox.handler("payment.requested", retry=RetryPolicy(max_attempts=10), timeout=30)
async def pay(event: Event[PaymentRequested]) -> None:
    resources: Resources = event.resources
    async with resources.pool.connection() as conn, conn.transaction():
        # The record and the debit commit together: a second run finds the record and leaves the account alone.
        if await outbox.first_time_async(conn, event, name="debit"):
            await debit(conn, event.payload)
    # Elsewhere there is no transaction of ours. The gateway remembers the key, and answers a second call as the first.
    answer = await resources.gateway.post(
        "/charges",
        json={"cents": event.payload.cents},
        headers={"Idempotency-Key": event.idempotency_key},
    )
    answer.raise_for_status()


async def debit(conn: psycopg.AsyncConnection, payment: PaymentRequested) -> None:
    debited = await conn.execute(
        "update account set cents = cents - %(cents)s where id = %(account)s and cents >= %(cents)s",
        payment.model_dump(),
    )
    if debited.rowcount == 0:
        raise AccountOverdrawn(f"account {payment.account} has less than {payment.cents} cents")
