"""Tests of applications: a real database in a second, and a kit that runs events through the application's handlers.

Under pytest the fixture `outbox_testkit` is all that is needed; docs/how-to/test-your-handlers.md shows it. Nothing is
imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulse_outbox.testing.bench import Ran
    from pulse_outbox.testing.crashing import CrashPoint
    from pulse_outbox.testing.databases import Databases, serving
    from pulse_outbox.testing.kit import NeverEnds, TestKit
    from pulse_outbox.testing.reading import StoredEvent

__all__ = ["CrashPoint", "Databases", "NeverEnds", "Ran", "StoredEvent", "TestKit", "serving"]

_HOME = {
    "CrashPoint": "crashing",
    "Databases": "databases",
    "NeverEnds": "kit",
    "Ran": "bench",
    "StoredEvent": "reading",
    "TestKit": "kit",
    "serving": "databases",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
