"""`pulse-outbox pause`: nobody claims a topic, or any, until it is resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulse_outbox.commands.database import add_database_arguments, dsn_of, schema_of
from pulse_outbox.commands.terminal import add_by_argument, operator_name, print_json, printable, warn
from pulse_outbox.errors import SettingsError
from pulse_outbox.operations import Operations, connect

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
No dispatcher claims the topic from now on, whichever comes or goes; what runs finishes, what was claimed ahead is given
back within a second. Enqueueing goes on. Pausing again changes who and why."""
    parser.epilog = """\
examples:
  pulse-outbox pause order.paid --reason 'the mail server is down'
  pulse-outbox pause --all --reason 'database move, back at 5'
"""
    add_database_arguments(parser)
    add_topic_argument(parser)
    parser.add_argument("--reason", required=True, metavar="TEXT", help="why, for everyone who wonders")
    add_by_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_topic_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="this one")
    parser.add_argument("--all", action="store_true", help="all topics")


def topic_of(args: argparse.Namespace) -> str | None:
    if (args.topic is None) != args.all:
        raise SettingsError("which topic? name one, or give --all")
    return str(args.topic) if args.topic is not None else None


def run(args: argparse.Namespace) -> int:
    topic, by = topic_of(args), operator_name(args)
    with connect(dsn_of(args), name="pulse-outbox pause") as conn:
        operations = Operations(conn, schema_of(args))
        operations.require_supported()
        known = topic is None or any(one.topic == topic for one in operations.topics())
        operations.pause(topic, reason=args.reason, by=by)
    if not known:
        warn(f"nobody serves {topic} and it has no unfinished events: is that its name?")
    if args.json:
        print_json({"topic": topic, "paused": True, "reason": args.reason, "by": by})
        return 0
    undo = "--all" if topic is None else topic
    name = "all topics" if topic is None else topic
    print(printable(f"{name} paused by {by}: {args.reason}; pulse-outbox resume {undo} goes on"))
    return 0
