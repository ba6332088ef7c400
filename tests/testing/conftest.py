from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from pulse_outbox import Outbox
from tests.testing.shop import Shop, make_shop


@pytest.fixture
def shop() -> Shop:
    return make_shop()


@pytest.fixture
def outbox_under_test(shop: Shop) -> Outbox:
    return shop.outbox


@pytest.fixture(scope="session")
def outbox_prepare() -> Callable[[str], None]:
    def prepare(dsn: str) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("create table ledger (order_id integer)")

    return prepare
