"""`pulse-outbox demo` as a real process: what it tells, what it leaves behind, and when it refuses."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from pulse_outbox import embedded
from pulse_outbox.commands import demo
from pulse_outbox.demo import database
from pulse_outbox.demo.views import LiveView, PlainView
from pulse_outbox.errors import OutboxError
from tests.support.waiting import wait_until

PLOT = (
    r"order 4 is rolled back",
    r"receipt\.mail of order 3: ConnectionError: .*; attempt 2 of 5 in \d\.\d s",
    r"card\.charge of order 6 DEAD_LETTERED at once: CardDeclined",
    r"dispatcher 1 died: signal 9 \(SIGKILL\)",
    r"dispatcher 2 is up",
    r"lapsed; the events come back as suspects",
    r"child process \d+ died: signal 9 \(SIGKILL\); dispatcher 2 lives on",
    r"invoice\.render of order 10 had company",
    r"invoice\.render of order 10 DEAD_LETTERED after 2 attempts: worker process died: signal 9 \(SIGKILL\)",
    r"select \w+\.outbox_replay\('[0-9a-f-]{36}', 2, 'demo'\);",
    r"invoice\.render of order 10 COMPLETED; failure_history has 1 cycle:",
    r"24 orders, 96 events: COMPLETED 95, DEAD_LETTERED 1, lost 0",
    r"order 4: none of its events ever ran",
    r"for 24 orders, for none of them twice",
    r"pulse-outbox run shop:outbox",
)
"""What the reader must have seen. Not in this order: some of it happens at the same time."""


class Demo:
    """A running demo, its output, and all that it has started."""

    def __init__(self, *arguments: str, terminal: tuple[int, int] | None = None, **environment: str) -> None:
        mine = {name: value for name, value in os.environ.items() if not name.startswith("PULSE_OUTBOX_")}
        command = [sys.executable, "-m", "pulse_outbox.cli", "demo", *arguments]
        if terminal is None:
            source, sink = os.pipe()
        else:
            source, sink = pty.openpty()
            columns, lines = terminal
            fcntl.ioctl(sink, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=mine | {"TERM": "xterm-256color"} | environment,
            # As a shell does it: Ctrl-C then reaches the demo and not pytest.
            process_group=0,
        )
        os.close(sink)
        self.output = b""
        self._reader = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._reader.start()
        self.descendants: set[psutil.Process] = set()
        self.folders: set[Path] = set()

    def _read(self, source: int) -> None:
        try:
            while data := os.read(source, 65536):
                self.output += data
        except OSError:
            pass  # how a pty says that the other end has gone
        finally:
            os.close(source)

    @property
    def text(self) -> str:
        """The output without colours and cursor movements."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output.decode()).replace("\r\n", "\n")

    def take_stock(self) -> None:
        """Remembers which processes and folders there are now."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            self.descendants.add(process)
            self.folders.update(Path(found) for found in re.findall(r"/\S*/pulse-pg-\w+", " ".join(words)))

    def until(self, text: str) -> None:
        wait_until(
            lambda: re.search(text, self.text) or self.process.poll() is not None, within=40, what=text
        )
        assert self.process.poll() is None, self.text
        self.take_stock()

    def ended(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def is_all_gone(self) -> bool:
        return not any(map(is_alive, self.descendants)) and not any(
            folder.exists() for folder in self.folders
        )


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.ended()


@pytest.mark.timeout(90)
def test_tells_the_whole_story_in_plain_lines(demos):
    """It is what a newcomer sees first, and a smoke test of everything together."""
    demos.append(demo := Demo())
    demo.until("dispatcher 2 is up")
    code = demo.ended()

    assert code == 0, demo.text
    assert [line for line in PLOT if not re.search(line, demo.text)] == [], demo.text
    assert "\x1b" not in demo.output.decode()
    assert len(demo.descendants) > 3
    assert len(demo.folders) == 1
    assert demo.is_all_gone()


@pytest.mark.timeout(90)
def test_follows_the_events_on_a_terminal_and_leaves_a_given_database_as_it_was(demos, empty_dsn):
    """The live table fits an ordinary terminal; what --dsn names is somebody's."""
    demos.append(demo := Demo("--dsn", empty_dsn, terminal=(80, 24)))
    code = demo.ended()

    assert code == 0, demo.text
    text = " ".join(demo.text.split())  # lines are folded
    assert [line for line in PLOT if not re.search(line, text)] == [], demo.text
    assert "Traceback" not in text
    assert re.search(r"\d+ events? leased to a dead dispatcher: lapse in \d\.\d s", text)
    # Paths of this checkout may be as long as they like.
    drawn = [line for line in re.split(r"[\r\n]", demo.text) if not re.search("pip install|shop\\.py", line)]
    assert max(map(len, drawn)) <= 80
    with psycopg.connect(empty_dsn) as conn:
        schemas = conn.execute("select nspname from pg_namespace where nspname ~ 'demo'").fetchall()
        assert schemas == []
        # Roles belong to the cluster: the test beside this one may be using them, and then removes them.
        roles = "select 1 from pg_roles where rolname ~ '^pulse_demo'"
        wait_until(lambda: not conn.execute(roles).fetchall(), what="no role is left")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_leaves_nothing_behind_however_it_ends(demos, number, code):
    """Neither the server nor the dispatcher may go on without it."""
    demos.append(demo := Demo())
    demo.until("dispatcher 1 is up")
    assert any("pulse_outbox.demo.tethered" in process.cmdline() for process in demo.descendants)

    demo.process.send_signal(number)

    assert demo.ended() == code
    assert "Traceback" not in demo.text
    wait_until(demo.is_all_gone, what="all is gone")


