"""`pulse-outbox run MODULE:ATTR`: runs the handlers of an application's Outbox until it is told to stop."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pulse_outbox.commands.database import add_database_arguments, dsn_of
from pulse_outbox.dispatcher import Dispatcher, DispatcherSettings, logs
from pulse_outbox.dispatcher.health import split_address
from pulse_outbox.dispatcher.target import ApplicationFailed, last_lines, load_outbox
from pulse_outbox.errors import OutboxError, SettingsError
from pulse_outbox.failures import describe_error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pulse-outbox run MODULE:ATTR [options]"
    parser.description = """\
Claims the due events of an Outbox's topics, runs their handlers and stores what came of it. Any number of these
may run at once, on any number of machines. SIGTERM and SIGINT let running handlers finish; a second one does not.
Logs go to standard error, as JSON when that is not a terminal."""
    parser.epilog = """\
examples:
  pulse-outbox run shop.handlers:outbox
  pulse-outbox run shop.handlers --burst                    the module's only Outbox, until nothing is due
  pulse-outbox run shop.handlers:outbox --topics 'mail.*' --concurrency 20
  pulse-outbox run shop.handlers:outbox --health :8080      then GET /live and /ready

All times are in seconds. docs/reference/run.md has more about each option, logs.md about each log line.
"""
    parser.add_argument(
        "target",
        metavar="MODULE:ATTR",
        nargs="?",
        help="the module, importable from the current directory, and the Outbox in it",
    )
    add_database_arguments(parser)
    work = parser.add_argument_group("what is run")
    work.add_argument("--concurrency", type=int, metavar="N", help="handlers at the same time (default: 100)")
    work.add_argument("--batch", type=int, metavar="N", help="most events in one claim (default: 500)")
    work.add_argument(
        "--generation",
        type=int,
        action="append",
        dest="generations",
        metavar="N",
        help="claim events of this generation and of 0; may be repeated (default: all)",
    )
    work.add_argument(
        "--topics",
        nargs="+",
        action="extend",
        metavar="PATTERN",
        help="only topics like these: 'mail.*' (default: every topic with a handler)",
    )
    work.add_argument("--burst", action="store_true", help="stop when nothing is due or running")
    times = parser.add_argument_group("times")
    _add_time(times, "lease", "how long a claim is good without a heartbeat (default: 30)")
    _add_time(times, "heartbeat", "between heartbeats (default: 10)")
    _add_time(times, "watchdog", "between looks for lapsed leases (default: 10)")
    _add_time(times, "poll", "longest sleep between looks for due events (default: 5)")
    _add_time(times, "grace", "what running handlers get to finish at the end (default: 30)")
    times.add_argument(
        "--retention",
        type=_retention,
        default=argparse.SUPPRESS,
        metavar="SECONDS|never",
        help="completed events are deleted after this; never: kept (default: 7 days)",
    )
    process = parser.add_argument_group("the process")
    process.add_argument("--worker", metavar="NAME", help="its name (default: host, process and chance)")
    process.add_argument("--no-notify", action="store_true", help="poll only; needs no LISTEN connection")
    process.add_argument(
        "--listen-dsn", metavar="DSN", help="a direct connection for LISTEN, where --dsn leads to a pooler"
    )
    process.add_argument(
        "--health", metavar="HOST:PORT", help="answer GET /live and /ready there (default: no)"
    )
    process.add_argument(
        "--log-level", choices=logs.LEVELS, default="info", help="the least that is logged (default: info)"
    )


def _add_time(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    group.add_argument(f"--{name}", type=float, metavar="SECONDS", help=text)


def _retention(text: str) -> float | None:
    return None if text == "never" else float(text)


# argparse names the function in its complaint.
_retention.__name__ = "number of seconds (or never)"


def run(args: argparse.Namespace) -> int:
    if args.target is None:
        raise SettingsError(
            "which Outbox? `pulse-outbox run MODULE:ATTR`, as in shop.handlers:outbox; it goes before --topics"
        )
    settings = settings_of(args)
    check(settings)
    dsn = dsn_of(args)
    for option, value in (("--dsn", dsn), ("--listen-dsn", args.listen_dsn)):
        _check_dsn(option, value)
    # Before the application is imported, so that it may log meanwhile, and configure logging otherwise.
    logs.configure(args.log_level)
    try:
        outbox = load_outbox(args.target, schema=args.schema)
        if not outbox.handlers:
            raise SettingsError(
                f"{args.target} has no handlers: decorate functions with @outbox.handler(topic), and import the "
                "modules that do so from this one"
            )
        dispatcher = Dispatcher(outbox, dsn=dsn, target=args.target, **settings)
        _run(dispatcher, args.target)
    except ApplicationFailed as error:
        print(*error.lines, sep="\n", file=sys.stderr)
        raise
    return 0


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The Dispatcher's keywords: those that were given, and so nobody's defaults but its own."""
    names = ("concurrency", "batch", "lease", "heartbeat", "watchdog", "poll", "grace", "worker", "health")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.generations is not None:
        settings["generations"] = tuple(args.generations)
    if args.topics is not None:
        settings["topics"] = tuple(args.topics)
    if "retention" in args:
        settings["retention"] = args.retention
    return {**settings, "notify": not args.no_notify, "listen_dsn": args.listen_dsn, "burst": args.burst}


def check(settings: dict[str, Any]) -> None:
    """Complains about what makes no sense before anything is imported or opened."""
    DispatcherSettings(**settings)
    if settings.get("health") is not None:
        split_address(settings["health"])


def _check_dsn(option: str, dsn: str | None) -> None:
    if dsn is None:
        return
    if re.search("[@/]", _password_in_uri(dsn)):
        # libpq would take a piece of the password for a host, and every log line about that would name it.
        raise SettingsError(f"{option}: @ and / inside a password are written %40 and %2F")
    try:
        conninfo_to_dict(dsn)
    except psycopg.Error:
        # Without libpq's words: they quote what may be a piece of a password.
        raise SettingsError(
            f"{option} is neither a libpq URI (postgresql://user@host/name) nor a conninfo string"
        ) from None


def _password_in_uri(dsn: str) -> str:
    authority = dsn.partition("://")[2].partition("?")[0].rpartition("@")[0]
    return authority.partition(":")[2]


def _run(dispatcher: Dispatcher, target: str) -> None:
    try:
        dispatcher.run()
    except OutboxError:
        raise
    except Exception as error:
        # A database error out of the application's lifespan is not about our --dsn.
        if _is_of_lifespan(error):
            complaint = f"the lifespan of {target} failed: {describe_error(error)}"
            raise ApplicationFailed(complaint, last_lines(error)) from error
        raise


def _is_of_lifespan(error: BaseException) -> bool:
    frames = error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_name == "open_resources":
            return True
        frames = frames.tb_next
    return False
