"""`pulse-outbox resume`: ends a pause."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulse_outbox.commands.database import add_database_arguments, dsn_of, schema_of
from pulse_outbox.commands.pause import add_topic_argument, topic_of
from pulse_outbox.commands.terminal import add_by_argument, operator_name, print_json, printable, warn
from pulse_outbox.operations import Operations, connect

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Ends the pause of a topic, or, with --all, the pause of all. The two are separate: resuming a topic does not end
the pause of all, nor the other way round."""
    parser.epilog = """\
examples:
  pulse-outbox resume order.paid
  pulse-outbox resume --all
"""
    add_database_arguments(parser)
    add_topic_argument(parser)
    add_by_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    topic, by = topic_of(args), operator_name(args)
    with connect(dsn_of(args), name="pulse-outbox resume") as conn:
        operations = Operations(conn, schema_of(args))
        operations.require_supported()
        there_was_one = operations.resume(topic, by=by)
        left = operations.pauses()
    if args.json:
        print_json({"topic": topic, "resumed": there_was_one, "by": by, "pauses": left})
        return 0
    name = "all topics" if topic is None else topic
    print(printable(f"{name} resumed by {by}" if there_was_one else f"{name} was not paused: nothing to do"))
    for pause in left:
        if pause.topic is None:
            warn(
                f"all topics are still paused by {pause.paused_by} ({pause.reason}): pulse-outbox resume --all"
            )
        elif topic is None or pause.topic == topic:
            warn(f"topic {pause.topic} is still paused by {pause.paused_by}: {pause.reason}")
    return 0
