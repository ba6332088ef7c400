"""What every test may ask for: a database of its own, connections to it, and a fixed time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
import pytest_asyncio

from tests.support import testbed
from tests.support.testbed import Testbed

Connect = Callable[..., psycopg.Connection[Any]]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        testbed.die_with_parent()
    else:
        testbed.choose_server()  # xdist's workers inherit the environment


@pytest.fixture(scope="session", name="testbed")
def _testbed(outbox_databases: Testbed) -> Testbed:
    """Makes databases on the run's server: `with testbed.database(migrated=False) as dsn`."""
    outbox_databases.template()  # with it the server has the schema's roles, which logins are made members of
    return outbox_databases


@pytest.fixture(scope="session")
def server_dsn(testbed: Testbed) -> str:
    """Superuser on the run's server; shared with every other test, so leave it as you found it."""
    return testbed.server_dsn


@pytest.fixture
def dsn(testbed: Testbed) -> Iterator[str]:
    """A migrated database of the test's own."""
    with testbed.database() as dsn:
        yield dsn


@pytest.fixture
def empty_dsn(testbed: Testbed) -> Iterator[str]:
    """A database of the test's own without our schema."""
    with testbed.database(migrated=False) as dsn:
        yield dsn


@pytest.fixture
def connect(dsn: str) -> Iterator[Connect]:
    """Further connections to the test's database, closed with it: `connect(autocommit=True)`."""
    with ExitStack() as stack:

        def open_one(**options: Any) -> psycopg.Connection[Any]:
            conn = psycopg.connect(dsn, **options)
            stack.callback(conn.close)
            return conn

        yield open_one


@pytest.fixture
def conn(connect: Connect) -> psycopg.Connection[Any]:
    """As an application has it: not in autocommit, so nothing stays without a commit."""
    return connect()


@pytest_asyncio.fixture
async def aconn(dsn: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    conn = await psycopg.AsyncConnection.connect(dsn)
    yield conn
    await conn.close()


@pytest.fixture
def t0() -> datetime:
    """The beginning of simulated time, for the SQL functions' `p_now`."""
    return datetime(2030, 1, 1, 12, tzinfo=UTC)
