"""The kit inside the test's own transaction, with every library: nothing is left when that is rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from pulse_outbox import Event, SettingsError
from pulse_outbox.testing import TestKit
from tests.connections.drivers import (
    DRIVERS,
    AsyncDriver,
    Asyncpg,
    AsyncPsycopg,
    Django,
    Driver,
    Open,
    Psycopg,
    SAAsyncSession,
    SAConnection,
    SASession,
    opening,
)
from tests.testing.shop import Order, Shop


@pytest.fixture
def open_driver(outbox_dsn: str) -> Iterator[Open]:
    # Closed before the database is dropped.
    with opening() as open_one:
        yield open_one


@dataclass
class Call:
    """Calls the kit's methods by name, in the driver's loop where it has one."""

    kit: TestKit
    driver: Driver

    def __call__(self, name: str, *arguments: Any, **named: Any) -> Any:
        if isinstance(self.driver, AsyncDriver):
            return self.driver.run(getattr(self.kit, f"{name}_async")(*arguments, **named))
        return getattr(self.kit, name)(*arguments, **named)


@contextmanager
def kit_on(driver: Driver, shop: Shop) -> Iterator[Call]:
    with TestKit(shop.outbox, connection=driver.given) as kit:
        yield Call(kit, driver)


@pytest.mark.parametrize("kind", DRIVERS, ids=lambda kind: kind.__name__)
def test_everything_happens_in_the_transaction_and_goes_with_it(open_driver, outbox_dsn, shop: Shop, kind):
    driver = open_driver(kind, outbox_dsn)
    topic = "order.async" if isinstance(driver, AsyncDriver) else "order.sync"

    with kit_on(driver, shop) as call:
        event = driver.enqueue(shop.outbox, topic, Order(order_id=7), headers={"a": 'quo"te\\ %s $1'})
        [stored] = call("assert_enqueued", topic=topic, payload={"order_id": 7}, count=1)
        assert (stored.id, stored.headers) == (event, {"a": 'quo"te\\ %s $1'})

        shop.trouble = OSError('quo"te\\ %s $1')
        assert [ran.status for ran in call("drain")] == ["RETRYING"]
        call.kit.advance(minutes=1)
        assert call("run", event).attempt == 2
        call.kit.advance(minutes=1)
        assert call("run", event).status == "DEAD_LETTERED"
        [dead] = call("dead_letters")
        assert dead.error == 'OSError: quo"te\\ %s $1'

        shop.trouble = None
        call("replay", event)
        with call.kit.crash_at("before_complete"):
            call("run", event)
        call.kit.advance(minutes=1)
        assert [ran.status for ran in call("drain")] == ["COMPLETED"]
        assert call("event", event).status == "COMPLETED"
    driver.rollback()

    with psycopg.connect(outbox_dsn) as conn:
        assert conn.execute("select count(*) from pulse.outbox").fetchone() == (0,)


@pytest.mark.parametrize(
    "kind",
    [Psycopg, SASession, SAConnection, Django, AsyncPsycopg, SAAsyncSession],
    ids=lambda kind: kind.__name__,
)
def test_a_transactional_handler_works_on_the_same_connection(open_driver, outbox_dsn, shop: Shop, kind):
    driver = open_driver(kind, outbox_dsn)
    topic = "ledger.async" if isinstance(driver, AsyncDriver) else "ledger.sync"

    with kit_on(driver, shop) as call:
        event = driver.enqueue(shop.outbox, topic, Order(order_id=7))
        with call.kit.crash_at("before_complete"):
            call("run", event)
        call.kit.advance(minutes=1)
        [ran] = call("drain")
        ran.raise_if_failed()
        driver.execute("insert into ledger select order_id + 1 from ledger")
    driver.commit()

    with psycopg.connect(outbox_dsn) as conn:
        assert conn.execute("select order_id from ledger order by 1").fetchall() == [(7,), (8,)]


@pytest.mark.parametrize("kind", [Psycopg, AsyncPsycopg], ids=lambda kind: kind.__name__)
def test_a_transactional_handler_that_rolls_back_has_failed(open_driver, outbox_dsn, shop: Shop, kind):
    """Here as in a dispatcher."""
    driver = open_driver(kind, outbox_dsn)
    topic = "ledger.async" if isinstance(driver, AsyncDriver) else "ledger.sync"
    shop.trouble = psycopg.Rollback()

    with kit_on(driver, shop) as call:
        ran = call("run", driver.enqueue(shop.outbox, topic, Order(order_id=7)))
        assert (ran.status, "rolled its transaction back" in ran.error) == ("RETRYING", True)
    driver.commit()

    with psycopg.connect(outbox_dsn) as conn:
        assert conn.execute("select from ledger").fetchall() == []


def test_an_async_handler_in_a_plain_wrapper_is_refused(open_driver, outbox_dsn, shop: Shop):
    """So that the application's tests find it."""
    driver = open_driver(Psycopg, outbox_dsn)
    book = shop.outbox.handlers["ledger.async"].function

    @shop.outbox.handler("wrapped", transactional=True)
    def wrapper(event: Event[Any]) -> Any:
        return book(event)

    with kit_on(driver, shop) as call:
        ran = call("run", driver.enqueue(shop.outbox, "wrapped", {}))

    assert (ran.status, "must be `async def` itself" in ran.error) == ("DEAD_LETTERED", True)


