"""The same schema by every way of applying the files, and each way knows what another has done."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import alembic.command
import alembic.config
import alembic.util
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from pulse_outbox import schema
from pulse_outbox.cli import main
from pulse_outbox.schema import Migration, migrate
from tests.connections.drivers import url_of, use_django
from tests.migrations.catalog import fingerprint
from tests.migrations.test_print import psql
from tests.support.testbed import Testbed

NEWEST = len(schema.find_migrations())
RECORD = "insert into pulse.migration (version, name, oldest_code) values ({0}, '{1}', '0.1.0');"
NEXT = Migration(
    version=NEWEST + 1,
    name="more",
    # With what a driver or a library might take for a parameter.
    text="create table pulse.extra ();\ncomment on table pulse.extra is '100 % :name ::x $1 %s';\n"
    + RECORD.format(NEWEST + 1, "more"),
)


# A project of Alembic's, as small as it can be

ENV = """
    from alembic import context

    config = context.config
    if context.is_offline_mode():
        context.configure(dialect_name="postgresql", literal_binds=True)
    else:
        context.configure(connection=config.attributes["connection"])
    with context.begin_transaction():
        context.run_migrations()
"""
REVISION = """
    import pulse_outbox.alembic
    from alembic import op

    revision, down_revision = "{revision}", {before!r}

    def upgrade() -> None:
        pulse_outbox.alembic.upgrade({to}, schema="{schema}")
        op.execute("create table of_the_application_{revision} ()")

    def downgrade() -> None:
        op.execute("drop table of_the_application_{revision}")
"""


class Project:
    """Revisions of an application, each of which wants another number of ours."""

    def __init__(self, folder: Path, name: str, *numbers: int) -> None:
        (folder / "versions").mkdir(parents=True)
        (folder / "env.py").write_text(dedent(ENV))
        before = None
        for number in numbers:
            text = dedent(REVISION).format(revision=f"r{number}", before=before, to=number, schema=name)
            (folder / "versions" / f"r{number}.py").write_text(text)
            before = f"r{number}"
        self.output = io.StringIO()
        self.config = alembic.config.Config(output_buffer=self.output)
        self.config.set_main_option("script_location", str(folder))
        self.config.set_main_option("path_separator", "os")

    def upgrade(self, connection: sa.Connection, to: str = "head") -> None:
        self.config.attributes["connection"] = connection
        alembic.command.upgrade(self.config, to)

    def upgrade_on(self, dsn: str, to: str = "head", driver: str = "psycopg") -> None:
        engine = sa.create_engine(url_of(dsn, driver), poolclass=NullPool)
        with engine.begin() as connection:
            self.upgrade(connection, to)

    def printed(self, to: str = "head") -> str:
        alembic.command.upgrade(self.config, to, sql=True)
        return self.output.getvalue()


def outbox_command(*arguments: str) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        assert main(arguments) == 0
    return output.getvalue()


# The routes: each brings the files into an empty database.


def by_command(dsn: str, name: str, folder: Path) -> None:
    outbox_command("migrate", "--dsn", dsn, "--schema", name)


def by_psql(dsn: str, name: str, folder: Path) -> None:
    text = folder / "printed.sql"
    text.write_text(outbox_command("migrate", "--sql", "--schema", name))
    assert "ERROR" not in psql(dsn, text).stderr


def by_alembic(driver: str) -> Callable[[str, str, Path], None]:
    def route(dsn: str, name: str, folder: Path) -> None:
        Project(folder / "alembic", name, NEWEST).upgrade_on(dsn, driver=driver)

    return route


def by_alembic_on_asyncpg(dsn: str, name: str, folder: Path) -> None:
    """As env.py of its async template does it."""
    project = Project(folder / "alembic", name, NEWEST)

    async def upgrade() -> None:
        engine = create_async_engine(url_of(dsn, "asyncpg"), poolclass=NullPool)
        async with engine.begin() as connection:
            await connection.run_sync(project.upgrade)

    asyncio.run(upgrade())


def by_alembic_offline(dsn: str, name: str, folder: Path) -> None:
    text = folder / "offline.sql"
    text.write_text(Project(folder / "alembic", name, NEWEST).printed())
    assert "ERROR" not in psql(dsn, text).stderr


def by_django(dsn: str, name: str, folder: Path) -> None:
    call_django(dsn, name, "migrate", "pulse_outbox")


def by_djangos_sqlmigrate(dsn: str, name: str, folder: Path) -> None:
    text = folder / "sqlmigrate.sql"
    labels = [migration.label for migration in schema.find_migrations()]
    text.write_text(
        "\n".join(call_django(dsn, name, "sqlmigrate", "pulse_outbox", label) for label in labels)
    )
    assert "ERROR" not in psql(dsn, text).stderr


def call_django(dsn: str, name: str, command: str, *arguments: str, **options: Any) -> str:
    from django.core.management import call_command
    from django.db import connection
    from django.test import override_settings

    use_django(dsn)
    output = io.StringIO()
    with override_settings(PULSE_OUTBOX_SCHEMA=name):
        try:
            call_command(command, *arguments, stdout=output, no_color=True, **options)
        finally:
            connection.close()
    return output.getvalue()


ROUTES = {
    "command": by_command,
    "psql": by_psql,
    "alembic": by_alembic("psycopg"),
    "alembic-psycopg2": by_alembic("psycopg2"),
    "alembic-pg8000": by_alembic("pg8000"),
    "alembic-asyncpg": by_alembic_on_asyncpg,
    "alembic-offline": by_alembic_offline,
    "django": by_django,
    "django-sqlmigrate": by_djangos_sqlmigrate,
}


# A keyword, so that a name that nobody quoted is noticed.
NAME = "order"


@pytest.fixture(scope="module")
def wanted(testbed: Testbed) -> dict[str, list[str]]:
    """What the library's own `migrate` makes."""
    with testbed.database(migrated=False) as dsn:
        migrate(dsn, schema=NAME)
        return fingerprint(dsn, NAME)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_leaves_the_same_schema(empty_dsn, tmp_path, route, wanted):
    """Object by object; and whoever looks afterwards finds it applied."""
    ROUTES[route](empty_dsn, NAME, tmp_path)

    assert fingerprint(empty_dsn, NAME) == wanted
    assert schema.check(empty_dsn, NAME).state == "current"
    assert migrate(empty_dsn, schema=NAME) == []
    assert "current" in outbox_command("migrate", "--check", "--dsn", empty_dsn, "--schema", NAME)


