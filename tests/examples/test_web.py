"""The web applications, each with its dispatcher, as processes; and their own tests, with the kit."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from pulse_outbox.testing import TestKit
from tests.connections.drivers import url_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(240)  # two processes that import a web framework each, on a busy machine


def test_the_fastapi_shop_reserves_what_was_ordered(example, conn):
    shop = example("fastapi_shop")
    with socket.create_server(("127.0.0.1", 0)) as ours:
        # The server gets a socket that listens already: no port to be lost to somebody else, no start to wait for.
        shop.process(
            "-m", "uvicorn", "fastapi_shop:app", "--fd", str(ours.fileno()), pass_fds=[ours.fileno()]
        )
        url = f"http://127.0.0.1:{ours.getsockname()[1]}"
    dispatcher = shop.dispatcher("fastapi_shop:outbox")
    dispatcher.wait_for("outbox.started", within=90)

    # A connection for each request: the server closes one on which a request has failed.
    anew = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, timeout=90, limits=anew) as client:
        refused = client.post("/orders", params={"article": "no such thing"})
        placed = client.post("/orders", params={"article": "lamp"})
        assert (refused.status_code, placed.status_code) == (500, 201)
        order = f"/orders/{placed.json()['order_id']}"
        reserved = {"article": "lamp", "reserved": True}
        wait_until(lambda: client.get(order).json() == reserved, within=20)

    def statuses() -> Any:
        conn.commit()
        return conn.execute("select status::text from pulse.outbox").fetchall()

    # The handler's work is committed a moment before the event is. The order that failed left no event.
    wait_until(lambda: statuses() == [("COMPLETED",)], within=20)
    assert conn.execute("select stock from article").fetchall() == [(9,)]


USE_DJANGO = """
import worker
from django.core.management import call_command
from django.test import Client

call_command("migrate")
call_command("makemigrations", check_changes=True, dry_run=True)
client = Client(raise_request_exception=False, headers={"host": "localhost"})
print([client.post("/orders", {"email": email}).status_code for email in ("ada@example.com", "nobody")])
"""


def test_the_django_shop_sends_a_receipt(example, empty_dsn):
    """Its own migrations bring the outbox's schema; a request that fails leaves neither order nor event."""
    shop = example("django_shop")
    shop.dsn = empty_dsn

    shown = shop.python("-c", USE_DJANGO)
    shop.burst("worker:outbox")

    assert "Applying orders.0001_initial... OK" in shown
    assert "[201, 500]" in shown
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select email, receipts_sent from orders_order").fetchall() == [
            ("ada@example.com", 1)
        ]
        assert conn.execute("select status::text from pulse.outbox").fetchall() == [("COMPLETED",)]


async def test_the_fastapi_shop_is_tested_as_the_documentation_says(example, dsn, monkeypatch):
    """Imported with a database that leads nowhere, and bound to the test's own; killed before it could say so."""
    shop = example("fastapi_shop")
    shop.dsn = "postgresql://nowhere/"
    module = shop.module("fastapi_shop", monkeypatch)
    sync_engine = create_engine(url_of(dsn, "psycopg"))
    module.Base.metadata.create_all(sync_engine)
    with sync_engine.begin() as connection:
        connection.execute(text("insert into article values ('lamp', 10)"))
    sync_engine.dispose()
    module.Session.configure(bind=create_async_engine(url_of(dsn, "asyncpg"), poolclass=NullPool))

    with TestKit(module.outbox, dsn=dsn) as kit:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(module.app), base_url="http://shop"
        ) as client:
            answer = await client.post("/orders", params={"article": "lamp"})
        await kit.assert_enqueued_async(topic="order.placed", payload=answer.json(), count=1)
        with kit.crash_at("before_complete"):
            await kit.drain_async()
        kit.advance(minutes=1)
        [ran] = await kit.drain_async()
        ran.raise_if_failed()

    with psycopg.connect(dsn) as conn:
        assert conn.execute("select stock from article").fetchall() == [(9,)]
