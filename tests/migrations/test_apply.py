"""`schema.migrate` on real databases."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from pulse_outbox import schema
from pulse_outbox.errors import SchemaError, SettingsError
from pulse_outbox.schema import Migration, migrate
from tests.migrations.catalog import fingerprint
from tests.support.waiting import wait_until

RECORD = "insert into pulse.migration (version, name, oldest_code) values (2, '{}', '0.1.0');"


def shipped_and(name: str, text: str) -> list[Migration]:
    """This release's first migration and one more."""
    return [
        schema.find_migrations()[0],
        Migration(version=2, name=name, text=f"{text}\n{RECORD.format(name)}"),
    ]


def versions(dsn: str, name: str = "pulse") -> list[tuple]:
    with psycopg.connect(dsn) as conn:
        return conn.execute(schema.versions_query(name)).fetchall()


def test_a_fresh_database_gets_every_file(empty_dsn):
    lines: list[str] = []

    applied = migrate(empty_dsn, report=lines.append)

    assert applied == list(schema.find_migrations())
    assert [line.split("  ")[0] for line in lines] == [migration.label for migration in applied]
    assert lines[0].startswith("0001_outbox  applied in ")
    assert [row[3] for row in versions(empty_dsn)] == [migration.checksum for migration in applied]
    assert schema.check(empty_dsn).state == "current"


def test_the_second_time_there_is_nothing_to_do(empty_dsn):
    migrate(empty_dsn)
    before = fingerprint(empty_dsn, "pulse")
    lines: list[str] = []

    assert migrate(empty_dsn, report=lines.append) == []
    assert lines == [f"nothing to do: schema pulse is at {len(schema.find_migrations())}"]
    assert fingerprint(empty_dsn, "pulse") == before


def test_a_connection_of_the_callers_is_left_as_it_was(empty_dsn):
    with psycopg.connect(empty_dsn, row_factory=dict_row) as conn:
        migrate(conn)

        assert not conn.autocommit
        assert schema.check(conn).state == "current"
        conn.rollback()
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        held = conn.execute("select from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()")
        assert held.fetchall() == []
        with pytest.raises(SchemaError, match="without an open transaction"):
            migrate(conn)


def test_ten_processes_at_once_apply_each_file_once(empty_dsn):
    """Every replica of a deployment may run migrate when it starts."""
    command = [sys.executable, "-m", "pulse_outbox.cli", "migrate", "--dsn", empty_dsn]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(10)
    ]
    outputs = [process.communicate(timeout=50)[0] for process in processes]

    assert [process.returncode for process in processes] == [0] * 10, outputs
    assert sum(output.count("0001_outbox  applied") for output in outputs) == 1
    assert sum(output.count("nothing to do") for output in outputs) == 9


def test_ten_threads_at_once_apply_each_file_once(empty_dsn):
    """The same with a start that is closer together than processes manage."""
    together = threading.Barrier(10)

    def one(_: int) -> int:
        with psycopg.connect(empty_dsn) as conn:
            together.wait()
            return len(migrate(conn))

    with ThreadPoolExecutor(10) as pool:
        counts = list(pool.map(one, range(10)))

    assert sorted(counts) == [0] * 9 + [len(schema.find_migrations())]


def test_ten_databases_of_one_cluster_at_once_share_their_roles(lone_schema, make_database):
    """Roles belong to the cluster: creating them is a race that nobody may lose."""
    databases = [make_database() for _ in range(10)]
    together = threading.Barrier(10)

    def one(dsn: str) -> None:
        with psycopg.connect(dsn) as conn:
            together.wait()
            migrate(conn, schema=lone_schema)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(one, databases))

    first = fingerprint(databases[0], lone_schema)
    assert len(first["roles"]) == 3
    assert all(fingerprint(dsn, lone_schema) == first for dsn in databases[1:])


