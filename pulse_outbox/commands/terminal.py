"""Words and tables for a terminal: nothing wider than it, nothing in a name that could command it."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pulse_outbox.errors import SettingsError

if TYPE_CHECKING:
    import argparse

UNLIMITED = 100_000
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


# Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """*least* above 0: the column may be cut to this when the table is too wide."""

    title: str
    right: bool = False
    least: int = 0


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    """As wide as the terminal; values that don't fit end in an ellipsis."""
    print("\n".join(table(columns, rows, terminal_width())))


def table(columns: Sequence[Column], rows: Iterable[Sequence[object]], width: int) -> list[str]:
    cells = [[printable("-" if value is None else str(value)) for value in row] for row in rows]
    titles = [column.title for column in columns]
    widths = [max(map(_cells_of, column)) for column in zip(titles, *cells, strict=True)]
    too_wide = sum(widths) + 2 * (len(widths) - 1) - width
    while too_wide > 0:
        # The widest that may still give something, so that a short name is never cut for a long one.
        most, index = max(
            (widths[i] if widths[i] > max(column.least, len(column.title)) and column.least else 0, i)
            for i, column in enumerate(columns)
        )
        if not most:
            break
        widths[index] -= 1
        too_wide -= 1
    return [
        "  ".join(
            _pad(cut(cell, room), room, right=column.right)
            for cell, room, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in [titles, *cells]
    ]


def terminal_width() -> int:
    """Of the terminal, or of COLUMNS. What goes into a file or a pipe is not cut."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return UNLIMITED


def printable(text: str) -> str:
    """The text without what moves the cursor, turns the direction or breaks the line: names come from outside."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else " " if letter in "\n\r\t" else f"\\x{ord(letter):02x}"
        for letter in text
    )


def cut(text: str, room: int) -> str:
    """The text in so many cells, with an ellipsis when it is longer."""
    if _cells_of(text) <= room:
        return text
    kept, used = [], 1
    for letter in text:
        used += _cells_of(letter)
        if used > room:
            break
        kept.append(letter)
    return "".join(kept) + "…"


def _cells_of(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def _pad(text: str, room: int, *, right: bool) -> str:
    space = " " * (room - _cells_of(text))
    return space + text if right else text + space


# Values


def count(number: int) -> str:
    """Exact as long as it is short."""
    if number < 100_000:
        return str(number)
    return f"{number / 1000:.0f}k" if number < 1_000_000 else f"{number / 1_000_000:.1f}M"


def duration(value: timedelta | None) -> str:
    """At most two units: 12s, 3m10s, 2h05m, 7d."""
    if value is None:
        return "-"
    seconds = max(0, int(value.total_seconds()))
    for size, unit, smaller, smaller_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if seconds >= size:
            rest = seconds % size // smaller
            return f"{seconds // size}{unit}" + (f"{rest:02d}{smaller_unit}" if rest else "")
    return f"{seconds}s"


def rate(value: float | None) -> str:
    """Per second: 0.3, 120."""
    return "-" if value is None else f"{value:.1f}" if value < 10 else count(round(value))


def moment(value: datetime | None) -> str:
    return "-" if value is None else value.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_json(value: object) -> None:
    print(json.dumps(plain(value), indent=2, ensure_ascii=False))


def plain(value: object) -> Any:
    """For JSON: times as ISO 8601, durations as seconds under a name that says so."""
    if is_dataclass(value) and not isinstance(value, type):
        # By the field's type, not its value: a key must not change its name when there is nothing to tell.
        value = {
            f"{item.name}_seconds" if "timedelta" in str(item.type) else item.name: plain(
                getattr(value, item.name)
            )
            for item in fields(value)
        }
    match value:
        case dict():
            return {
                f"{key}_seconds" if isinstance(inner, timedelta) else str(key): plain(inner)
                for key, inner in value.items()
            }
        case list() | tuple():
            return [plain(inner) for inner in value]
        case datetime():
            return value.isoformat()
        case timedelta():
            return round(value.total_seconds(), 3)
        case UUID():
            return str(value)
        case _:
            return value


# Arguments


def duration_argument(text: str) -> timedelta:
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip())
    if not parts:
        raise ValueError(text)
    return timedelta(seconds=float(parts[1]) * UNITS[parts[2] or "s"])


def time_argument(text: str) -> datetime | timedelta:
    """A time, or how long ago it was. A time without a zone is this machine's."""
    try:
        return duration_argument(text)
    except ValueError:
        return datetime.fromisoformat(text).astimezone()


def rate_argument(text: str) -> float:
    number = float(text.removesuffix("/s"))
    if not 0 < number <= 10_000:
        raise ValueError(text)
    return number


# argparse names the function in its complaint.
duration_argument.__name__ = "duration (90, 90s, 15m, 2h, 7d)"
time_argument.__name__ = "time (2030-01-31T03:00, or how long ago: 15m, 2h, 7d)"
rate_argument.__name__ = "rate (events per second, up to 10000)"


def add_by_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", metavar="NAME", help="who does this, for the record (default: you@this-host)")


def operator_name(args: argparse.Namespace) -> str:
    if args.by:
        return str(args.by)
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user has no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


# Asking, and telling how far it is


def confirm(question: str, *, yes: bool) -> bool:
    """Asks on the terminal. *yes* answers; without it and without a terminal the command is refused."""
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise SettingsError(f"there is no terminal to ask on: {question} Give --yes to do it")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def warn(text: str) -> None:
    print(f"warning: {printable(text)}", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """A line about how it goes; the result goes to standard output."""
    print(printable(text), file=sys.stderr, flush=True)


class Progress:
    """A bar on a terminal, elsewhere a line now and then."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar = sys.stderr.isatty()
        self._shown = time.monotonic()
        self._drawn = False

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._bar:
            room = 30
            filled = min(room, room * done // max(1, total))
            line = f"{self._what} [{'#' * filled}{'.' * (room - filled)}] {done:,}/{total:,}"
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = True
        elif now - self._shown >= 5:
            self._shown = now
            print(f"{self._what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.end()
        say(text)

    def end(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False
