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
    from collections.abc import Callable

PAGES = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Deletes events that completed or were discarded longer than the retention time ago. Dispatchers do the same all the
time, with their own --retention; this is for a table that must shrink now. Each step is short and committed, so that it
may be stopped at any time. Dead letters are deleted only with --dead, and with them their evidence.

With --handled-older-than it deletes no event but what handlers have recorded with first_time: an event under such a key
would do its work a second time. What an event needs that may still run, dead letters too, is kept whatever its age."""
    parser.epilog = """\
examples:
  pulse-outbox prune
  pulse-outbox prune --retention 12h --yes
  pulse-outbox prune --dead --retention 90d
  pulse-outbox prune --handled-older-than 400d
"""
    add_database_arguments(parser)
    parser.add_argument(
        "--retention",
        type=duration_argument,
        default=timedelta(days=7),
        metavar="DURATION",
        help="what ended longer ago than this: 12h, 7d (default: 7d)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dead", action="store_true", help="dead letters too")
    what.add_argument(
        "--handled-older-than",
        type=duration_argument,
        metavar="DURATION",
        help="no events, but what handlers recorded longer ago than this (event_handled)",
    )
    parser.add_argument("--yes", action="store_true", help="don't ask")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    with connect(dsn_of(args), name="pulse-outbox prune") as conn:
        operations = Operations(conn, schema_of(args))
        operations.require_supported()
        if args.handled_older_than is not None:
            return _prune_handled(operations, args)
        what = "completed, discarded and dead" if args.dead else "completed and discarded"
        question = f"Delete {what} events that ended more than {duration(args.retention)} ago"
        if not _agreed(question, operations, args):
            return 1

        def step(page: int) -> tuple[int, int | None]:
            return operations.prune(retention=args.retention, page=page, pages=PAGES, dead=args.dead)

        pruned = _walk(step, operations.pages("outbox"))
    if args.json:
        print_json({"pruned": pruned, "retention": args.retention, "dead": args.dead})
    else:
        print(f"{plural(pruned, 'event')} deleted")
    return 0


def _prune_handled(operations: Operations, args: argparse.Namespace) -> int:
    age: timedelta = args.handled_older_than
    if not _agreed(f"Forget what handlers did more than {duration(age)} ago", operations, args):
        return 1

    def step(page: int) -> tuple[int, int | None]:
        return operations.prune_handled(older_than=age, page=page, pages=PAGES)

    pruned = _walk(step, operations.pages("event_handled"))
    if args.json:
        print_json({"pruned": pruned, "handled_older_than": age})
    else:
        print(f"{plural(pruned, 'record')} of handled events deleted")
    return 0


def _agreed(question: str, operations: Operations, args: argparse.Namespace) -> bool:
    where = f"from schema {operations.schema} of {operations.database()}"
    if confirm(f"{question}, {where}?", yes=args.yes):
        return True
    print("nothing was changed")
    return False


def _walk(step: Callable[[int], tuple[int, int | None]], total: int) -> int:
    """Takes step after step until one says that it was the last; how many rows all of them deleted."""
    progress = Progress("pages")
    page: int | None = 0
    pruned = 0
    try:
        while page is not None:
            deleted, page = step(page)
            pruned += deleted
            progress.show(total if page is None else page, total)
    except KeyboardInterrupt:
        progress.say(f"interrupted: {pruned:,} deleted so far, the others are as they were")
        raise
    finally:
        progress.end()
    return pruned
