from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import psycopg
import pytest
from psycopg.rows import dict_row

from tests.conftest import Connect
from tests.sql.calls import Calls, NewSession
from tests.support.testbed import Testbed


@pytest.fixture
def session(connect: Connect, t0: datetime) -> NewSession:
    """Further sessions, in autocommit: `other = session()`; `with other.conn.transaction(): …` holds locks."""

    def new_session() -> Calls:
        return Calls(connect(autocommit=True, row_factory=dict_row), t0)

    return new_session


@pytest.fixture
def outbox(session: NewSession) -> Calls:
    """The SQL functions on a database of the test's own, at `t0`."""
    return session()


@pytest.fixture(scope="module")
def module_dsn(testbed: Testbed) -> Iterator[str]:
    """One migrated database for all tests of a module, where they can't disturb each other."""
    with testbed.database() as dsn:
        yield dsn


@pytest.fixture
def shared(module_dsn: str, t0: datetime) -> Iterator[Calls]:
    """A session on the module's database: for many small cases that leave each other alone."""
    with psycopg.connect(module_dsn, autocommit=True, row_factory=dict_row) as conn:
        yield Calls(conn, t0)