@pytest.mark.parametrize("route", [route for route in ROUTES if route not in ("command", "psql")])
def test_a_route_leaves_alone_what_another_has_applied(dsn, tmp_path, route):
    """An application that begins to keep its migrations together finds the schema there."""
    before = fingerprint(dsn, "pulse")

    ROUTES[route](dsn, "pulse", tmp_path)

    assert fingerprint(dsn, "pulse") == before


# One statement


@pytest.fixture
def one_more(monkeypatch):
    """A release that ships one more file."""
    files = (*schema.find_migrations(), NEXT)
    monkeypatch.setattr(schema, "find_migrations", lambda: files)
    return files


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
def test_a_revision_goes_as_far_as_its_number(empty_dsn, tmp_path, one_more, driver):
    project = Project(tmp_path / "alembic", "pulse", NEWEST, NEWEST + 1)

    project.upgrade_on(empty_dsn, f"r{NEWEST}", driver)
    assert schema.check(empty_dsn).pending == (NEXT.label,)
    project.upgrade_on(empty_dsn, driver=driver)

    assert schema.check(empty_dsn).state == "current"
    with psycopg.connect(empty_dsn) as conn:
        comment = conn.execute("select obj_description('pulse.extra'::regclass, 'pg_class')").fetchone()
    assert comment == ("100 % :name ::x $1 %s",)


def test_a_failed_revision_takes_the_files_with_it(empty_dsn, tmp_path):
    """They are part of its transaction."""
    project = Project(tmp_path / "alembic", "pulse", NEWEST)
    engine = sa.create_engine(url_of(empty_dsn, "psycopg"), poolclass=NullPool)

    with suppress(KeyError), engine.begin() as connection:
        project.upgrade(connection)
        raise KeyError

    assert schema.check(empty_dsn).state == "missing"


def test_downgrading_leaves_the_outbox_and_upgrading_finds_it(empty_dsn, tmp_path):
    project = Project(tmp_path / "alembic", "pulse", NEWEST)
    project.upgrade_on(empty_dsn)
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("select pulse.outbox_enqueue('t', '{}')")
    engine = sa.create_engine(url_of(empty_dsn, "psycopg"), poolclass=NullPool)
    with engine.begin() as connection:
        project.config.attributes["connection"] = connection
        alembic.command.downgrade(project.config, "base")
    project.upgrade_on(empty_dsn)

    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select count(*) from pulse.outbox").fetchone() == (1,)


