"""`pulse-outbox bench`: how quick is this database, with a dispatcher beside it?"""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING

import structlog

from pulse_outbox.bench import measure
from pulse_outbox.commands.database import dsn_of
from pulse_outbox.commands.terminal import Column, print_json, print_table, rate, say
from pulse_outbox.errors import SettingsError

if TYPE_CHECKING:
    import argparse

MOST_EVENTS = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Measures, in some seconds, how quickly events are enqueued, drained by a dispatcher in this process, and noticed by it
when it has nothing to do. It works in a schema of its own, which it creates and drops again, also after Ctrl-C; nothing
that exists is touched. Needs the right to create a schema. It is load: not for a production database at noon."""
    parser.epilog = """\
examples:
  pulse-outbox bench
  pulse-outbox bench --events 100000 --payload 1000 --json
"""
    parser.add_argument(
        "--dsn", help="libpq URI or conninfo string of the database (default: PULSE_OUTBOX_DSN)"
    )
    parser.add_argument("--events", type=int, default=10_000, metavar="N", help="to drain (default: 10000)")
    parser.add_argument(
        "--payload", type=int, default=100, metavar="BYTES", help="about the size of each (default: 100)"
    )
    parser.add_argument("--concurrency", type=int, default=100, metavar="N", help="as of run (default: 100)")
    parser.add_argument("--batch", type=int, default=500, metavar="N", help="as of run (default: 500)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.events <= MOST_EVENTS:
        raise SettingsError(f"--events must be between 1 and {MOST_EVENTS:,}")
    if not 1 <= args.payload <= 1_000_000:
        raise SettingsError("--payload must be between 1 and 1,000,000 bytes")
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    # A result is on standard output; what goes wrong meanwhile belongs beside it.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    found = measure(
        dsn_of(args),
        events=args.events,
        payload_bytes=args.payload,
        concurrency=args.concurrency,
        batch=args.batch,
        report=say,
    )
    if args.json:
        print_json(found)
        return 0
    print(
        f"PostgreSQL {found.server_version}, {found.events:,} events of about {found.payload_bytes:,} bytes"
    )
    print_table(
        [Column(title="WHAT"), Column(title="PER SECOND", right=True), *map(_milliseconds, ("P50", "P99"))],
        [
            ("enqueue, one at a time", rate(found.enqueue_rate), found.enqueue_p50_ms, found.enqueue_p99_ms),
            ("enqueue_many", rate(found.bulk_rate), None, None),
            ("drain, one dispatcher", rate(found.drain_rate), None, None),
            ("commit to handler, idle", None, found.latency_p50_ms, found.latency_p99_ms),
        ],
    )
    return 0


def _end(number: int, frame: object) -> None:
    """Like Ctrl-C, so that the schema is dropped."""
    # A terminal that closes may say so twice, and what is being dropped must not be interrupted by that.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _milliseconds(name: str) -> Column:
    return Column(title=f"{name} MS", right=True)
