"""The test bed that every other test stands on."""

from __future__ import annotations

import psycopg


def test_a_test_has_a_migrated_database_of_its_own(conn):
    """Tests must not see each other's rows, nor migrate each time."""
    database, version = conn.execute(
        "select current_database(), (select max(version) from pulse.migration)"
    ).fetchone()

    assert database.startswith("pulse_test_")
    assert version >= 1


async def test_asynchronous_connections_see_the_same_database(conn, aconn):
    [here] = conn.execute("select current_database()").fetchone()
    [there] = await (await aconn.execute("select current_database()")).fetchone()

    assert here == there


def test_an_empty_database_has_no_schema(empty_dsn):
    """Tests of the migrator need one that nobody migrated."""
    with psycopg.connect(empty_dsn) as conn:
        found = conn.execute("select to_regnamespace('pulse')").fetchone()

    assert found == (None,)


def test_a_database_is_dropped_with_connections_still_open(testbed):
    """A test that leaks a connection must not break the next one."""
    with testbed.database() as dsn:
        leaked = psycopg.connect(dsn)
        name = leaked.info.dbname

    with psycopg.connect(testbed.server_dsn) as conn:
        assert conn.execute("select from pg_database where datname = %s", (name,)).fetchall() == []
    leaked.close()
