"""Files with `-- transaction: none`: what PostgreSQL does only outside a transaction, on a table that is in use."""

from __future__ import annotations

import threading

import psycopg
import pytest

from pulse_outbox import schema
from pulse_outbox.errors import SchemaError, SettingsError
from pulse_outbox.schema import Migration, migrate
from tests.migrations.test_print import psql
from tests.support.waiting import wait_until

INDEX = """\
-- Finds events by where they come from.
--
-- Locks:    nothing that an event needs; waits for transactions that are older than itself.
-- Deploy:   before or after the code.
-- transaction: none

-- What a try that failed has left.
drop index concurrently if exists pulse.outbox_source;
create index concurrently outbox_source
  on pulse.outbox (source);
insert into pulse.migration (version, name, oldest_code) values (2, 'source', '0.1.0');
"""
FILES = [schema.find_migrations()[0], Migration(version=2, name="source", text=INDEX)]
VALID = """select i.indisvalid from pg_index i
            where i.indexrelid = to_regclass('pulse.outbox_source') and i.indrelid = 'pulse.outbox'::regclass"""


@pytest.fixture
def conn(dsn):
    with psycopg.connect(dsn, autocommit=True) as conn:
        yield conn


def test_an_index_is_made_while_an_event_is_written(dsn, conn):
    """It waits for the open transaction; whoever comes meanwhile waits for nobody."""
    with psycopg.connect(dsn) as producer:
        producer.execute("select pulse.outbox_enqueue('mail', '{}')")
        deployment = threading.Thread(target=migrate, args=(dsn,), kwargs={"migrations": FILES}, daemon=True)
        deployment.start()
        wait_until(lambda: conn.execute(VALID).fetchone() == (False,))
        conn.execute("set lock_timeout = '2s'")
        conn.execute("select pulse.outbox_enqueue('mail', '{}')")
    deployment.join(20)

    assert conn.execute(VALID).fetchone() == (True,)
    assert schema.check(dsn, migrations=FILES).state == "current"
    assert migrate(dsn, migrations=FILES) == []


def test_a_try_that_failed_is_repeated(dsn, conn):
    """What it had done stays, it is not recorded, and the next migrate begins it anew."""
    broken = Migration(version=2, name="source", text=INDEX.replace("(source)", "((1 / (seq - seq)))"))
    conn.execute("select pulse.outbox_enqueue('mail', '{}')")

    with pytest.raises(
        SchemaError, match="0002_source failed, migrate again begins it anew: division by zero"
    ):
        migrate(dsn, migrations=[FILES[0], broken])
    assert conn.execute(VALID).fetchone() == (False,), "this is how PostgreSQL leaves it"
    assert schema.check(dsn, migrations=FILES).state == "behind"

    migrate(dsn, migrations=FILES)
    assert conn.execute(VALID).fetchone() == (True,)
    assert schema.check(dsn, migrations=FILES).state == "current"


def test_a_connection_of_the_callers_keeps_its_settings(dsn):
    with psycopg.connect(dsn) as mine:
        mine.execute("set lock_timeout = '7s'")
        mine.commit()
        migrate(mine, migrations=FILES)

        assert mine.execute("show lock_timeout").fetchone() == ("7s",)
        assert mine.execute("show search_path").fetchone() == ('"$user", public',)


def test_psql_applies_it_and_stops_when_it_is_not_its_turn(dsn, conn, tmp_path):
    text = tmp_path / "outbox.sql"
    text.write_text(schema.sql(2, migrations=FILES))
    conn.execute("select pg_advisory_lock(%s)", (schema._lock_key("pulse"),))
    assert "another migration of schema pulse is under way" in psql(dsn, text).stderr
    assert conn.execute(VALID).fetchone() is None
    conn.execute("select pg_advisory_unlock_all()")
    assert "ERROR" not in psql(dsn, text).stderr

    assert conn.execute(VALID).fetchone() == (True,)
    assert schema.check(dsn, migrations=FILES).state == "current"
    assert "schema pulse is not at 1" in psql(dsn, text).stderr
    assert migrate(dsn, migrations=FILES) == []


def test_inside_the_transaction_of_another_tool_it_is_refused_with_the_remedy(dsn):
    with pytest.raises(SettingsError, match="apply it with `pulse-outbox migrate`"):
        schema.sql(2, transactions=False, migrations=FILES)
    text = schema.statement(2, migrations=FILES).encode()
    with (
        psycopg.connect(dsn) as conn,
        pytest.raises(psycopg.Error, match="run `pulse-outbox migrate --to 2`"),
    ):
        conn.execute(text)
    migrate(dsn, migrations=FILES)

    with psycopg.connect(dsn) as conn:
        conn.execute(text)  # applied: nothing to do


def test_a_function_in_it_is_refused(dsn):
    odd = Migration(version=2, name="odd", text=f"-- transaction: none\ndo $$ begin end $$;\n{INDEX}")

    with pytest.raises(SchemaError, match="0002_odd has no transaction: a function belongs into a file"):
        migrate(dsn, migrations=[FILES[0], odd])
