"""`pulse-outbox demo`: a shop, its outbox and a dispatcher that dies, on a database that is made for it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pulse_outbox
from pulse_outbox import __version__
from pulse_outbox.errors import OutboxError

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from pulse_outbox.demo.views import LiveView, PlainView


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
A small shop writes orders and events; a real dispatcher runs them. Some fail and come back, one fails for good, one
kills its worker and is replayed after a repair. Takes about 20 seconds, and nothing stays behind. The exit code is 0
only if the final count is what it must be.

It starts a PostgreSQL of its own. With --dsn or PULSE_OUTBOX_DSN it uses that database instead, in the schemas
pulse_demo and demo_shop, which it creates and removes."""
    parser.add_argument("--dsn", help="libpq URI or conninfo string of a database to use instead")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with open_view(args) as view, contextlib.ExitStack() as stack:
        # Late, because psycopg complains at import when there is no libpq.
        try:
            from pulse_outbox.demo import database
            from pulse_outbox.demo.story import Story
        except ImportError as error:
            raise OutboxError(f"{error}: pip install 'pulse-outbox[demo]'") from error

        dsn = args.dsn or os.environ.get("PULSE_OUTBOX_DSN")
        if dsn:
            given_by = "--dsn" if args.dsn else "PULSE_OUTBOX_DSN"
            view.tell("·", f"in the database of {given_by}, in schemas of the demo's own")
        else:
            view.tell("·", "starting a PostgreSQL in a temporary folder")
        place = stack.enter_context(database.given(dsn) if dsn else database.own())
        view.tell("·", f"{place.description}; schema {place.schema} migrated")
        story = Story(place.dsn, schema=place.schema, view=view)
        story.play()
        view.end(story.summary, advice())
    return 0


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # through every `finally`


def open_view(args: argparse.Namespace) -> LiveView | PlainView:
    from pulse_outbox.demo.views import LiveView, PlainView

    # Marks and dashes; a terminal that can't show them gets question marks.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    title = f"pulse-outbox {__version__}: a shop, its outbox, and an event that kills its worker"
    if args.plain or not sys.stdout.isatty() or os.environ.get("TERM") in {None, "dumb"}:
        return PlainView(title)
    if importlib.util.find_spec("rich") is None:
        return PlainView(f"{title}\n(pip install 'pulse-outbox[demo]' shows it with a live table)")
    return LiveView(title)


def advice() -> list[str]:
    """What to do next, as it works from where this package is installed."""
    root = Path(pulse_outbox.__file__).parents[1]
    from_checkout = (root / "pyproject.toml").exists()
    return [
        "Next, in a project of yours:",
        f"  pip install '{root if from_checkout else 'pulse-outbox'}[binary]'",
        "  export PULSE_OUTBOX_DSN=postgresql://localhost/shop && pulse-outbox migrate",
        f"  write a handler, as in {Path(pulse_outbox.__file__).with_name('demo') / 'shop.py'}",
        "  pulse-outbox run shop:outbox",
        'README.md has it step by step, under "Run it".',
    ]
