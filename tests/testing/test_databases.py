"""Databases for tests: templates are made once, by whoever comes first, and addresses are what other libraries read."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import asyncpg
import psycopg
import pytest
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pulse_outbox import SettingsError
from pulse_outbox.testing.databases import Databases, as_uri


def test_a_template_is_prepared_once_however_many_ask(outbox_databases):
    """Workers of xdist do, at the same moment."""
    calls = []
    leaked = []

    def prepare(dsn: str) -> None:
        calls.append(dsn)
        conn = psycopg.connect(dsn, autocommit=True)
        conn.execute("create table mine ()")
        leaked.append(conn)  # as a pool would keep it

    def ask(_: int) -> str:
        mine = Databases(outbox_databases.server_dsn, f"{outbox_databases.prefix}_once")
        with mine.database(prepare=prepare) as dsn, psycopg.connect(dsn) as conn:
            conn.execute("select from mine")
            return mine.template(prepare)

    with ThreadPoolExecutor(4) as threads:
        templates = set(threads.map(ask, range(4)))
    leaked[0].close()

    assert len(calls) == 1
    assert len(templates) == 1


def test_what_was_prepared_by_halves_is_made_again(outbox_databases):
    """A prepare that raises must not leave a template behind that looks complete."""
    fails = True

    def prepare(dsn: str) -> None:
        with psycopg.connect(dsn) as conn:
            conn.execute("create table mine ()")
        if fails:
            raise RuntimeError("once")

    mine = Databases(outbox_databases.server_dsn, f"{outbox_databases.prefix}_halves")
    with pytest.raises(RuntimeError, match="once"), mine.database(prepare=prepare):
        pass
    fails = False

    with mine.database(prepare=prepare) as dsn, psycopg.connect(dsn) as conn:
        conn.execute("select from mine")


def test_another_schema_is_migrated_where_asked_for(outbox_databases):
    mine = Databases(outbox_databases.server_dsn, f"{outbox_databases.prefix}_schema", schema="jobs")
    with mine.database() as dsn, psycopg.connect(dsn) as conn:
        assert conn.execute("select to_regnamespace('pulse'), count(*) from jobs.outbox").fetchall() == [
            (None, 0)
        ]


def test_a_user_who_may_not_create_databases_is_told_what_to_do(outbox_databases, server_dsn):
    name = f"{outbox_databases.prefix}_nobody"
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute(f"create role {name} login password 'x'".encode())
        try:
            mine = Databases(make_conninfo(server_dsn, user=name, password="x"), name)
            with pytest.raises(SettingsError, match="may not create databases: `alter role … createdb`"):
                mine.create(name)
        finally:
            conn.execute(f"drop role {name}".encode())


@pytest.mark.parametrize(
    ("dsn", "uri"),
    [
        ("host=/tmp/a user=postgres dbname=x port=5433", "postgresql://postgres@/x?host=/tmp/a&port=5433"),
        ("host=db user=ann password='p@ /:' dbname=x", "postgresql://ann:p%40%20%2F%3A@db/x"),
        ("postgresql://db:5433/x?sslmode=require", "postgresql://db:5433/x?sslmode=require"),
        ("host=::1 dbname=x", "postgresql://[::1]/x"),
        ("host=a,b port=1,2 dbname=x", "postgresql:///x?host=a%2Cb&port=1%2C2"),
    ],
)
def test_addresses_as_uris(dsn, uri):
    assert as_uri(dsn) == uri
    assert conninfo_to_dict(uri) == conninfo_to_dict(dsn)


def test_other_libraries_read_the_address(outbox_dsn):
    engine = sqlalchemy.create_engine(sqlalchemy.make_url(outbox_dsn).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        [by_sqlalchemy] = connection.execute(sqlalchemy.text("select current_database()")).one()
    engine.dispose()

    async def ask() -> str:
        connection = await asyncpg.connect(outbox_dsn)
        found: str = await connection.fetchval("select current_database()")
        await connection.close()
        return found

    assert by_sqlalchemy == asyncio.run(ask()) == conninfo_to_dict(outbox_dsn)["dbname"]