@pytest.mark.parametrize("failure", ["40001", "40P01", "XX000"])
def test_a_lost_race_is_run_again(empty_dsn, failure):
    """A file that failed for no fault of its own is one transaction: it can simply be repeated."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("create sequence public.tries")  # not rolled back with its transaction
    files = shipped_and(
        "racy",
        f"""
        do $$
        begin
          if nextval('public.tries') < 3 then
            raise exception 'tuple concurrently updated' using errcode = '{failure}';
          end if;
        end
        $$;
        """,
    )

    assert [migration.version for migration in migrate(empty_dsn, migrations=files)] == [1, 2]


@pytest.mark.parametrize("name", ["order", "user", "shop_2"])
def test_another_schema_name_holds_the_same_schema(empty_dsn, name):
    """Keywords too. The default name must not be needed anywhere: here it does not even exist."""
    migrate(empty_dsn, schema=name)
    with psycopg.connect(empty_dsn) as conn:
        function = sql.SQL("select {}.outbox_enqueue('order.paid', '{{}}')").format(sql.Identifier(name))
        conn.execute(function)
    other = fingerprint(empty_dsn, name)
    migrate(empty_dsn)

    default = fingerprint(empty_dsn, "pulse")

    def neutral(objects: dict[str, list[str]]) -> dict[str, list[str]]:
        for mark in ('"{}"', "{} |", "{}.", "{}_"):
            found, wanted = mark.format(name), mark.format("pulse").replace('"', "")
            objects = {
                kind: [text.replace(found, wanted) for text in texts] for kind, texts in objects.items()
            }
        return {kind: sorted(texts) for kind, texts in objects.items()}

    assert neutral(other) == neutral(default)
    leftovers = re.findall(r"pulse(?:\.|_(?!outbox\.))\w+", repr(other))
    assert leftovers == []


def test_a_hostile_schema_name_never_reaches_the_database():
    with pytest.raises(SettingsError, match="can't be the schema's name"):
        migrate("host=/nowhere", schema='x"; drop schema public cascade; --')


def test_a_failed_file_leaves_nothing_behind(empty_dsn):
    """And the message says where in the file it failed."""
    migrate(empty_dsn)
    before = fingerprint(empty_dsn, "pulse")
    files = shipped_and("broken", "create table pulse.extra ();\n\nselect nothing from pulse.nowhere;")

    with pytest.raises(
        SchemaError, match=r"0002_broken failed at line 3, nothing of it was applied: relation"
    ):
        migrate(empty_dsn, migrations=files)

    assert fingerprint(empty_dsn, "pulse") == before


def test_a_file_that_does_not_record_itself_is_refused(empty_dsn):
    """Otherwise it would be applied again the next time."""
    files = [
        schema.find_migrations()[0],
        Migration(version=2, name="silent", text="create table pulse.extra ();"),
    ]

    with pytest.raises(SchemaError, match="0002_silent does not record itself"):
        migrate(empty_dsn, migrations=files)

    assert [row[0] for row in versions(empty_dsn)] == [1]


def test_target_stops_early(empty_dsn):
    files = shipped_and("more", "create table pulse.extra ();")

    assert [migration.version for migration in migrate(empty_dsn, target=1, migrations=files)] == [1]
    assert schema.check(empty_dsn, migrations=files).pending == ("0002_more",)
    with pytest.raises(SettingsError, match="no migration 3"):
        migrate(empty_dsn, target=3, migrations=files)


def test_a_changed_file_is_refused(empty_dsn):
    """A database that was migrated with another text than the next one is a surprise in the making."""
    migrate(empty_dsn)
    first, *rest = schema.find_migrations()
    edited = Migration(version=1, name=first.name, text=first.text + "-- a harmless remark\n")

    with pytest.raises(SchemaError, match="0001_outbox was changed after it had been applied"):
        migrate(empty_dsn, migrations=[edited, *rest])


def test_a_file_that_psql_applied_is_accepted_and_gets_its_checksum(empty_dsn):
    """Plain `psql -f migrations/0001_outbox.sql` records itself without one."""
    first = schema.find_migrations()[0]
    with psycopg.connect(empty_dsn) as conn:
        conn.execute(first.text.encode())
    assert [row[3] for row in versions(empty_dsn)] == [None]

    migrate(empty_dsn, target=1)

    assert [row[3] for row in versions(empty_dsn)] == [first.checksum]


def test_a_gap_in_the_history_is_refused(empty_dsn):
    """Filling it later would apply files in an order that nobody has tried."""
    files = shipped_and("more", "create table pulse.extra ();")
    migrate(empty_dsn)
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("insert into pulse.migration (version, name, oldest_code) values (3, 'third', '0.1.0')")

    with pytest.raises(SchemaError, match=r"0002_more was never applied: .*--from 2 --to 2"):
        migrate(empty_dsn, migrations=files)


@pytest.fixture
def newer_dsn(empty_dsn):
    """A database that a later release has migrated."""
    migrate(empty_dsn)
    with psycopg.connect(empty_dsn) as conn:
        conn.execute(
            "insert into pulse.migration (version, name, oldest_code) values (999, 'later', '0.1.0')"
        )
    return empty_dsn


def test_a_newer_schema_that_supports_this_release_is_left_alone(newer_dsn):
    """A rolled back deployment runs migrate too."""
    lines: list[str] = []

    assert migrate(newer_dsn, report=lines.append) == []
    assert lines == ["nothing to do: schema pulse is at 999, newer than this release"]
    schema.require_supported(newer_dsn)


def test_a_schema_that_no_longer_supports_this_release_is_refused(newer_dsn):
    with psycopg.connect(newer_dsn) as conn:
        conn.execute("update pulse.migration set oldest_code = '99.1.0' where version = 999")

    for refusing in (migrate, schema.require_supported):
        with pytest.raises(SchemaError, match=r"pip install 'pulse-outbox>=99\.1\.0'"):
            refusing(newer_dsn)


def test_an_unmigrated_database_is_refused_with_the_command(empty_dsn):
    """And asking does not end the transaction of whoever asks."""
    with psycopg.connect(empty_dsn) as conn:
        with pytest.raises(SchemaError, match="pulse-outbox migrate"):
            schema.require_supported(conn)

        assert conn.execute("select 1").fetchone() == (1,)


def test_a_table_of_someone_elses_is_not_taken_for_ours(empty_dsn):
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("create schema pulse create table migration (id text)")

    with pytest.raises(SchemaError, match="choose another schema"):
        migrate(empty_dsn)


@contextmanager
def holding_a_lock(dsn: str, statement: str) -> Iterator[int]:
    """A session that forgot to commit; its process id."""
    with psycopg.connect(dsn, application_name="forgotten report") as conn:
        conn.execute(statement.encode())
        yield conn.info.backend_pid


def test_a_blocked_migration_gives_up_and_names_the_blocker(empty_dsn):
    """Everyone queues behind a migration that queues, so it must not wait for long."""
    migrate(empty_dsn)
    files = shipped_and("alter", "alter table pulse.outbox add column extra integer;")
    lines: list[str] = []

    with (
        holding_a_lock(empty_dsn, "select count(*) from pulse.outbox") as pid,
        pytest.raises(SchemaError) as refusal,
    ):
        migrate(empty_dsn, migrations=files, lock_timeout=0.05, report=lines.append)

    assert "0002_alter gave up after 4 waits of 0.05 s for a lock" in str(refusal.value)
    assert f"pid {pid} " in str(refusal.value)
    assert "forgotten report, idle in transaction" in str(refusal.value)
    assert "on pulse.outbox" in str(refusal.value)
    assert f"pg_terminate_backend({pid})" in str(refusal.value)
    assert len(lines) == 3
    assert schema.check(empty_dsn, migrations=files).pending == ("0002_alter",)


def test_a_blocked_migration_goes_on_when_the_blocker_ends(empty_dsn):
    migrate(empty_dsn)
    files = shipped_and("alter", "alter table pulse.outbox add column extra integer;")

    with psycopg.connect(empty_dsn) as blocker:
        blocker.execute("select count(*) from pulse.outbox")
        # The first complaint is the sign to let go.
        applied = migrate(
            empty_dsn, migrations=files, lock_timeout=0.05, report=lambda line: blocker.rollback()
        )

    assert [migration.label for migration in applied] == ["0002_alter"]


def test_waiting_for_another_migrate_is_said_and_does_not_block_the_server(empty_dsn):
    """Waiting inside the server would hold a snapshot, for which `create index concurrently` waits."""
    lines: list[str] = []
    with psycopg.connect(empty_dsn, autocommit=True) as other, ThreadPoolExecutor(1) as pool:
        other.execute("select pg_advisory_lock(%s)", (schema._lock_key("pulse"),))
        waiting = pool.submit(migrate, empty_dsn, report=lines.append)
        wait_until(lambda: lines, what="the waiting migrate says so")
        waits = other.execute("select count(*) from pg_locks where not granted").fetchone()
        other.execute("select pg_advisory_unlock_all()")

        assert waiting.result(timeout=10) == list(schema.find_migrations())
    assert lines[0] == "waiting for another migrate of schema pulse"
    assert waits == (0,)


def test_another_migrate_that_never_ends_is_named(empty_dsn, monkeypatch):
    monkeypatch.setattr(schema, "WAIT_FOR_OTHERS", timedelta(0))
    with psycopg.connect(empty_dsn, autocommit=True, application_name="stuck deploy") as other:
        other.execute("select pg_advisory_lock(%s)", (schema._lock_key("pulse"),))

        with pytest.raises(SchemaError, match=rf"pid {other.info.backend_pid}, .*stuck deploy"):
            migrate(empty_dsn)


def test_settings_of_the_role_do_not_matter(empty_dsn):
    """Many installations give their roles a short statement_timeout and a search_path."""
    options = "-c statement_timeout=30 -c search_path=public -c default_transaction_isolation=serializable"
    files = shipped_and("look", "create table pulse.seen as select current_setting('search_path') as path;")

    migrate(make_conninfo(empty_dsn, options=options), migrations=files)

    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select path from pulse.seen").fetchall() == [("pg_catalog, pg_temp",)]


def test_a_pooler_is_refused(empty_dsn, monkeypatch):
    """PgBouncer gives the lock to whichever server connection happens to be free."""
    monkeypatch.setattr(psycopg.ConnectionInfo, "backend_pid", 4711)

    with pytest.raises(SchemaError, match="connection pooler"):
        migrate(empty_dsn)


def test_lock_timeout_must_be_a_limit(empty_dsn):
    """0 means "for ever" to PostgreSQL."""
    with pytest.raises(SettingsError, match="lock_timeout"):
        migrate(empty_dsn, lock_timeout=0)


@pytest.fixture
def plain_user_dsn(lone_schema, lone_dsn, server_dsn, request):
    """The database of `lone_dsn` for a user who may create schemas and no roles."""
    user = f"{lone_schema}_user"
    with psycopg.connect(lone_dsn, autocommit=True) as conn:
        [database] = conn.execute("select current_database()").fetchone() or [""]
        name, who = sql.Identifier(database), sql.Identifier(user)
        conn.execute(sql.SQL("create role {} login password 'plain'").format(who))
        conn.execute(sql.SQL("grant create on database {} to {}").format(name, who))
    yield make_conninfo(lone_dsn, user=user, password="plain")
    with psycopg.connect(lone_dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("drop owned by {} cascade").format(who))
        conn.execute(sql.SQL("drop role {}").format(who))


def test_a_user_who_may_not_create_roles_gets_the_sql_for_an_administrator(
    lone_schema, lone_dsn, plain_user_dsn, make_database
):
    """The schema is there all the same, and with that SQL it is the same schema as an administrator's."""
    lines: list[str] = []
    migrate(plain_user_dsn, schema=lone_schema, report=lines.append)
    assert lines[0].startswith("0001_outbox  applied")
    [said] = lines[1:]
    assert all(role in said.splitlines()[0] for role in schema.role_names(lone_schema))

    with psycopg.connect(lone_dsn, autocommit=True) as administrator:
        administrator.execute(said.partition("\n\n")[2].encode())

    lines.clear()
    migrate(plain_user_dsn, schema=lone_schema, report=lines.append)
    assert lines == [f"nothing to do: schema {lone_schema} is at {len(schema.find_migrations())}"]
    other_dsn = make_database()
    migrate(other_dsn, schema=lone_schema)
    assert same_but_user(fingerprint(lone_dsn, lone_schema)) == same_but_user(
        fingerprint(other_dsn, lone_schema)
    )


