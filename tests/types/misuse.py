"""Mistakes. Each line that is marked must be reported by both checkers, with these codes, and no other line by either.

# E: mypy's code | pyright's rule
"""

from __future__ import annotations

import psycopg
import sqlalchemy
from psycopg_pool import ConnectionPool
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from pulse_outbox import Dispatcher, Event, NewEvent, Outbox, RetryLater, RetryPolicy


class OrderPaid(BaseModel):
    order_id: int


outbox = Outbox()


# Handlers


@outbox.handler("no.event")  # E: type-var | reportArgumentType
def no_event() -> None: ...


@outbox.handler("no.event.async")  # E: type-var | reportArgumentType
async def no_event_async() -> None: ...


@outbox.handler("payload.instead")  # E: type-var | reportArgumentType
def payload_instead(event: OrderPaid) -> None: ...


@outbox.handler("two")  # E: type-var | reportArgumentType
def two_parameters(event: Event[OrderPaid], other: int) -> None: ...


@outbox.handler  # E: arg-type | reportArgumentType
def without_a_topic(event: Event[OrderPaid]) -> None: ...


@outbox.handler("a", retry=5)  # E: arg-type | reportArgumentType
def wrong_retry(event: Event[OrderPaid]) -> None: ...


@outbox.handler("b", timeout="30")  # E: arg-type | reportArgumentType
def wrong_timeout(event: Event[OrderPaid]) -> None: ...


@outbox.handler("c", completed="drop")  # E: arg-type | reportArgumentType
def wrong_completed(event: Event[OrderPaid]) -> None: ...


@outbox.handler("d", retries=5)  # E: call-arg | reportCallIssue
def unknown_option(event: Event[OrderPaid]) -> None: ...


@outbox.handler("e")
def payload_misread(event: Event[OrderPaid]) -> None:
    print(event.payload.orderid)  # E: attr-defined | reportAttributeAccessIssue
    text: str = event.payload.order_id  # E: assignment | reportAssignmentType
    print(text)
    event.attempt = 3  # E: misc | reportAttributeAccessIssue
    print(event.attempts)  # E: attr-defined | reportAttributeAccessIssue


# Policies


RetryPolicy(jitter="half")  # E: arg-type | reportArgumentType
RetryPolicy(terminal_errors=KeyError)  # E: arg-type | reportArgumentType
RetryPolicy(max_attempts="5")  # E: arg-type | reportArgumentType
RetryPolicy(classify=lambda: None)  # E: arg-type | reportArgumentType
RetryPolicy(tries=5)  # E: call-arg | reportCallIssue
RetryLater("soon")  # E: arg-type | reportArgumentType
Dispatcher(outbox, dsn="", concurrency="100")  # E: arg-type | reportArgumentType
Dispatcher(outbox, dsn="", workers=100)  # E: call-arg | reportCallIssue
Outbox(max_payload_bytes="1 MB")  # E: arg-type | reportArgumentType


# Connections


def synchronous(
    conn: psycopg.Connection,
    cursor: psycopg.Cursor,
    pool: ConnectionPool,
    engine: sqlalchemy.Engine,
    maker: sessionmaker[Session],
    asynchronous: psycopg.AsyncConnection,
    async_session: AsyncSession,
    async_connection: AsyncConnection,
    event: Event[OrderPaid],
) -> None:
    outbox.enqueue(asynchronous, "t", {})  # E: arg-type | reportArgumentType
    outbox.enqueue(async_session, "t", {})  # E: arg-type | reportArgumentType
    outbox.enqueue(async_connection, "t", {})  # E: arg-type | reportArgumentType
    outbox.enqueue(cursor, "t", {})  # E: arg-type | reportArgumentType
    outbox.enqueue(pool, "t", {})  # E: arg-type | reportArgumentType
    outbox.enqueue(engine, "t", {})  # E: arg-type | reportArgumentType
    outbox.enqueue(maker, "t", {})  # E: arg-type | reportArgumentType
    outbox.enqueue("postgresql://", "t", {})  # E: arg-type | reportArgumentType
    outbox.enqueue(None, "t", {})  # E: arg-type | reportArgumentType
    outbox.enqueue("t", {})  # E: call-arg, arg-type | reportCallIssue
    outbox.enqueue_many(asynchronous, [])  # E: arg-type | reportArgumentType
    outbox.enqueue_many(conn, [("t", {})])  # E: list-item | reportArgumentType
    outbox.enqueue(conn, "t", {}, priority="high")  # E: arg-type | reportArgumentType
    outbox.enqueue(conn, "t", {}, prio=3)  # E: call-arg | reportCallIssue
    outbox.enqueue(conn, "t", {}, dead_key="drop")  # E: arg-type | reportArgumentType
    outbox.enqueue(conn, OrderPaid, {})  # E: arg-type | reportArgumentType
    NewEvent("t", {}, "key")  # E: call-arg | reportCallIssue
    outbox.first_time(conn, event.payload)  # E: arg-type | reportArgumentType
    outbox.first_time(asynchronous, event)  # E: arg-type | reportArgumentType


async def in_asyncio(
    conn: psycopg.Connection, session: Session, engine: AsyncEngine, asynchronous: psycopg.AsyncConnection
) -> None:
    await outbox.enqueue_async(conn, "t", {})  # E: arg-type | reportArgumentType
    await outbox.enqueue_async(session, "t", {})  # E: arg-type | reportArgumentType
    await outbox.enqueue_async(engine, "t", {})  # E: arg-type | reportArgumentType
    await outbox.enqueue_many_async(conn, [])  # E: arg-type | reportArgumentType
    outbox.enqueue_async(asynchronous, "t", {})  # E: unused-coroutine | reportUnusedCoroutine
    await outbox.enqueue(conn, "t", {})  # E: misc | reportGeneralTypeIssues
