from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from datetime import datetime

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from tests.conftest import Connect
from tests.sql.calls import Calls, NewSession
from tests.support.testbed import Testbed

ROLES = ("pulse_producer", "pulse_dispatcher", "pulse_operator")


@pytest.fixture(scope="module")
def module_dsn(testbed: Testbed) -> Iterator[str]:
    """One migrated database for all tests of a module."""
    with testbed.database() as dsn:
        yield dsn


@pytest.fixture
def dsn(module_dsn: str) -> str:
    """Emptied for each test, which is many times as fast as a database of its own."""
    with psycopg.connect(module_dsn) as conn:
        conn.execute(
            "truncate pulse.outbox, pulse.event_handled, pulse.pause, pulse.dispatcher, pulse.sweep, pulse.claim_try, "
            "pulse.batch"
        )
    return module_dsn


@pytest.fixture
def session(connect: Connect, t0: datetime) -> NewSession:
    """Further sessions, in autocommit: `other = session()`; `with other.conn.transaction(): …` holds locks."""

    def new_session() -> Calls:
        return Calls(connect(autocommit=True, row_factory=dict_row), t0)

    return new_session


@pytest.fixture
def outbox(session: NewSession) -> Calls:
    """The SQL functions at `t0`, on an empty outbox."""
    return session()


@pytest.fixture(scope="module")
def logins(testbed: Testbed) -> Iterator[dict[str, str]]:
    """For each role, and for nobody, a login that has it and nothing else."""
    names = {role: f"login_{role}_{secrets.token_hex(4)}" for role in (*ROLES, "nobody")}
    with psycopg.connect(testbed.server_dsn, autocommit=True) as conn:
        for role, name in names.items():
            conn.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
            if role != "nobody":
                conn.execute(sql.SQL("grant {} to {}").format(sql.Identifier(role), sql.Identifier(name)))
        yield names
        for name in names.values():
            conn.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def as_role(dsn: str, logins: dict[str, str], t0: datetime) -> Iterator[Callable[[str], Calls]]:
    """A session of a login that has the role: `as_role("pulse_producer")`."""
    opened = []

    def log_in(role: str) -> Calls:
        conn = psycopg.connect(make_conninfo(dsn, user=logins[role]), autocommit=True, row_factory=dict_row)
        opened.append(conn)
        return Calls(conn, t0)

    yield log_in
    for conn in opened:
        conn.close()