@pytest.mark.parametrize(("to", "name"), [(NEWEST + 7, "pulse"), (NEWEST, "x; drop schema public")])
def test_a_number_or_name_that_can_not_be_is_refused(empty_dsn, tmp_path, to, name):
    """As Alembic's own command line shows errors: one line."""
    project = Project(tmp_path / "alembic", name, to)

    with pytest.raises(alembic.util.CommandError, match=r"there is no migration|can't be the schema's name"):
        project.upgrade_on(empty_dsn)


def test_the_statement_leaves_the_transactions_settings_alone(empty_dsn):
    """The application's own revisions come after it in the same transaction."""
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("set local search_path = public, pg_temp; set local lock_timeout = '7s'")
        for _ in range(2):
            conn.execute(schema.statement(1).encode())

            found = conn.execute("select current_setting('search_path'), current_setting('lock_timeout')")
            assert found.fetchone() == ("public, pg_temp", "7s")


def test_the_statement_trusts_no_search_path(empty_dsn):
    """What somebody put before the built-in functions is not called."""
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("""
            create schema hostile;
            create function hostile.to_regclass(text) returns regclass language plpgsql
                as $$ begin raise exception 'called'; end $$;
            create function hostile.set_config(text, text, boolean) returns text language plpgsql
                as $$ begin raise exception 'called'; end $$;
            set local search_path = hostile, pg_catalog
        """)
        conn.execute(schema.statement(1).encode())
        conn.commit()

    assert schema.check(empty_dsn).installed == 1


def test_the_statement_refuses_to_run_out_of_turn(empty_dsn, one_more):
    with psycopg.connect(empty_dsn) as conn, pytest.raises(psycopg.Error, match="schema pulse is at 0"):
        conn.execute(schema.statement(NEWEST + 1).encode())


def test_the_statement_waits_for_another_migrator(empty_dsn):
    with psycopg.connect(empty_dsn, autocommit=True) as deployment, psycopg.connect(empty_dsn) as by_hand:
        deployment.execute("select pg_advisory_lock(%s)", (schema._lock_key("pulse"),))
        by_hand.execute("set lock_timeout = 50")

        with pytest.raises(psycopg.errors.LockNotAvailable):
            by_hand.execute(schema.statement(1).encode())


# Django


def test_every_file_has_its_django_migration():
    """A new file of migrations/ wants a module of three lines in pulse_outbox/django/migrations/."""
    import pulse_outbox.django.migrations

    folder = Path(pulse_outbox.django.migrations.__file__).parent
    found = sorted(file.stem for file in folder.glob("[0-9]*.py"))

    assert found == [migration.label for migration in schema.find_migrations()]
    for number, label in enumerate(found):
        module: Any = import_module(f"pulse_outbox.django.migrations.{label}")
        assert module.Migration.dependencies == [("pulse_outbox", before) for before in found[:number][-1:]]


def test_djangos_plan_says_what_it_would_do(empty_dsn):
    assert "Apply file 0001 of pulse-outbox" in call_django(empty_dsn, "pulse", "migrate", plan=True)
    assert call_django(empty_dsn, "pulse", "makemigrations", check_changes=True) == "No changes detected\n"


def test_django_refuses_the_way_back(empty_dsn):
    """Events would be lost; the text names the commands for those who mean it."""
    from django.db.migrations.exceptions import IrreversibleError

    call_django(empty_dsn, "pulse", "migrate")

    with pytest.raises(
        IrreversibleError, match=r'`drop schema "pulse" cascade`, then `manage.py migrate --fake'
    ):
        call_django(empty_dsn, "pulse", "migrate", "pulse_outbox", "zero")
    assert schema.check(empty_dsn).state == "current"


def test_django_asks_the_routers(empty_dsn):
    """A database that isn't the outbox's gets nothing."""
    from django.test import override_settings

    with override_settings(DATABASE_ROUTERS=[NotHere()]):
        call_django(empty_dsn, "pulse", "migrate", "pulse_outbox")

    assert schema.check(empty_dsn).state == "missing"


class NotHere:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if app_label == "pulse_outbox" else None
