"""A transactional outbox on PostgreSQL: jobs that commit with the application's data, and are never lost.

Names are imported when they are first used: a web application that only enqueues never loads a worker.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulse_outbox.dispatcher import Dispatcher
    from pulse_outbox.errors import (
        BadArgument,
        EnqueueError,
        EventNotFound,
        OutboxError,
        SchemaError,
        SettingsError,
        TransactionNeeded,
        TransitionRefused,
    )
    from pulse_outbox.events import Event, NewEvent
    from pulse_outbox.failures import DeadLetter, FailureCycle, RetryLater, TerminalHandlerError, Verdict
    from pulse_outbox.outbox import Outbox
    from pulse_outbox.retry import RetryPolicy

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "DeadLetter",
    "Dispatcher",
    "EnqueueError",
    "Event",
    "EventNotFound",
    "FailureCycle",
    "NewEvent",
    "Outbox",
    "OutboxError",
    "RetryLater",
    "RetryPolicy",
    "SchemaError",
    "SettingsError",
    "TerminalHandlerError",
    "TransactionNeeded",
    "TransitionRefused",
    "Verdict",
    "__version__",
]

_HOME = {
    "BadArgument": "errors",
    "DeadLetter": "failures",
    "Dispatcher": "dispatcher",
    "EnqueueError": "errors",
    "Event": "events",
    "EventNotFound": "errors",
    "FailureCycle": "failures",
    "NewEvent": "events",
    "Outbox": "outbox",
    "OutboxError": "errors",
    "RetryLater": "failures",
    "RetryPolicy": "retry",
    "SchemaError": "errors",
    "SettingsError": "errors",
    "TerminalHandlerError": "failures",
    "TransactionNeeded": "errors",
    "TransitionRefused": "errors",
    "Verdict": "failures",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
