from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest
from psycopg import sql

from pulse_outbox import schema
from tests.support.testbed import Testbed


@pytest.fixture
def lone_schema(server_dsn: str) -> Iterator[str]:
    """A schema name whose roles no other test has: roles are shared by all databases of the server."""
    name = f"lone_{secrets.token_hex(4)}"
    yield name
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        for role in schema.role_names(name):
            conn.execute(sql.SQL("drop role if exists {}").format(sql.Identifier(role)))


@pytest.fixture
def make_database(lone_schema: str, testbed: Testbed) -> Iterator[Callable[[], str]]:
    """Makes empty databases, which are gone before the roles of `lone_schema` go."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(testbed.database(migrated=False))


@pytest.fixture
def lone_dsn(make_database: Callable[[], str]) -> str:
    """An empty database for `lone_schema`."""
    return make_database()