@pytest.mark.parametrize("kind", [Psycopg, SASession, Django, Asyncpg], ids=lambda kind: kind.__name__)
def test_a_handler_that_breaks_the_transaction_fails_alone(open_driver, outbox_dsn, shop: Shop, kind):
    """Its connection would be another one in production; here it is the test's, which must go on."""
    driver = open_driver(kind, outbox_dsn)

    @shop.outbox.handler("bad.sync", retry=None)
    def bad(event: Any) -> None:
        driver.execute("insert into ledger values (1)")
        driver.execute("select 1 / 0")

    @shop.outbox.handler("bad.async", retry=None)
    async def bad_async(event: Any) -> None:
        await driver.given.execute("insert into ledger values (1)")
        await driver.given.execute("select 1 / 0")

    driver.execute("insert into ledger values (0)")
    with kit_on(driver, shop) as call:
        driver.enqueue(shop.outbox, "bad.async" if isinstance(driver, AsyncDriver) else "bad.sync", {})
        [ran] = call("drain")
        assert (ran.status, "division by zero" in ran.error) == ("RETRYING", True)
    driver.commit()

    with psycopg.connect(outbox_dsn) as conn:
        assert conn.execute("select order_id from ledger").fetchall() == [(0,)]
        assert conn.execute("select status::text from pulse.outbox").fetchall() == [("RETRYING",)]


def test_sync_and_async_connections_have_their_own_methods(open_driver, outbox_dsn, shop):
    sync, other = open_driver(Psycopg, outbox_dsn), open_driver(AsyncPsycopg, outbox_dsn)

    on_other = pytest.raises(SettingsError, match="this connection is asynchronous: await run_async")
    with TestKit(shop.outbox, connection=other.given) as kit, on_other:
        kit.drain()
    on_sync = pytest.raises(SettingsError, match="this connection is synchronous: call run")
    with TestKit(shop.outbox, connection=sync.given) as kit, on_sync:
        other.run(kit.drain_async())


def test_a_transactional_handler_cant_have_asyncpgs_connection(open_driver, outbox_dsn, shop):
    driver = open_driver(Asyncpg, outbox_dsn)
    with kit_on(driver, shop) as call:
        driver.enqueue(shop.outbox, "ledger.async", Order(order_id=7))
        [ran] = call("drain")

    with pytest.raises(SettingsError, match=r"gets a psycopg.AsyncConnection.*on a database of its own"):
        ran.raise_if_failed()


def test_a_connection_without_a_transaction_is_refused(open_driver, outbox_dsn, shop):
    """Nothing would be rolled back."""
    driver = open_driver(Psycopg, outbox_dsn, autocommit=True)
    with kit_on(driver, shop) as call, pytest.raises(SettingsError, match=r"with conn\.transaction"):
        call("drain")


def test_what_is_no_connection_is_refused(shop):
    with (
        TestKit(shop.outbox, connection=object()) as kit,
        pytest.raises(SettingsError, match="a connection is needed"),
    ):
        kit.drain()


def test_a_django_handler_may_look_after_its_connection(open_driver, outbox_dsn, shop: Shop):
    """close_old_connections() is how a Django handler begins; here it would close the test's transaction."""
    from django.db import close_old_connections, connection

    driver = open_driver(Django, outbox_dsn)

    @shop.outbox.handler("careful")
    def careful(event: Event) -> None:
        close_old_connections()
        driver.execute("insert into ledger values (7)")

    with kit_on(driver, shop) as call:
        driver.enqueue(shop.outbox, "careful", {})
        call("drain")[0].raise_if_failed()
    driver.commit()

    assert "close_if_unusable_or_obsolete" not in vars(connection._connections["default"])
    with psycopg.connect(outbox_dsn) as conn:
        assert conn.execute("select order_id from ledger").fetchall() == [(7,)]
