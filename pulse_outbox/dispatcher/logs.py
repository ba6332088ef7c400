"""The command's logs: one line for each on standard error, JSON for a collector, colours for a person.

Only `pulse-outbox run` calls this. An application that builds its Dispatcher in code configures structlog as it likes,
and one that configures it while it is being imported by the command overrides what is set here.

Our lines go straight to standard error and never through the standard library's logging, where Sentry would make
events of the errors among them. The application's lines of either kind are rendered the same way as ours.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO

import structlog

from pulse_outbox.dispatcher.running import current_event
from pulse_outbox.trace import trace_fields

LEVELS = ("debug", "info", "warning", "error")
MAX_DEPTH = 20
_FIRST = ("timestamp", "level", "logger", "event")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_BUT_NEWLINE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

_PLAIN_WORD = re.compile(r"[\w.,:;/+*@%#-]+")

Fields = MutableMapping[str, Any]
Render = Callable[[Any, str, Fields], str]


def configure(level: str = "info", stream: TextIO | None = None, *, pretty: bool | None = None) -> None:
    """Sends all logs of this process to *stream*, standard error by default; pretty where that is a terminal."""
    # A process started with stderr closed has none; it still has to run.
    stream = stream or sys.stderr or open(os.devnull, "w")  # noqa: SIM115  for the life of the process
    sink = Sink(stream)
    if pretty is None:
        pretty = _is_terminal(stream)
    render = careful(_pretty(colours=_wants_colours()) if pretty else as_json)
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_event,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, add_logger_name, structlog.processors.format_exc_info, render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *names: Line(sink, names[0] if names else ""),
        cache_logger_on_first_use=False,  # an application may configure structlog once more, after our first line
    )
    handler = Handler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                *shared,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                render,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
    logging.captureWarnings(True)


class Sink:
    """Writes whole lines, whichever thread they come from. Never raises: a log is no reason to fail a job."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, line: str) -> None:
        with self._lock:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # closed, or whoever read it has gone; UnicodeError is a ValueError
                return


class Line:
    """What structlog hands a rendered line to, whatever its level is called."""

    def __init__(self, sink: Sink, name: str) -> None:
        self.name = name
        self._write = sink.write

    def msg(self, line: str) -> None:
        self._write(line)

    debug = info = warning = warn = error = exception = critical = fatal = failure = log = msg


class Handler(logging.Handler):
    """Takes what the application and its libraries log through the standard library."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # `log.info("%d", "x")`, for one: said, and never raised into the handler
            fields = {
                "timestamp": _utc(record.created),
                "level": record.levelname.lower(),
                "logger": record.name,
                "event": str(record.msg)[:200] if isinstance(record.msg, str) else type(record.msg).__name__,
                "unprintable": type(error).__name__,
                "place": f"{record.pathname}:{record.lineno}",
            }
            line = as_json(None, "", add_event(None, "", fields))
        self._sink.write(line)


def _utc(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat().replace("+00:00", "Z")


# Fields


def add_event(_logger: Any, _method: str, fields: Fields) -> Fields:
    """Adds which event is being handled, and its trace. Looked up here, so that a silent job costs nothing."""
    event = current_event.get()
    if event is not None:
        fields.setdefault("event_id", str(event.id))
        fields.setdefault("topic", event.topic)
        fields.setdefault("attempt", event.attempt)
        for name, value in trace_fields(event.headers).items():
            fields.setdefault(name, value)
    return fields


def add_logger_name(logger: Any, _method: str, fields: Fields) -> Fields:
    """Adds the name that the logger was asked for with."""
    if name := getattr(logger, "name", ""):
        fields.setdefault("logger", name)
    return fields


# Rendering


def as_json(_logger: Any, _method: str, fields: Fields) -> str:
    """One JSON object; the fields that every line has stand first."""
    ordered = {name: fields[name] for name in _FIRST if name in fields}
    ordered.update((name, value) for name, value in fields.items() if name not in ordered)
    return json.dumps(ordered, default=_describe, allow_nan=False)


def careful(render: Render) -> Render:
    """The same, for values that can't be rendered too: those are replaced by what can be said of them."""

    def never_raises(logger: Any, method: str, fields: Fields) -> str:
        try:
            return render(logger, method, fields)
        except Exception:
            return render(logger, method, {_key(name): _plain(value) for name, value in fields.items()})

    return never_raises


def _plain(value: object, depth: int = 0) -> Any:
    """Something like *value* that is made of JSON's own types."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < 10**300 else "<a long integer>"  # type: ignore[arg-type]  # `kind is int` does not narrow
    if kind is float:
        return value if math.isfinite(value) else str(value)  # type: ignore[arg-type]  # as above
    if depth > MAX_DEPTH:
        return "…"
    try:
        if isinstance(value, Mapping):
            return {_key(name): _plain(inner, depth + 1) for name, inner in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [_plain(inner, depth + 1) for inner in value]
    except Exception:
        return f"<{kind.__name__}>"
    return _describe(value)


def _key(name: object) -> str:
    return name if type(name) is str else _describe(name)


def _describe(value: object) -> str:
    try:
        return str.__str__(repr(value))
    except BaseException:  # repr() of a stranger's object is a stranger's code
        return f"<{type(value).__name__}>"


def _pretty(*, colours: bool) -> Render:
    console = structlog.dev.ConsoleRenderer(
        colors=colours,
        # The default shows local variables wherever rich is installed, and those hold payloads.
        exception_formatter=structlog.dev.plain_traceback,
        repr_native_str=False,
        sort_keys=False,
    )

    def render(logger: Any, method: str, fields: Fields) -> str:
        shown = {name: _for_terminal(name, value) for name, value in fields.items() if value is not None}
        return str(console(logger, method, shown))

    return render


class _Shown:
    """A value as it is to be printed; structlog prints the repr of what is no string."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _for_terminal(name: str, value: object) -> object:
    """The value without what would move the cursor, or begin a line that looks like another log line."""
    if name in _FIRST:
        return _escape(_CONTROL, value)
    if name in ("exception", "stack"):
        return _escape(_CONTROL_BUT_NEWLINE, value)
    plain = isinstance(value, str) and _PLAIN_WORD.fullmatch(value)
    return _Shown(str(value) if plain else _describe(value))


def _escape(characters: re.Pattern[str], value: object) -> str:
    text = value if isinstance(value, str) else _describe(value)
    return characters.sub(lambda match: repr(match.group())[1:-1], text)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError):
        return False


def _wants_colours() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
