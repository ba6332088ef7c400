"""The options that lead a command to its database, and how their secrets stay out of messages."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pulse_outbox.errors import SettingsError

if TYPE_CHECKING:
    import argparse


def add_database_arguments(parser: argparse.ArgumentParser) -> None:
    # No value of the environment becomes a default here: help would print it.
    parser.add_argument(
        "--dsn", help="libpq URI or conninfo string of the database (default: PULSE_OUTBOX_DSN)"
    )
    add_schema_argument(parser)


def add_schema_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schema", help="the schema's name (default: PULSE_OUTBOX_SCHEMA, else pulse)")


def dsn_of(args: argparse.Namespace) -> str:
    dsn = args.dsn or os.environ.get("PULSE_OUTBOX_DSN")
    if not dsn:
        raise SettingsError(
            "no database given: use --dsn or set PULSE_OUTBOX_DSN (postgresql://user@host/name)"
        )
    return str(dsn)


def schema_of(args: argparse.Namespace) -> str:
    schema = args.schema if args.schema is not None else os.environ.get("PULSE_OUTBOX_SCHEMA")
    return "pulse" if schema is None else str(schema)


def describe_unreachable(error: Exception, args: argparse.Namespace) -> str:
    """Why there is no connection, in libpq's words, unless those may hold a piece of a password."""
    if any(re.search("[@/]", secret) for secret in _secrets(args)):
        # libpq ends the password at the first of these and takes the rest for a host, which it then names.
        return (
            "cannot reach the database: check that the server is up, and --dsn, in which @ and / inside a "
            "password are written %40 and %2F"
        )
    reason = without_secrets(" ".join(str(error).split()), args)
    if re.search("connection slots|too many (clients|connections)", reason):
        return f"cannot reach the database: {reason}: end some of its connections, or raise max_connections"
    return f"cannot reach the database: {reason}: check --dsn and that the server is up"


def without_secrets(text: str, args: argparse.Namespace) -> str:
    """The text with every password of the command's DSNs starred out."""
    for secret in _secrets(args):
        text = text.replace(secret, "***").replace(unquote(secret), "***")
    return text


def _secrets(args: argparse.Namespace) -> set[str]:
    """Any argument may be a DSN; one without a password adds nothing."""
    texts = {value for value in vars(args).values() if isinstance(value, str)}
    texts.add(os.environ.get("PULSE_OUTBOX_DSN", ""))
    return {secret for text in texts for secret in _secrets_of(text)}


def _secrets_of(dsn: str) -> set[str]:
    found = {secret.strip("'") for secret in re.findall(r"password\s*=\s*('(?:[^'\\]|\\.)*'|[^\s&]+)", dsn)}
    if "://" in dsn:
        found.add(dsn.partition("://")[2].rpartition("@")[0].partition(":")[2])
    return found - {""}
