"""The pytest plugin in projects of its own: real runs of pytest, as an application's developer starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from pulse_outbox.testing.sharing import open_desk

SHOP = """
    from pulse_outbox import Event, Outbox

    outbox = Outbox()
    handled = []

    @outbox.handler("order.paid")
    def pay(event: Event[dict]) -> None:
        handled.append(event.payload["order_id"])
"""


@pytest.fixture
def run_pytest(tmp_path: Path, server_dsn: str):
    """Writes the project's files and runs its tests on this run's server."""

    def run(*arguments: str, **files: str) -> str:
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(dedent(text))
        quiet = ["-p", "no:cacheprovider", "-p", "pulse_outbox.pytest_plugin", "-q", "-rA"]
        environment = {**os.environ, "PULSE_OUTBOX_TEST_DSN": server_dsn, "PYTHONPATH": "."}
        environment.pop("PYTEST_XDIST_WORKER", None)
        environment.pop("PYTEST_ADDOPTS", None)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *quiet, *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout

    return run


def test_xdists_workers_share_one_server_and_one_template(run_pytest):
    """The application is named in pytest's settings; the second worker finds the template made."""
    shown = run_pytest(
        "-n",
        "2",
        pytest__ini="[pytest]\npulse_outbox = shop:outbox\n",
        shop__py=SHOP,
        conftest__py="""
            import os
            import psycopg, pytest

            @pytest.fixture(scope="session")
            def outbox_prepare():
                def prepare(dsn):
                    with psycopg.connect(dsn) as conn:
                        conn.execute("create table prepared as select %s as by", (os.getpid(),))
                return prepare
        """,
        test_shop__py="""
            import os
            import psycopg, pytest
            from shop import handled, outbox

            @pytest.mark.parametrize("number", range(4))
            def test_pays(outbox_testkit, outbox_dsn, outbox_databases, number):
                with psycopg.connect(outbox_dsn) as conn:
                    outbox.enqueue(conn, "order.paid", {"order_id": number})
                    [(by,)] = conn.execute("select by from prepared").fetchall()
                [ran] = outbox_testkit.drain()
                assert handled[-1] == number
                print("seen:", outbox_databases.prefix, by, os.environ["PYTEST_XDIST_WORKER"])
        """,
    )

    seen = {line for line in shown.splitlines() if line.startswith("seen:")}
    assert "4 passed" in shown, shown
    assert len({line.split()[1] for line in seen}) == 1  # one server
    assert len({line.split()[2] for line in seen}) == 1  # prepared once
    assert len({line.split()[3] for line in seen}) == 2  # by two workers


def test_a_suite_that_asks_for_nothing_pays_nothing(run_pytest, tmp_path):
    """Neither psycopg nor pydantic is imported, in xdist's controller no more than in its worker."""
    shown = run_pytest(
        "-n",
        "1",
        "-s",
        conftest__py="""
            import sys

            def pytest_unconfigure(config):
                heavy = {"psycopg", "pydantic", "structlog"} & sys.modules.keys()
                with open("worker" if hasattr(config, "workerinput") else "controller", "w") as file:
                    file.write(f"heavy: {sorted(heavy)}")
        """,
        test_nothing__py="""
            def test_nothing():
                pass
        """,
    )

    assert "1 passed" in shown, shown
    assert [(tmp_path / name).read_text() for name in ("controller", "worker")] == ["heavy: []"] * 2


def test_workers_have_servers_of_their_own_where_no_socket_can_be(run_pytest, tmp_path, monkeypatch):
    """A unix socket's path has room for about a hundred characters; and the plugin is in every run of the project."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    shown = run_pytest("-n", "1", test_it__py="def test_it(outbox_dsn): pass")

    assert "1 passed" in shown, shown
    assert not list(deep.glob("pulse-*"))


def test_there_is_no_desk_without_unix_sockets(monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(socket, "AF_UNIX")

    assert open_desk("pulse") is None


def test_an_outbox_that_nobody_named_is_asked_for(run_pytest):
    shown = run_pytest(test_it__py="def test_it(outbox_testkit): pass")

    assert 'put pulse_outbox = "your.module:outbox" into pytest\'s settings' in shown
