"""`pulse-outbox run` as it is used: a process of its own, real signals, a real database."""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pulse_outbox import Outbox, __version__, embedded, schema
from pulse_outbox.commands.database import describe_unreachable
from tests.support.command import Command, running
from tests.support.waiting import wait_until

SHOP = """
import asyncio
import logging
import time
from pathlib import Path

import structlog

from pulse_outbox import Event, Outbox, RetryPolicy

outbox = Outbox()
here = Path(__file__).parent


@outbox.handler("mail.receipt")
async def receipt(event: Event) -> None:
    logging.getLogger("shop").info("sent %s", "one")


@outbox.handler("stock.taken")
def taken(event: Event) -> None:
    structlog.get_logger("shop").info("shop.taken", pieces=3)


@outbox.handler("mail.broken", retry=RetryPolicy(max_attempts=3, base_delay=60))
async def broken(event: Event) -> None:
    raise RuntimeError("the post is on strike")


@outbox.handler("slow.one")
async def slow(event: Event) -> None:
    (here / "started").touch()
    while not (here / "go").exists():
        await asyncio.sleep(0.01)


@outbox.handler("slow.stubborn")
def stubborn(event: Event) -> None:
    (here / "started").touch()
    time.sleep(60)
"""
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A directory with the module `shop`."""
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


@pytest.fixture
def enqueue(connect):
    conn = connect(autocommit=True)

    def call(topic: str, **options: Any) -> str:
        return str(Outbox().enqueue(conn, topic, {"card": "4111"}, outside_transaction=True, **options))

    return call


@pytest.fixture
def states(connect):
    """Status and attempts of every event by topic."""
    conn = connect(autocommit=True)

    def read() -> dict[str, tuple[str, int]]:
        return {
            topic: (status, attempts)
            for topic, status, attempts in conn.execute(
                "select topic, status::text, attempts from pulse.outbox"
            )
        }

    return read


def complaint_of(directory: Path, *arguments: str, **environment: Any) -> tuple[int, list[str]]:
    with running(directory, *arguments, **environment) as command:
        return command.ended(), command.lines


# Work


def test_it_says_what_it_serves_works_and_stops(shop, dsn, enqueue, states):
    """The whole of a good day: a line at the start, one at the end, exit code 0."""
    with running(shop, "shop:outbox", "--worker", "w1", dsn=dsn) as command:
        started = command.wait_for("outbox.started")
        enqueue("mail.receipt")
        wait_until(lambda: states() == {"mail.receipt": ("COMPLETED", 1)})
        command.send(signal.SIGTERM)

        assert command.ended() == 0
    assert (started["version"], started["worker"], started["schema"]) == (__version__, "w1", "pulse")
    assert "mail.receipt" in started["topics"]
    assert command.log[-1]["event"] == "outbox.stopped"
    assert [line["level"] for line in command.log] == ["info"] * len(command.lines), "JSON and quiet"


def test_burst_ends_when_nothing_is_due(shop, dsn, enqueue, states):
    for topic in ("mail.receipt", "stock.taken", "mail.broken"):
        enqueue(topic)

    code, lines = complaint_of(shop, "shop", "--burst", dsn=dsn)

    assert code == 0, lines
    assert states() == {
        "mail.receipt": ("COMPLETED", 1),
        "stock.taken": ("COMPLETED", 1),
        "mail.broken": ("RETRYING", 1),
    }


def test_lines_of_handlers_say_which_event_they_are_about(shop, dsn, enqueue):
    """From the standard library and from structlog, in the loop and in a thread; with the producer's trace."""
    receipt = enqueue("mail.receipt", headers={"traceparent": TRACE})
    taken = enqueue("stock.taken", headers={"traceparent": "nonsense"})
    broken = enqueue("mail.broken", headers={"traceparent": TRACE})

    with running(shop, "shop:outbox", "--burst", dsn=dsn) as command:
        assert command.ended() == 0, command.text

    trace = {"trace_id": TRACE[3:35], "span_id": TRACE[36:52]}
    [sent] = command.logged("sent one", logger="shop", event_id=receipt, topic="mail.receipt", attempt=1)
    assert trace.items() <= sent.items()
    [shipped] = command.logged("shop.taken", event_id=taken, topic="stock.taken", attempt=1, pieces=3)
    assert not trace.keys() & shipped.keys()
    [failed] = command.logged("outbox.failed", event_id=broken, handler="shop.broken", level="warning")
    assert trace.items() <= failed.items()
    assert failed["error"] == "RuntimeError: the post is on strike"
    assert failed["rule"]
    assert 0 <= failed["delay"] <= 60
    assert "4111" not in command.text, "never a payload"


