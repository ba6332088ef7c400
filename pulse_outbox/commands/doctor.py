"""`pulse-outbox doctor`: what is wrong, what to do about it, and where that is described."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pulse_outbox.commands.database import add_database_arguments, dsn_of, schema_of
from pulse_outbox.commands.terminal import plural, print_json, printable, terminal_width
from pulse_outbox.doctor import CHECKS, Finding, examine
from pulse_outbox.operations import Operations, connect

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Looks at the schema, the dispatchers, the work and the server, and names what is wrong, each with its remedy and its
runbook. Changes nothing. The exit code is 1 when there is an error or a warning; lines marked info are no fault."""
    parser.epilog = """\
examples:
  pulse-outbox doctor
  pulse-outbox doctor --json | jq '.findings[] | select(.severity == "error")'
"""
    add_database_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(args: argparse.Namespace) -> int:
    with connect(dsn_of(args), name="pulse-outbox doctor") as conn:
        operations = Operations(conn, schema_of(args))
        findings = examine(operations)
        database = operations.database()
    wrong = [finding for finding in findings if finding.severity != "info"]
    if args.json:
        print_json(
            {
                "database": database,
                "schema": operations.schema,
                "healthy": not wrong,
                "checks": list(CHECKS),
                "findings": findings,
            }
        )
        return 1 if wrong else 0
    for finding in findings:
        _print(finding)
    if wrong:
        print(f"{plural(len(wrong), 'thing')} to look at, of {len(CHECKS)} checks")
        return 1
    print(f"nothing is wrong: {len(CHECKS)} checks of schema {operations.schema} in {printable(database)}")
    return 0


def _print(finding: Finding) -> None:
    width = min(terminal_width(), 120)
    mark = {"error": "ERROR", "warning": "WARNING", "info": "info"}[finding.severity]
    print(_wrapped(f"{mark}  {finding.what}", width, "  "))
    print(_wrapped(f"  do: {finding.remedy}", width, "      "))
    if finding.runbook:
        print(f"  see runbooks/{finding.runbook}")
    print()


def _wrapped(text: str, width: int, indent: str) -> str:
    # Commands are copied from here: no word of them is broken.
    return textwrap.fill(
        printable(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
