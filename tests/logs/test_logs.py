"""What a log line looks like, and that writing one never fails."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from pulse_outbox import Event
from pulse_outbox.dispatcher import logs
from pulse_outbox.dispatcher.running import current_event

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Logging is the process's: put back what pytest had."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


class Written(io.StringIO):
    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()

    @property
    def last(self) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(self.lines[-1])
        return line


@pytest.fixture
def written() -> Written:
    stream = Written()
    logs.configure("info", stream)
    return stream


@pytest.fixture
def pretty(monkeypatch) -> Written:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Written()
    logs.configure("info", stream, pretty=True)
    return stream


@pytest.fixture
def handling() -> Iterator[Event[Any]]:
    """Inside a handler."""
    event: Event[Any] = Event(
        UUID(int=7),
        "order.paid",
        {"card": "4111"},
        {"traceparent": TRACE},
        "k",
        None,
        2,
        5,
        0,
        1,
        datetime(2030, 1, 1, tzinfo=UTC),
    )
    token = current_event.set(event)
    yield event
    current_event.reset(token)


def test_a_line_is_an_object_that_begins_with_what_every_line_has(written):
    structlog.get_logger("pulse_outbox").info("outbox.started", topics=["a"], version="1")

    line = written.last
    assert list(line) == ["timestamp", "level", "logger", "event", "topics", "version"]
    assert (line["level"], line["logger"], line["event"]) == ("info", "pulse_outbox", "outbox.started")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["timestamp"])


def test_the_standard_library_is_rendered_alike(written):
    logging.getLogger("shop.mail").warning("sent %d letters", 3, extra={"town": "Bonn"})

    line = written.last
    assert (line["level"], line["logger"], line["event"]) == ("warning", "shop.mail", "sent 3 letters")
    assert line["town"] == "Bonn"
    assert line["timestamp"].endswith("Z")


def test_a_handlers_lines_know_their_event(written, handling):
    expected = {
        "event_id": str(handling.id),
        "topic": "order.paid",
        "attempt": 2,
        "trace_id": TRACE[3:35],
        "span_id": TRACE[36:52],
    }

    logging.getLogger("shop").info("by the standard library")
    assert expected.items() <= written.last.items()
    structlog.get_logger().info("by structlog")
    assert expected.items() <= written.last.items()
    structlog.get_logger().info("with a topic of its own", topic="mine")
    assert written.last["topic"] == "mine"
    assert "4111" not in written.getvalue()


def test_outside_of_handlers_there_is_no_event(written):
    logging.getLogger("shop").info("starting")

    assert written.last.keys() == {"timestamp", "level", "logger", "event"}


def test_the_level_holds_for_both_kinds():
    stream = Written()
    logs.configure("warning", stream)
    for logger in (structlog.get_logger("a"), logging.getLogger("a")):
        logger.info("quiet")
        logger.warning("loud")

    assert [json.loads(line)["event"] for line in stream.lines] == ["loud", "loud"]


def test_configured_twice_says_everything_once(written):
    again = Written()
    logs.configure("info", again)
    logging.getLogger("shop").info("once")

    assert (written.lines, len(again.lines)) == ([], 1)


def test_tracebacks_are_text_and_show_no_variables(written, pretty):
    """Local variables of a handler hold its payload."""
    for stream in (written, pretty):
        logs.configure("info", stream, pretty=stream is pretty)
        for logger in (structlog.get_logger("a"), logging.getLogger("a")):
            secret = "4111"
            try:
                assert int(secret) / 0
            except ZeroDivisionError:
                logger.exception("it failed")

        assert "ZeroDivisionError: division by zero" in stream.getvalue()
        assert "4111" not in stream.getvalue()
    first, second = (json.loads(line) for line in written.lines)
    assert first["exception"].startswith("Traceback (most recent call last)")
    assert second["exception"].startswith("Traceback (most recent call last)")


def test_warnings_become_lines(written):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    assert (written.last["logger"], written.last["level"]) == ("py.warnings", "warning")


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


class OddError(Exception):
    def __str__(self) -> str:
        raise ValueError


def odd_values() -> dict[str, Any]:
    ring: dict[str, Any] = {}
    ring["ring"] = ring
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return {
        "odd": Odd(),
        "inside": [{"odd": Odd()}],
        "ring": ring,
        "deep": deep,
        "nan": float("nan"),
        "integer": 10**5000,
        "keys": {(1, 2): 3, None: 4, Odd(): 5},
        "surrogate": "\ud800",
        "bytes": b"\xff",
        "class": Odd,
        "error": OddError(),
        "set": {1},
        "none": None,
    }


@pytest.mark.parametrize("name", odd_values())
@pytest.mark.parametrize("is_pretty", [False, True])
def test_no_value_makes_a_line_fail(written, pretty, name, is_pretty):
    stream = pretty if is_pretty else written
    logs.configure("info", stream, pretty=is_pretty)
    value = odd_values()[name]

    structlog.get_logger("a").info("line.one", **{name: value})
    logging.getLogger("a").info("line two", extra={name: value})

    assert len(stream.lines) == 2
    assert "line.one" in stream.lines[0]
    assert "line two" in stream.lines[1]
    if not is_pretty:
        assert json.loads(stream.lines[0], parse_constant=pytest.fail)["event"] == "line.one"


scalars = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(), st.binary(), st.dates())
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.none() | st.text() | st.integers(), inner)
)


@given(st.dictionaries(st.text(), values))
def test_whatever_it_is_it_is_one_line_of_json(fields):
    line = logs.careful(logs.as_json)(None, "info", {**fields, "event": "x"})

    assert "\n" not in line
    assert json.loads(line)["event"] == "x"


def test_a_message_that_does_not_fit_its_arguments_is_said(written, handling):
    """The standard library would print a traceback between the lines of JSON."""
    [ours] = [handler for handler in logging.getLogger().handlers if isinstance(handler, logs.Handler)]
    ours.handle(logging.LogRecord("shop", logging.INFO, __file__, 1, "sent %d", ("one",), None))

    line = written.last
    assert (line["event"], line["unprintable"], line["level"]) == ("sent %d", "TypeError", "info")
    assert line["event_id"] == str(handling.id)
    assert __file__ in line["place"]


@pytest.mark.parametrize("error", [OSError, BrokenPipeError, ValueError])
def test_a_stream_that_is_gone_is_no_error(error):
    class Gone(Written):
        def write(self, _text: str) -> int:
            raise error

    logs.configure("info", Gone())

    structlog.get_logger().info("a")
    logging.getLogger().info("b")


def test_pretty_shows_control_characters_as_escapes(pretty):
    """An error text must not move the cursor, nor look like another line."""
    hostile = "a\x1b[2J\r\n2026-01-01 [info] all is well \u202e"
    structlog.get_logger("a").info("outbox.failed", error=hostile, word="\x1b[2J")
    logging.getLogger("a").info(hostile)

    assert len(pretty.lines) == 2
    assert not {"\x1b", "\r"} & set(pretty.getvalue())


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    class Terminal(Written):
        def isatty(self) -> bool:
            return True

    def line(**environment: str) -> str:
        for name in ("NO_COLOR", "TERM"):
            monkeypatch.setenv(name, environment.get(name, ""))
        stream = Terminal()
        logs.configure("info", stream)
        structlog.get_logger().info("hello", n=1)
        return stream.getvalue()

    assert "\x1b[" in line(TERM="xterm")
    assert "\x1b[" not in line(TERM="xterm", NO_COLOR="1")
    assert "\x1b[" not in line(TERM="dumb")
    assert not line(TERM="dumb").startswith("{")
