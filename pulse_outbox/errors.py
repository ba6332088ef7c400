"""What pulse-outbox raises when it is itself asked for something it can't do.

Failures *of handlers* (`TerminalHandlerError`, `RetryLater`) live in `pulse_outbox.failures`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class OutboxError(Exception):
    """The base of everything that pulse-outbox raises on purpose."""


class EnqueueError(OutboxError):
    """An event was refused, nearly always before any SQL, so that the caller's transaction stays usable."""


class TransactionNeeded(OutboxError):
    """The connection is in no state in which a record could commit together with the handler's work."""


class EventNotFound(OutboxError):
    """There is no event with this id."""


class TransitionRefused(OutboxError):
    """The event's present state does not allow this: replaying what isn't dead, for one."""


class BadArgument(OutboxError):
    """A SQL function refused one of its arguments."""


class SchemaError(OutboxError):
    """The database's schema is missing, or too old or too new for this code."""


class SettingsError(OutboxError):
    """A setting, a policy or a registration makes no sense."""


# The one place where the SQLSTATEs of the functions in migrations/ become Python exceptions.
ERROR_OF_SQLSTATE: dict[str, type[OutboxError]] = {
    "PO001": EventNotFound,
    "PO002": TransitionRefused,
    "PO003": BadArgument,
}

# Undefined table, undefined function, no such schema: what an unmigrated database answers.
UNMIGRATED_SQLSTATES = frozenset({"42P01", "42883", "3F000"})


def from_database_error(error: BaseException) -> OutboxError | None:
    """Our exception for a database error that one of our SQL functions raised, None for any other.

    Only the primary message is taken: DETAIL may quote values of the row.
    """
    kind = ERROR_OF_SQLSTATE.get(sqlstate_of(error) or "")
    return None if kind is None else kind(_primary_message(error) or kind.__doc__)


def sqlstate_of(error: BaseException) -> str | None:
    """The SQLSTATE of a database error of any driver, also inside the error that a library has wrapped around it."""
    for part in _unwrapped(error):
        # psycopg and asyncpg; psycopg2; the fields of the server's answer (pg8000).
        found = getattr(part, "sqlstate", None) or getattr(part, "pgcode", None) or _fields(part).get("C")
        if isinstance(found, str):
            return found
    return None


def _primary_message(error: BaseException) -> str | None:
    for part in _unwrapped(error):
        found = (
            getattr(getattr(part, "diag", None), "message_primary", None)  # psycopg, psycopg2
            or _fields(part).get("M")  # pg8000
            or getattr(part, "message", None)  # asyncpg
        )
        if isinstance(found, str):
            return found
    return None


def _unwrapped(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from (Django, SQLAlchemy's `orig`), the innermost last."""
    seen: set[int] = set()
    part: object = error
    while isinstance(part, BaseException) and id(part) not in seen:
        yield part
        seen.add(id(part))
        part = getattr(part, "orig", None) or part.__cause__


def _fields(error: BaseException) -> Mapping[str, object]:
    return error.args[0] if error.args and isinstance(error.args[0], dict) else {}
