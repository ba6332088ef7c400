"""Which dead letters a command is about: the options, and what they choose."""

from __future__ import annotations

import argparse
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pulse_outbox.commands.database import add_database_arguments
from pulse_outbox.commands.terminal import add_by_argument, time_argument
from pulse_outbox.errors import SettingsError
from pulse_outbox.operations import Operations, Selection

if TYPE_CHECKING:
    from collections.abc import Callable


def event_id_argument(text: str) -> UUID:
    return UUID(text)


# argparse names the function in its complaint.
event_id_argument.__name__ = "event id"


def add_verb(verbs: Any, name: str, summary: str, function: Callable[..., int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.set_defaults(verb=function)
    add_database_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def add_filters(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group("which")
    which.add_argument(
        "--topic", action="append", dest="topics", metavar="TOPIC", help="of this topic; may be repeated"
    )
    which.add_argument(
        "--error-class", metavar="CLASS", help="that died of this class of error, as `dead list` names it"
    )
    which.add_argument(
        "--since", type=time_argument, metavar="TIME", help="that died then or later: a time, or 2h ago as 2h"
    )
    which.add_argument("--until", type=time_argument, metavar="TIME", help="that died before then")


def add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "event_ids",
        nargs="*",
        type=event_id_argument,
        metavar="EVENT_ID",
        help="these, or those that the options below choose",
    )
    add_filters(parser)
    parser.add_argument("--all", action="store_true", help="of all topics")
    parser.add_argument(
        "--limit", type=positive_argument, metavar="N", help="no more than so many, the oldest first"
    )
    add_by_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="change nothing; show what would happen")
    parser.add_argument("--yes", action="store_true", help="don't ask")


def positive_argument(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


positive_argument.__name__ = "number above 0"


def _time(value: datetime | timedelta | None, now: datetime) -> datetime | None:
    return now - value if isinstance(value, timedelta) else value


def selection_of(operations: Operations, args: argparse.Namespace) -> Selection:
    now = operations.now()  # "2h ago" is by the database's clock
    return Selection(
        topics=tuple(args.topics) if args.topics else None,
        error_class=args.error_class,
        since=_time(args.since, now),
        until=_time(args.until, now),
        limit=args.limit,
    )


def chosen(operations: Operations, args: argparse.Namespace) -> Selection:
    """What a change is about: ids, or topics; never everything by omission."""
    filters = args.topics or args.error_class is not None or args.since or args.until or args.limit
    if args.event_ids and (filters or args.all):
        raise SettingsError("give event ids, or options that choose them, not both")
    if args.event_ids:
        return Selection(event_ids=tuple(dict.fromkeys(args.event_ids)))
    if bool(args.topics) == args.all:
        raise SettingsError(
            "which ones? give event ids, or --topic TOPIC (with --error-class, --since …), or --all"
        )
    return selection_of(operations, args)