def test_children_for_suspects_end_with_it_too(demos):
    demos.append(demo := Demo())
    demo.until(r"child process \d+ started")
    demo.process.kill()

    demo.ended()
    wait_until(demo.is_all_gone, what="all is gone")


def test_refuses_schemas_that_it_has_not_made(dsn, connect):
    """It removes them at the end: they must be its own."""
    conn = connect(autocommit=True)
    conn.execute("create schema demo_shop")

    with pytest.raises(OutboxError, match="schema demo_shop that the demo has not made"), database.given(dsn):
        pass
    assert conn.execute("select count(*) from pg_namespace where nspname = 'demo_shop'").fetchone() == (1,)


def test_removes_what_a_killed_one_left(empty_dsn):
    """Nobody else would."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        for name in ("pulse_demo", "demo_shop"):
            conn.execute(f"create schema {name}".encode())
            conn.execute(f"comment on schema {name} is '{database.OURS}'".encode())
        conn.execute("create table demo_shop.orders ()")

    with database.given(empty_dsn) as place, psycopg.connect(place.dsn) as conn:
        left = conn.execute("select to_regclass('demo_shop.orders')").fetchone()

    assert left == (None,)


def test_two_at_once_in_one_database_do_not_meet(empty_dsn):
    with (
        database.given(empty_dsn),
        pytest.raises(OutboxError, match="another demo is running"),
        database.given(empty_dsn),
    ):
        pass


def test_names_the_extra_when_there_is_no_postgresql(monkeypatch):
    def find_none() -> Path:
        raise embedded.EmbeddedError("there is no PostgreSQL here: do something else")

    monkeypatch.setattr(embedded, "_find_binaries", find_none)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(
        OutboxError, match=r"no PostgreSQL here: pip install 'pulse-outbox\[demo\]', or .*--dsn"
    ):
        database._start()


class Terminal:
    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("plain", "term", "rich", "view"),
    [
        (False, "xterm", True, LiveView),
        (True, "xterm", True, PlainView),
        (False, "dumb", True, PlainView),
        (False, "xterm", False, PlainView),
    ],
)
def test_a_live_table_only_where_it_can_be_drawn(monkeypatch, plain, term, rich, view):
    found: Any = object() if rich else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stdout", Terminal())

    assert type(demo.open_view(Namespace(plain=plain))) is view
