"""An application as its type checkers see it: nothing here may be reported, and every type is what is stated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, assert_type
from uuid import UUID

import psycopg
import sqlalchemy
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pulse_outbox import (
    DeadLetter,
    Dispatcher,
    Event,
    NewEvent,
    Outbox,
    RetryLater,
    RetryPolicy,
    TerminalHandlerError,
    Verdict,
)


class OrderPaid(BaseModel):
    order_id: int


class CardDeclined(TerminalHandlerError):
    pass


def redact(text: str) -> str:
    return text


def page_someone(dead: DeadLetter) -> None:
    assert_type(dead.topic, str)


outbox = Outbox(schema="shop", redact=redact, on_dead_letter=page_someone)


# Handlers: the payload's type is the annotation's, and the decorator leaves the function what it was.


def classify(error: BaseException) -> Verdict | None:
    return None


@outbox.handler(
    "order.paid",
    retry=RetryPolicy(
        max_attempts=3, base_delay=timedelta(seconds=1), terminal_errors=(CardDeclined,), classify=classify
    ),
    timeout=30,
)
async def send_receipt(event: Event[OrderPaid]) -> None:
    assert_type(event.payload, OrderPaid)
    assert_type(event.payload.order_id, int)
    assert_type(event.id, UUID)
    assert_type(event.idempotency_key, str)
    assert_type(event.ordering_key, str | None)
    if event.attempt > 2:
        raise RetryLater(timedelta(minutes=5))


@outbox.handler("order.shipped", completed="delete", concurrency=4, timeout=timedelta(minutes=1))
def ship(event: Event[dict[str, int]]) -> int:
    assert_type(event.payload, dict[str, int])
    return event.payload["order_id"]


@outbox.handler("anything", transactional=True)
def anything(event: Event[Any]) -> None:
    print(event.payload, event.connection)


async def call_it_in_a_test(event: Event[OrderPaid], other: Event[dict[str, int]]) -> None:
    assert_type(await send_receipt(event), None)
    assert_type(ship(other), int)


@outbox.lifespan
async def resources() -> AsyncIterator[str]:
    yield "pool"


# Connections


def psycopg_user(pool: ConnectionPool, typed: psycopg.Connection[dict[str, Any]]) -> None:
    with pool.connection() as conn, conn.transaction():
        assert_type(outbox.enqueue(conn, "order.paid", OrderPaid(order_id=7), ordering_key="order:7"), UUID)
        assert_type(outbox.enqueue_many(conn, [NewEvent("order.paid", {"order_id": 7}, delay=3)]), list[UUID])
    outbox.enqueue(typed, "order.paid", None, outside_transaction=True)


async def async_psycopg_user(pool: AsyncConnectionPool) -> None:
    async with pool.connection() as conn, conn.transaction():
        assert_type(await outbox.enqueue_async(conn, "order.paid", OrderPaid(order_id=7)), UUID)
        assert_type(await outbox.enqueue_many_async(conn, []), list[UUID])


def sqlalchemy_user(
    maker: sessionmaker[Session], engine: sqlalchemy.Engine, registry: scoped_session[Session]
) -> None:
    with maker.begin() as session:
        outbox.enqueue(session, "order.paid", {})
    with engine.begin() as connection:
        outbox.enqueue_many(connection, [])
    outbox.enqueue(registry, "order.paid", {})


async def async_sqlalchemy_user(
    maker: async_sessionmaker[AsyncSession],
    connection: AsyncConnection,
    registry: async_scoped_session[AsyncSession],
) -> None:
    async with maker.begin() as session:
        await outbox.enqueue_async(session, "order.paid", {})
    await outbox.enqueue_many_async(connection, [])
    await outbox.enqueue_async(registry, "order.paid", {})


def once(conn: psycopg.Connection, event: Event[OrderPaid]) -> None:
    if outbox.first_time(conn, event, name="receipt"):
        conn.execute("select 1")


async def main() -> None:
    await Dispatcher(outbox, dsn="postgresql://", concurrency=100).run_async()
