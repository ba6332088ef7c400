"""`pulse-outbox migrate` and what all commands share: exit codes, and errors of one line."""

from __future__ import annotations

import json
import subprocess
import sys

import psycopg
import pytest

from pulse_outbox import __version__, cli, schema


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command in this process; exit code, standard output, standard error."""
    for name in ("PULSE_OUTBOX_DSN", "PULSE_OUTBOX_SCHEMA", "PULSE_OUTBOX_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as exit_:  # argparse leaves this way
            code = int(exit_.code or 0)
        return code, *capsys.readouterr()

    return call


def assert_one_line(text: str) -> None:
    assert text.count("\n") == 1, text
    assert text.startswith("pulse-outbox: ")
    assert "Traceback" not in text


def test_migrate_says_one_line_for_each_file(run, empty_dsn):
    code, out, err = run("migrate", "--dsn", empty_dsn)
    again = run("migrate", "--dsn", empty_dsn)

    newest = len(schema.find_migrations())
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("0001_outbox  applied in ")
    assert len(out.splitlines()) == newest
    assert again == (0, f"nothing to do: schema pulse is at {newest}\n", "")


def test_check_tells_ci_by_its_exit_code(run, empty_dsn):
    before = run("migrate", "--check", "--dsn", empty_dsn)
    run("migrate", "--dsn", empty_dsn)
    after = run("migrate", "--check", "--dsn", empty_dsn)

    code, out, err = before
    assert code == 1
    assert "0001_outbox  pending" in out
    assert_one_line(err)
    assert "run `pulse-outbox migrate`" in err
    assert after == (0, f"schema pulse is at {len(schema.find_migrations())}: current\n", "")


def test_check_changes_nothing(run, empty_dsn):
    run("migrate", "--check", "--dsn", empty_dsn)

    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select to_regnamespace('pulse')").fetchone() == (None,)


def test_check_refuses_a_changed_file(run, empty_dsn):
    run("migrate", "--dsn", empty_dsn)
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("update pulse.migration set checksum = repeat('0', 64) where version = 1")

    for arguments in (["migrate", "--check"], ["migrate"]):
        code, _, err = run(*arguments, "--dsn", empty_dsn)
        assert code == 1
        assert_one_line(err)
        assert "0001_outbox was changed" in err


def test_check_speaks_json(run, empty_dsn):
    code, out, err = run("migrate", "--check", "--json", "--dsn", empty_dsn)

    state = json.loads(out)
    assert (code, err) == (1, "")
    assert (state["state"], state["installed"], state["pending"][0]) == ("missing", 0, "0001_outbox")


def test_the_database_and_the_schema_come_from_the_environment(run, empty_dsn, monkeypatch):
    monkeypatch.setenv("PULSE_OUTBOX_DSN", empty_dsn)
    monkeypatch.setenv("PULSE_OUTBOX_SCHEMA", "shop")

    assert run("migrate")[0] == 0
    assert run("migrate", "--check")[1].startswith("schema shop is at ")
    assert run("migrate", "--check", "--schema", "pulse")[0] == 1  # the option wins


def test_sql_needs_no_database(run):
    code, out, err = run("migrate", "--sql", "--schema", "shop", "--from", "1", "--to", "1")

    assert (code, err) == (0, "")
    assert out == schema.sql(1, 1, "shop") + "\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["migrate"],
        ["migrate", "--dsn", "nonsense"],
        ["migrate", "--dsn", "host=x", "--schema", 'x"; drop table y'],
        ["migrate", "--dsn", "host=x", "--schema", ""],
        ["migrate", "--dsn", "host=x", "--lock-timeout", "0"],
        ["migrate", "--sql", "--from", "7000"],
        ["migrate", "--from", "1"],
        ["migrate", "--json"],
        ["migrate", "--check", "--to", "1"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, arguments):
    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert_one_line(err)


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["migrate", "--sql", "--check"], ["migrate", "--to", "x"]]
)
def test_what_argparse_refuses_has_the_same_exit_code(run, arguments):
    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://app:hush-hush@127.0.0.1:1/shop",
        "postgresql://app:hush@hush@127.0.0.1:1/shop",
        "postgresql://app:hush/hush@127.0.0.1:1/shop",
        "postgresql://app:hush%2Fhush@127.0.0.1:1/shop",
        "postgresql://127.0.0.1:1/shop?user=app&password=hush",
        "postgresql://app:hush:hush@127.0.0.1:1/sh op",
        "host=127.0.0.1 port=1 password='hush hush'",
        "host=127.0.0.1 port=hush password=hush",
        "password = hush oops",
    ],
)
def test_no_message_holds_a_password(run, dsn):
    """Unescaped characters make libpq take a piece of the password for a host, and name it."""
    code, out, err = run("migrate", "--dsn", dsn)

    assert code in (1, 2)
    assert_one_line(err)
    assert "hush" not in out + err


def test_an_unreachable_database_is_one_line_with_the_remedy(run):
    code, out, err = run("migrate", "--dsn", "postgresql://app@127.0.0.1:1/shop")

    assert (code, out) == (1, "")
    assert_one_line(err)
    assert "cannot reach the database: " in err
    assert "check --dsn" in err


def test_a_wrong_user_is_one_line_too(run, empty_dsn):
    code, _, err = run(
        "migrate", "--dsn", psycopg.conninfo.make_conninfo(empty_dsn, user="nobody_of_that_name")
    )

    assert code == 1
    assert_one_line(err)
    assert "nobody_of_that_name" in err


def test_an_unexpected_error_is_one_line_unless_asked_for(run, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("what\nnow")

    monkeypatch.setattr(schema, "migrate", broken)
    code, _, err = run("migrate", "--dsn", "host=x")

    assert code == 1
    assert_one_line(err)
    assert "ZeroDivisionError: what now" in err
    monkeypatch.setenv("PULSE_OUTBOX_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run("migrate", "--dsn", "host=x")


def test_an_interrupt_is_quiet(run, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(schema, "migrate", interrupted)

    assert run("migrate", "--dsn", "host=x") == (130, "", "")


def test_a_closed_pipe_is_quiet():
    """`pulse-outbox migrate --sql | head -1` has seen enough."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pulse_outbox.cli", "migrate", "--sql"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    complaints = process.stderr.read()
    process.stderr.close()

    assert process.wait() == 141
    assert complaints == ""


def test_help_shows_the_commands_and_examples(run):
    code, out, _ = run("--help")

    assert code == 0
    assert "migrate" in out
    assert "examples:" in out
    assert "examples:" in run("migrate", "--help")[1]
    assert run("--version") == (0, f"pulse-outbox {__version__}\n", "")
    assert run()[0] == 2


def test_help_loads_no_command():
    """It should come at once: psycopg alone takes a quarter of a second to import."""
    code = "import sys; from pulse_outbox import cli; cli.build_parser(['--help']); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"psycopg", "pydantic", "pulse_outbox.schema", "pulse_outbox.embedded"} & set(loaded)
