"""The web applications, each with its dispatcher, as processes; and their own tests, with the kit."""

from __future__ import annotations

import socket

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


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def answers(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return False
    return True


def test_the_fastapi_shop_reserves_what_was_ordered(example, conn):
    shop = example("fastapi_shop")
    port = free_port()
    shop.process("-m", "uvicorn", "fastapi_shop:app", "--port", port)
    dispatcher = shop.dispatcher("fastapi_shop:outbox")
    url = f"http://127.0.0.1:{port}/orders"
    wait_until(lambda: answers(f"{url}/0"), within=90, what="the web server")
    dispatcher.wait_for("outbox.started", within=90)

    refused = httpx.post(url, params={"article": "no such thing"})
    placed = httpx.post(url, params={"article": "lamp"})

    assert (refused.status_code, placed.status_code) == (500, 201)
    wait_until(
        lambda: (
            httpx.get(f"{url}/{placed.json()['order_id']}").json() == {"article": "lamp", "reserved": True}
        ),
        within=20,
    )

    def statuses() -> list[tuple[str]]:
        conn.commit()
        return conn.execute("select status::text from pulse.outbox").fetchall()

    # The handler's work is committed a moment before the event is. The order that failed left no event.
    wait_until(lambda: statuses() == [("COMPLETED",)], within=20)
    assert conn.execute("select stock from article").fetchall() == [(9,)]


def test_the_django_shop_sends_a_receipt(example, empty_dsn):
    """Its own migrations bring the outbox's schema."""
    shop = example("django_shop")
    shop.dsn = empty_dsn
    assert "Applying orders.0001_initial... OK" in shop.python("manage.py", "migrate")
    assert "No changes detected" in shop.python("manage.py", "makemigrations", "--check", "--dry-run")
    port = free_port()
    shop.process("manage.py", "runserver", "--noreload", port)
    url = f"http://127.0.0.1:{port}/orders"
    wait_until(lambda: answers(url), within=90, what="the web server")

    placed = httpx.post(url, data={"email": "ada@example.com"})
    refused = httpx.post(url, data={"email": "nobody"})
    shop.burst("worker:outbox")

    assert (placed.status_code, refused.status_code) == (201, 500)
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
