"""`pulse-outbox prune`: deletes what ended long ago, a few pages of the table at a time."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pulse_outbox.commands.database import add_database_arguments, dsn_of, schema_of
from pulse_outbox.commands.terminal import (
    Progress,
    confirm,
    duration,
    duration_argument,
    plural,
    print_json,
)
from pulse_outbox.operations import Operations, connect

if TYPE_CHECKING:
    import argparse

PAGES = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Deletes events that completed or were discarded longer than the retention time ago. Dispatchers do the same all the
time, with their own --retention; this is for a table that must shrink now. Each step is short and committed, so that it
may be stopped at any time. Dead letters are deleted only with --dead, and with them their evidence."""
    parser.epilog = """\
examples:
  pulse-outbox prune
  pulse-outbox prune --retention 12h --yes
  pulse-outbox prune --dead --retention 90d
"""
    add_database_arguments(parser)
    parser.add_argument(
        "--retention",
        type=duration_argument,
        default=timedelta(days=7),
        metavar="DURATION",
        help="what ended longer ago than this: 12h, 7d (default: 7d)",
    )
    parser.add_argument("--dead", action="store_true", help="dead letters too")
    parser.add_argument("--yes", action="store_true", help="don't ask")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    with connect(dsn_of(args), name="pulse-outbox prune") as conn:
        operations = Operations(conn, schema_of(args))
        operations.require_supported()
        what = "completed, discarded and dead" if args.dead else "completed and discarded"
        question = (
            f"Delete {what} events that ended more than {duration(args.retention)} ago from schema "
            f"{operations.schema} of {operations.database()}?"
        )
        if not confirm(question, yes=args.yes):
            print("nothing was changed")
            return 1
        pruned = _walk(operations, args.retention, dead=args.dead)
    if args.json:
        print_json({"pruned": pruned, "retention": args.retention, "dead": args.dead})
    else:
        print(f"{plural(pruned, 'event')} deleted")
    return 0


def _walk(operations: Operations, retention: timedelta, *, dead: bool) -> int:
    progress, total = Progress("pages"), operations.pages()
    page: int | None = 0
    pruned = 0
    try:
        while page is not None:
            deleted, page = operations.prune(retention=retention, page=page, pages=PAGES, dead=dead)
            pruned += deleted
            progress.show(total if page is None else page, total)
    except KeyboardInterrupt:
        progress.say(f"interrupted: {pruned:,} deleted so far, the others are as they were")
        raise
    finally:
        progress.end()
    return pruned
