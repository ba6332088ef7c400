"""`pulse-outbox migrate`: apply the numbered files, check them, or print them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from pulse_outbox import schema as schemas
from pulse_outbox.commands.database import add_database_arguments, dsn_of, schema_of
from pulse_outbox.errors import SettingsError

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Create the schema or bring it to this release, one transaction for each file. Any number of these may run at
once. Needs a direct connection to the server, not one through PgBouncer."""
    parser.epilog = """\
examples:
  pulse-outbox migrate                          apply what is missing
  pulse-outbox migrate --check                  for CI: exit code 1 when something is missing
  pulse-outbox migrate --sql > outbox.sql       no database needed; then psql -f outbox.sql
  pulse-outbox migrate --sql --from 2 --to 3    the files 0002 and 0003 alone
"""
    add_database_arguments(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 unless all is applied"
    )
    instead.add_argument("--sql", action="store_true", help="change nothing; print the SQL")
    parser.add_argument("--json", action="store_true", help="with --check: print the result as JSON")
    parser.add_argument(
        "--from", dest="first", type=int, metavar="N", help="with --sql: first file (default: 1)"
    )
    parser.add_argument(
        "--to", dest="last", type=int, metavar="M", help="last file (default: this release's newest)"
    )
    parser.add_argument(
        "--no-transaction",
        action="store_true",
        help="with --sql: no begin and commit, for tools that open a transaction (Flyway)",
    )
    parser.add_argument(
        "--lock-timeout",
        type=float,
        default=5,
        metavar="SECONDS",
        help="longest wait for a table lock, since everyone queues behind a waiting migration (default: 5)",
    )


def run(args: argparse.Namespace) -> int:
    if (args.first is not None or args.no_transaction) and not args.sql:
        raise SettingsError("--from and --no-transaction go with --sql")
    if args.json and not args.check:
        raise SettingsError("--json goes with --check")
    if args.last is not None and args.check:
        raise SettingsError("--check looks at all files: leave out --to")
    if args.sql:
        return _print_sql(args)
    if args.check:
        return _check(args)
    schemas.migrate(
        dsn_of(args),
        schema=schema_of(args),
        target=args.last,
        lock_timeout=args.lock_timeout,
        report=lambda line: print(line, flush=True),
    )
    return 0


def _print_sql(args: argparse.Namespace) -> int:
    text = schemas.sql(
        1 if args.first is None else args.first,
        args.last,
        schema_of(args),
        transactions=not args.no_transaction,
        lock_timeout=args.lock_timeout,
    )
    print(text)
    return 0


def _check(args: argparse.Namespace) -> int:
    state = schemas.check(dsn_of(args), schema_of(args))
    fine = state.state in ("current", "ahead-supported") and not state.changed
    if args.json:
        print(json.dumps(asdict(state), indent=2))
        return 0 if fine else 1
    for label in state.pending:
        print(f"{label}  pending", flush=True)
    state.require_unchanged()
    state.require_supported()
    print(f"schema {state.schema} is at {state.installed}: {state.state}")
    return 0
