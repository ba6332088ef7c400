"""`pulse-outbox dead`: list, show, replay and discard dead letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulse_outbox.commands.database import dsn_of, schema_of
from pulse_outbox.commands.dead import discard, reading, replay
from pulse_outbox.operations import Operations, connect

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Dead letters: events that failed for good, with their evidence, until somebody decides."
    )
    parser.epilog = """\
examples:
  pulse-outbox dead list --since 2h
  pulse-outbox dead show 0190b5f0-…
  pulse-outbox dead replay --topic order.paid --error-class ConnectionError --generation 0 --dry-run
  pulse-outbox dead discard 0190b5f0-… --reason 'paid by hand'
  pulse-outbox dead replay --help
"""
    verbs = parser.add_subparsers(title="what to do", metavar="list|show|replay|discard", required=True)
    reading.add_list(verbs)
    reading.add_show(verbs)
    replay.add_arguments(verbs)
    discard.add_arguments(verbs)


def run(args: argparse.Namespace) -> int:
    with connect(dsn_of(args), name="pulse-outbox dead") as conn:
        operations = Operations(conn, schema_of(args))
        operations.require_supported()
        return int(args.verb(operations, args))