def test_a_person_at_a_terminal_gets_no_json(shop, dsn, enqueue):
    enqueue("mail.broken")
    ours, theirs = pty.openpty()
    with running(shop, "shop", "--burst", stderr=theirs, dsn=dsn, TERM="xterm", NO_COLOR="") as silent:
        os.close(theirs)
        command = Command(silent.process, open(ours, "rb"))  # noqa: SIM115  closed by its reader
        assert command.ended() == 0

    assert command.log == []
    assert "outbox.started" in command.text
    assert "\x1b[" in command.text, "colours"
    [failed] = [line for line in command.lines if "outbox.failed" in line]
    assert "'RuntimeError: the post is on strike'" in failed


def test_only_the_wanted_topics(shop, dsn, enqueue, states):
    for topic in ("mail.receipt", "mail.broken", "stock.taken"):
        enqueue(topic)

    code, _ = complaint_of(shop, "shop:outbox", "--burst", "--topics", "mail.rec*", "slow.*", dsn=dsn)

    assert code == 0
    assert {topic: attempts for topic, (_, attempts) in states().items()} == {
        "mail.receipt": 1,
        "mail.broken": 0,
        "stock.taken": 0,
    }


def test_only_the_wanted_generations(shop, dsn, enqueue, states):
    """Those and 0, which is for anybody."""
    enqueue("mail.receipt", generation=3)
    enqueue("mail.broken", generation=4)
    enqueue("stock.taken")
    enqueue("slow.one", generation=5)
    (shop / "go").touch()

    code, _ = complaint_of(shop, "shop", "--burst", "--generation", "3", "--generation", "5", dsn=dsn)

    assert code == 0
    assert {topic: attempts for topic, (_, attempts) in states().items()} == {
        "mail.receipt": 1,
        "mail.broken": 0,
        "stock.taken": 1,
        "slow.one": 1,
    }


def test_an_explicit_schema_wins(shop, dsn, connect):
    """Over the environment and over the code: also for what handlers enqueue."""
    schema.migrate(dsn, schema="other")
    (shop / "shop.py").write_text("""
import psycopg, os
from pulse_outbox import Event, Outbox
outbox = Outbox(schema="third")

@outbox.handler("first")
def first(event: Event) -> None:
    with psycopg.connect(os.environ["PULSE_OUTBOX_DSN"]) as conn:
        outbox.enqueue(conn, "second", {})

@outbox.handler("second")
def second(event: Event) -> None: ...
""")
    conn = connect(autocommit=True)
    Outbox("other").enqueue(conn, "first", {}, outside_transaction=True)

    code, lines = complaint_of(
        shop, "shop", "--burst", "--schema", "other", dsn=dsn, PULSE_OUTBOX_SCHEMA="pulse"
    )

    assert code == 0, lines
    found = conn.execute("select topic, status::text from other.outbox order by seq").fetchall()
    assert found == [("first", "COMPLETED"), ("second", "COMPLETED")]


