"""What pulse-outbox raises when it is itself asked for something it can't do.

Failures *of handlers* (`TerminalHandlerError`, `RetryLater`) live in `pulse_outbox.failures`.
"""

from __future__ import annotations


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
    kind = ERROR_OF_SQLSTATE.get(getattr(error, "sqlstate", None) or "")
    if kind is None:
        return None
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    return kind(primary or kind.__doc__)
