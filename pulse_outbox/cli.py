"""The command `pulse-outbox`: finds the chosen command, runs it, and turns every error into one line.

A command is a module in `pulse_outbox.commands` with `add_arguments(parser)` and `run(args) -> int`, and one
line in `COMMANDS`. It is imported only when it is the chosen one, so that help is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from pulse_outbox import __version__
from pulse_outbox.errors import OutboxError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

DONE, FAILED, WRONG_USAGE = 0, 1, 2

COMMANDS = {
    "demo": "see it working, on a database that is made for it and thrown away",
    "migrate": "create or upgrade the database schema",
    "run": "run the handlers of an application's outbox",
    "status": "what waits, runs and is dead, and who serves it",
    "dead": "list, show, replay or discard dead letters",
    "pause": "keep a topic, or all, from being claimed",
    "resume": "end a pause",
    "prune": "delete what ended long ago",
    "doctor": "what is wrong, and what to do about it",
    "bench": "how quick is this database, with a dispatcher beside it?",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 it failed, 2 wrong usage."""
    args = argparse.Namespace()
    try:
        # argparse writes help and usage itself and then exits.
        parser, command = build_parser(sys.argv[1:] if argv is None else argv)
        parser.parse_args(argv, args)
        if command is None:
            parser.print_help()
            return WRONG_USAGE
        code = int(command.run(args))
        sys.stdout.flush()  # here, where a closed pipe is still caught
    except BrokenPipeError:
        # `… | head` has seen enough. The interpreter flushes once more at exit: give it a place to do so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("PULSE_OUTBOX_TRACEBACK"):
            raise
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        print(f"pulse-outbox: {one_line(error, args)}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, SettingsError) else FAILED
    return code


def build_parser(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """The parser with every command's name, and the arguments of the one that *argv* names."""
    parser = argparse.ArgumentParser(
        prog="pulse-outbox",
        description="A transactional outbox on PostgreSQL.",
        epilog="""\
examples:
  pulse-outbox demo
  pulse-outbox migrate --dsn postgresql://localhost/shop
  pulse-outbox run shop.handlers:outbox
  pulse-outbox COMMAND --help

The database is given by --dsn or PULSE_OUTBOX_DSN, its schema by --schema or PULSE_OUTBOX_SCHEMA.
Exit codes: 0 done, 1 it failed, 2 wrong usage. PULSE_OUTBOX_TRACEBACK=1 shows where an error came from.
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pulse-outbox {__version__}")
    names = parser.add_subparsers(title="commands", metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    command = None
    for name, summary in COMMANDS.items():
        below = names.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name == chosen:
            command = import_module(f"pulse_outbox.commands.{name}")
            command.add_arguments(below)
    return parser, command


def one_line(error: Exception, args: argparse.Namespace) -> str:
    """What went wrong and what to do about it, without the password of any DSN."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OutboxError):
        return text
    # A command that never imported psycopg can't have failed in it; importing it here would cost 0.2 s.
    psycopg = sys.modules.get("psycopg")
    if psycopg and isinstance(error, psycopg.Error):
        from pulse_outbox.commands.database import describe_unreachable, without_secrets

        if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
            return describe_unreachable(error, args)
        # Only the primary message: DETAIL may quote the values of a row.
        text = error.diag.message_primary or text
        return f"the database refused: {without_secrets(text, args)} (SQLSTATE {error.sqlstate})"
    return f"{type(error).__name__}: {text}: not expected, PULSE_OUTBOX_TRACEBACK=1 shows where it came from"


if __name__ == "__main__":
    sys.exit(main())