# The end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_handlers_finish(shop, dsn, enqueue, states, number):
    enqueue("slow.one")
    with running(shop, "shop:outbox", dsn=dsn) as command:
        wait_until((shop / "started").exists, within=20)
        command.send(number)
        command.wait_for("outbox.stopping", why=number.name, running=1)
        enqueue("mail.receipt")
        (shop / "go").touch()

        assert command.ended() == 0, command.text
    assert states() == {"slow.one": ("COMPLETED", 1), "mail.receipt": ("PENDING", 0)}


def test_a_second_signal_ends_at_once(shop, dsn, enqueue, states):
    enqueue("slow.one")
    with running(shop, "shop:outbox", "--grace", "600", dsn=dsn) as command:
        wait_until((shop / "started").exists, within=20)
        command.send(signal.SIGTERM)
        command.wait_for("outbox.stopping")
        command.send(signal.SIGTERM)

        assert command.ended(5) == 1
    assert command.logged("outbox.ended_at_once", signal="SIGTERM", in_flight=1)
    assert states() == {"slow.one": ("RUNNING", 1)}, "its lease runs out"


def test_a_handler_that_cannot_be_stopped_does_not_keep_the_process(shop, dsn, enqueue):
    """It gives up after the grace time, and says so by its exit code."""
    enqueue("slow.stubborn")
    with running(shop, "shop:outbox", "--grace", "0.1", dsn=dsn) as command:
        wait_until((shop / "started").exists, within=20)
        command.send(signal.SIGTERM)

        assert command.ended(15) == 1
    assert command.logged("outbox.grace_over", running=1)


# Health


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.timeout(120)
def test_health_says_in_words_what_is_wrong(shop):
    """Not ready while the database is away, live all the time, and the same process is ready afterwards."""
    port = free_port()
    with embedded.start() as server:
        schema.migrate(server.dsn)
        times = ["--lease", "3", "--heartbeat", "0.5", "--watchdog", "1", "--poll", "0.5"]
        with running(shop, "shop:outbox", "--health", f"127.0.0.1:{port}", *times, dsn=server.dsn) as command:
            command.wait_for("outbox.started")
            well = ask(port, "/live"), ask(port, "/ready")

            server.crash()
            wait_until(lambda: ask(port, "/ready")[0] != 200, within=30)
            code, answer = ask(port, "/ready")
            live = ask(port, "/live")
            server.start()
            wait_until(lambda: ask(port, "/ready")[0] == 200, within=40)
            with psycopg.connect(server.dsn) as conn:
                Outbox().enqueue(conn, "mail.receipt", {})
            command.wait_for("sent one")
            command.send(signal.SIGTERM)

            assert command.ended() == 0
    assert [status for status, _ in well] == [200, 200]
    assert well[1][1]["wrong"] == []
    assert code == 503
    assert answer["ok"] is False
    assert any("for " in words and len(words) > 10 for words in answer["wrong"]), answer
    assert live[0] == 200, "a restart would not help"


# Mistakes


