"""Libraries that ship no types: their connections are accepted where they belong."""

# pyright: basic

from __future__ import annotations

import asyncpg
import pg8000.dbapi
import psycopg2
from django.db import connection, connections

from pulse_outbox import Outbox

outbox = Outbox()


def django_user() -> None:
    # Inside transaction.atomic(), which pyright itself makes nothing of.
    outbox.enqueue(connection, "order.paid", {})
    outbox.enqueue(connections["other"], "order.paid", {})
    outbox.enqueue_many(connection, [])


async def asyncpg_user() -> None:
    raw = await asyncpg.connect()
    async with raw.transaction():
        await outbox.enqueue_async(raw, "order.paid", {})
    async with asyncpg.create_pool() as pool, pool.acquire() as lent, lent.transaction():
        await outbox.enqueue_async(lent, "order.paid", {})
        await outbox.enqueue_many_async(lent, [])


def dbapi_user() -> None:
    outbox.enqueue(psycopg2.connect(""), "order.paid", {})
    outbox.enqueue(pg8000.dbapi.connect("user"), "order.paid", {})