def same_but_user(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return found | {"roles": [role for role in found["roles"] if "_user |" not in role]}


def test_roles_that_came_later_are_let_in_by_the_next_migrate(lone_schema, lone_dsn, plain_user_dsn):
    """An administrator who created the roles and forgot the second line."""
    migrate(plain_user_dsn, schema=lone_schema)
    roles = schema.role_names(lone_schema)
    with psycopg.connect(lone_dsn, autocommit=True) as administrator:
        for role in roles:
            administrator.execute(sql.SQL("create role {}").format(sql.Identifier(role)))
        assert schema.check_roles(administrator, lone_schema).ungranted == roles
    lines: list[str] = []

    migrate(plain_user_dsn, schema=lone_schema, report=lines.append)

    assert lines[1:] == [f"granted: {', '.join(roles)}"]
    with psycopg.connect(lone_dsn) as conn:
        assert schema.check_roles(conn, lone_schema) == schema.RoleState(missing=(), ungranted=())


def test_a_user_who_may_not_create_schemas_is_told_what_to_grant(lone_schema, lone_dsn, plain_user_dsn):
    with psycopg.connect(lone_dsn, autocommit=True) as conn:
        [database] = conn.execute("select current_database()").fetchone() or [""]
        conn.execute(
            sql.SQL("revoke create on database {} from {}").format(
                sql.Identifier(database), sql.Identifier(f"{lone_schema}_user")
            )
        )

    with pytest.raises(SchemaError, match=f"grant create on database {database} to {lone_schema}_user"):
        migrate(plain_user_dsn, schema=lone_schema)
