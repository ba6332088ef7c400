"""Files, names and versions: what needs no database."""

from __future__ import annotations

import re

import pytest

from pulse_outbox import __version__, schema
from pulse_outbox.errors import SchemaError, SettingsError
from pulse_outbox.schema import Migration, judge_versions, render


def test_this_release_ships_its_migrations():
    """Found in a checkout here; the packaging tests look into the wheel."""
    first, *_ = schema.find_migrations()

    assert first.label == "0001_outbox"


def test_every_migration_supports_this_release():
    """A file that states a newer oldest_code than the release it ships with would lock its own users out."""
    stated = {
        migration.label: re.findall(
            r"insert into pulse\.migration .*?values \((\d+), '(\w+)', '([\d.]+)'\)", migration.text
        )
        for migration in schema.find_migrations()
    }

    for migration in schema.find_migrations():
        [(version, name, oldest_code)] = stated[migration.label]
        assert f"{int(version):04d}_{name}" == migration.label
        assert schema._release(oldest_code) <= schema._release(__version__)


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["0001_outbox.sql", "0003_later.sql"], "not numbered 1 to 2"),
        (["0002_later.sql"], "not numbered 1 to 1"),
        (["0001_a.sql", "0001_b.sql"], "two migrations have the number 0001"),
        (["1_outbox.sql"], "is not named like a migration"),
        ([], "no migrations"),
    ],
)
def test_a_folder_with_gaps_or_strays_is_refused(tmp_path, names, complaint):
    """Two branches that both added 0002 must not reach a database."""
    for name in names:
        (tmp_path / name).touch()

    with pytest.raises(SchemaError, match=complaint):
        schema.find_migrations(tmp_path)


def test_a_checksum_does_not_depend_on_line_ends(tmp_path):
    """A checkout on Windows may have changed them."""
    unix, windows = tmp_path / "unix", tmp_path / "windows"
    for folder, text in ((unix, b"select 1;\nselect 2;\n"), (windows, b"select 1;\r\nselect 2;\r\n")):
        folder.mkdir()
        (folder / "0001_outbox.sql").write_bytes(text)

    [one], [other] = schema.find_migrations(unix), schema.find_migrations(windows)

    assert one.checksum == other.checksum


@pytest.mark.parametrize("name", ["pulse", "order", "_x", "a" * 41, "shop_2"])
def test_ordinary_schema_names_are_accepted(name):
    assert schema.check_schema_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "Pulse", "2nd", "pg_pulse", "a" * 42, 'x"; drop schema public; --', "a.b", "a b", "pulse\n", "é", "$x",
     "information_schema"],
)  # fmt: skip
def test_other_schema_names_are_refused(name):
    """The name becomes part of SQL text."""
    with pytest.raises(SettingsError):
        schema.check_schema_name(name)


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("create schema if not exists pulse;", 'create schema if not exists "order";'),
        ("select * from pulse.outbox o", 'select * from "order".outbox o'),
        ("where nspname = 'pulse'", "where nspname = 'order'"),
        ("to_regclass('pulse.outbox')", "to_regclass('\"order\".outbox')"),
        ('"pulse".outbox', '"order".outbox'),
        ("grant usage on schema pulse to pulse_producer, pulse_dispatcher;",
         'grant usage on schema "order" to order_producer, order_dispatcher;'),
        ("pg_notify('pulse_outbox_wake', '')", "pg_notify('order_outbox_wake', '')"),
        ("rolname = 'pulse_operator'", "rolname = 'order_operator'"),
        ("-- see pulse-outbox migrate, pulse_outbox.schema", "-- see pulse-outbox migrate, pulse_outbox.schema"),
        ("impulse.x, pulses.x, o.pulse, $pulse$, pulse_producers",
         "impulse.x, pulses.x, o.pulse, $pulse$, pulse_producers"),
    ],
)  # fmt: skip
def test_another_schema_name_replaces_whole_words(text, rendered):
    assert render(Migration(version=1, name="x", text=text), "order") == rendered
    assert render(Migration(version=1, name="x", text=text), "pulse") == text


FILES = tuple(Migration(version=n, name=f"step{n}", text=f"select {n};") for n in (1, 2))


def rows(*versions: int, oldest_code: str = "0.1.0") -> list[tuple[int, str, str, None]]:
    return [(version, f"step{version}", oldest_code, None) for version in versions]


@pytest.mark.parametrize(
    ("installed", "state", "remedy"),
    [
        (rows(), "missing", "pulse-outbox migrate"),
        (rows(1), "behind", "pulse-outbox migrate"),
        (rows(1, 2), "current", None),
        (rows(1, 2, 3), "ahead-supported", None),
        (rows(1, 2, 3, oldest_code="0.2.0"), "ahead-unsupported", "pip install 'pulse-outbox>=0.2.0'"),
        (rows(1, 2, 3, oldest_code="0.10.0"), "ahead-unsupported", "pip install 'pulse-outbox>=0.10.0'"),
    ],
)
def test_the_schema_says_which_code_may_use_it(installed, state, remedy):
    """The previous release runs on the new schema; anything else is refused with the command to run."""
    judged = judge_versions(installed, migrations=FILES, code="0.1.0")

    assert judged.state == state
    if remedy is None:
        judged.require_supported()
    else:
        with pytest.raises(SchemaError, match=re.escape(remedy)):
            judged.require_supported()


def test_the_command_to_run_names_another_schema():
    with pytest.raises(SchemaError, match="pulse-outbox migrate --schema shop"):
        judge_versions([], schema="shop", migrations=FILES).require_supported()


def test_a_changed_file_is_noticed_and_a_missing_checksum_is_not():
    """Files applied with plain psql have no checksum."""
    first, second = FILES
    known = [(1, "step1", "0.1.0", first.checksum), (2, "step2", "0.1.0", "0" * 64)]

    judged = judge_versions(known, migrations=FILES)

    assert judged.changed == (second.label,)
    with pytest.raises(SchemaError, match="0002_step2 was changed"):
        judged.require_unchanged()
    judge_versions(rows(1, 2), migrations=FILES).require_unchanged()


def test_a_version_with_another_name_counts_as_changed():
    """Two branches, two files 0002, and the other one reached this database."""
    judged = judge_versions([*rows(1), (2, "other", "0.1.0", None)], migrations=FILES)

    assert judged.changed == ("0002_step2",)


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 3), (2, 1)])
def test_printing_what_is_not_there_is_refused(first, last):
    with pytest.raises(SettingsError, match="ships 1 to 2"):
        schema.sql(first, last, migrations=FILES)


def test_a_range_of_files_is_printed():
    text = schema.sql(2, 2, migrations=FILES)

    assert "select 2;" in text
    assert "select 1;" not in text
    assert text.count("begin;\n") == text.count("commit;\n") == 1


def test_without_transactions_nothing_outlives_the_text():
    """Inside Alembic's transaction a search_path of ours would hide the user's own tables."""
    text = schema.sql(migrations=FILES, transactions=False)

    assert not re.search("^(begin|commit|set) ", text.replace(";", " "), re.MULTILINE)