def assert_complaint(answer: tuple[int, list[str]], code: int, *words: str) -> None:
    assert answer[0] == code, answer
    [line] = answer[1]
    assert line.startswith("pulse-outbox: ")
    for word in words:
        assert word in line, line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["which Outbox?", "MODULE:ATTR"]),
        (["--topics", "a", "shop:outbox"], ["before --topics"]),
        (["shopp:outbox"], ["no module 'shopp' in ", "did you mean 'shop'?"]),
        (
            ["nothing.like.it:outbox"],
            ["no module 'nothing'", "needed for 'nothing.like.it'", "change to the"],
        ),
        (["shop.py:outbox"], ["is a file", "shop:outbox"]),
        (["./shop:outbox"], ["not a module's name"]),
        ([":outbox"], ["not a module's name"]),
        (["shop:"], ["no attribute ''", "there is shop:outbox"]),
        (["shop:nope"], ["shop has no attribute 'nope'", "there is shop:outbox"]),
        (["shop:outbox.nope"], ["shop:outbox has no attribute 'nope'"]),
        (["shop:receipt"], ["shop:receipt is a function, not an Outbox", "there is shop:outbox"]),
        (["json"], ["which Outbox of json?", "there is no Outbox in json"]),
        (["shop", "--topics", "nope.*"], ["nothing to serve", "mail.receipt"]),
        (["shop", "--lease", "5"], ["heartbeat must be at most half of the lease"]),
        (["shop", "--lease", "nan"], ["lease", "between 0 and 100 years"]),
        (["shop", "--watchdog", "25"], ["watchdog must be"]),
        (["shop", "--poll", "0"], ["poll must be above 0"]),
        (["shop", "--concurrency", "0"], ["concurrency must be an integer between"]),
        (["shop", "--batch", "1000000"], ["batch must be an integer between"]),
        (["shop", "--generation", "-1"], ["generations are numbers from 0 on"]),
        (["shop", "--worker", ""], ["worker must have"]),
        (["shop", "--retention", "-1"], ["retention"]),
        (["shop", "--health", "8080"], ["HOST:PORT is needed"]),
        (["shop", "--health", "127.0.0.1:99999"], ["HOST:PORT is needed"]),
        (["shop", "--schema", "Bad-Name"], ["can't be the schema's name"]),
        (["shop", "--dsn", "hush hush"], ["--dsn is neither"]),
        (["shop", "--dsn", "host=x", "--listen-dsn", "hush hush"], ["--listen-dsn is neither"]),
        (["shop", "--dsn", "postgresql://app:hush@hush@db/x"], ["--dsn: @ and /", "%40"]),
        (["shop", "--listen-dsn", "postgresql://app:hush/hush@db/x"], ["--listen-dsn: @ and /", "%2F"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(shop, arguments, words):
    answer = complaint_of(shop, *arguments, dsn="host=/nowhere")

    assert_complaint(answer, 2, *words)
    assert "hush" not in answer[1][0]


def test_no_database_given(shop):
    assert_complaint(complaint_of(shop, "shop"), 2, "no database given", "PULSE_OUTBOX_DSN")


@pytest.mark.parametrize(
    "arguments", [["--lease", "x"], ["--generation", "x"], ["--retention", "x"], ["--log-level", "x"]]
)
def test_what_argparse_refuses_names_the_option(shop, arguments):
    code, lines = complaint_of(shop, "shop", *arguments, dsn="host=x")

    assert code == 2
    assert lines[0] == "usage: pulse-outbox run MODULE:ATTR [options]"
    assert arguments[0] in lines[1]


def test_several_outboxes_are_listed(shop, dsn):
    (shop / "two.py").write_text("from pulse_outbox import Outbox\na = Outbox()\nb = Outbox()\n")

    answer = complaint_of(shop, "two", dsn=dsn)

    assert_complaint(answer, 2, "which Outbox of two?", "there are two:a, two:b")


def test_an_outbox_under_two_names_is_one(shop, dsn):
    (shop / "two.py").write_text("from shop import outbox\nthe_same = outbox\n")

    assert complaint_of(shop, "two", "--burst", dsn=dsn)[0] == 0


def test_an_outbox_may_be_an_attribute_of_something(shop, dsn):
    (shop / "pack").mkdir()
    (shop / "pack" / "__init__.py").touch()
    (shop / "pack" / "app.py").write_text("import shop\nclass App:\n    outbox = shop.outbox\napp = App()\n")

    assert complaint_of(shop, "pack.app:app.outbox", "--burst", dsn=dsn)[0] == 0


def test_no_handlers(shop, dsn):
    (shop / "none.py").write_text("from pulse_outbox import Outbox\noutbox = Outbox()\n")

    assert_complaint(complaint_of(shop, "none:outbox", dsn=dsn), 2, "none:outbox has no handlers", "import")


@pytest.mark.parametrize(
    ("code", "place", "words"),
    [
        ("import nothing_of_the_kind", "line 2", "ModuleNotFoundError"),
        ("def f(:", "line 2", "SyntaxError"),
        ("raise ZeroDivisionError('so')", "line 2", "importing bad failed: ZeroDivisionError: so"),
        ("raise SystemExit(0)", "line 2", "importing bad failed: SystemExit"),
        ("from shop import outbox; outbox.handler('mail.receipt')(print)", "line 2", "has two handlers"),
        (
            "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd",
            "line 4",
            "importing bad failed: bad.Odd",
        ),
    ],
)
def test_an_exception_of_the_application_shows_its_place(shop, dsn, code, place, words):
    (shop / "bad.py").write_text(f"# the application's own\n{code}\n")

    status, lines = complaint_of(shop, "bad:outbox", dsn=dsn)

    assert status == 1
    assert len(lines) < 16
    assert any("bad.py" in line and place in line for line in lines), lines
    assert not any("importlib" in line for line in lines), lines
    assert lines[-1].startswith("pulse-outbox: ")
    assert words in lines[-1]


def test_a_lifespan_that_fails_shows_its_place(shop, dsn):
    """A database error out of it is not about our --dsn."""
    (shop / "span.py").write_text("""
import psycopg
from shop import outbox

@outbox.lifespan
async def resources():
    psycopg.connect("host=/nowhere")
    yield
""")

    status, lines = complaint_of(shop, "span:outbox", dsn=dsn)

    assert status == 1
    assert any("span.py" in line for line in lines), lines
    assert lines[-1].startswith("pulse-outbox: the lifespan of span:outbox failed: OperationalError")


@pytest.mark.parametrize(
    "reason",
    [
        "remaining connection slots are reserved for roles with the SUPERUSER attribute",
        "sorry, too many clients already",
        'too many connections for role "app"',
    ],
)
def test_a_server_without_a_connection_left_is_not_called_away(reason: str):
    args = argparse.Namespace(dsn="postgresql://app@127.0.0.1/shop")
    text = describe_unreachable(
        psycopg.OperationalError(f"connection to server failed: FATAL:  {reason}"), args
    )

    assert reason in text
    assert "max_connections" in text
    assert "check --dsn" not in text


def test_an_unreachable_database(shop):
    """Fails fast, once the storage retries are spent: an orchestrator starts it again."""
    answer = complaint_of(shop, "shop", "--dsn", "postgresql://app:hush@127.0.0.1:1/shop")

    assert_complaint(answer, 1, "cannot reach the database", "check --dsn")
    assert "hush" not in answer[1][0]


def test_a_schema_that_is_missing_or_too_old_or_too_new(shop, empty_dsn, dsn, connect):
    missing = complaint_of(shop, "shop", dsn=empty_dsn)
    conn = connect(autocommit=True)
    conn.execute(
        "insert into pulse.migration (version, name, oldest_code) values (9000, 'from_the_future', '9.0.0')"
    )
    too_new = complaint_of(shop, "shop", dsn=dsn)
    conn.execute("delete from pulse.migration")
    too_old = complaint_of(shop, "shop", dsn=dsn)

    assert_complaint(missing, 1, "`pulse-outbox migrate`")
    assert_complaint(too_new, 1, "9.0.0")
    assert_complaint(too_old, 1, "`pulse-outbox migrate")


def test_an_address_that_is_taken(shop, dsn):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        assert_complaint(
            complaint_of(shop, "shop", "--health", address, dsn=dsn), 2, "can't listen on", address
        )


def test_it_runs_without_its_log_being_read(shop, dsn, enqueue, states):
    """A log collector that has died is no reason to fail a job."""
    enqueue("mail.receipt")
    reading, writing = os.pipe()
    os.close(reading)
    with running(shop, "shop", "--burst", stderr=writing, dsn=dsn) as command:
        os.close(writing)

        assert command.ended() == 0
    assert states() == {"mail.receipt": ("COMPLETED", 1)}
