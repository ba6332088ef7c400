"""The log: structlog, as the application has configured it, and never a reason to stop.

A pipe whose reader has gone makes every line raise. A dispatcher that complains of a lost connection would lose the
loop that complains as well, so a line that can't be written is counted and forgotten.
"""

from __future__ import annotations

from typing import Any

import structlog

_logger = structlog.get_logger("pulse_outbox")


class Log:
    """What our own code logs with: a constant name and key-values."""

    def __init__(self) -> None:
        self.unwritten = 0
        """Lines in a row that could not be written."""

    def debug(self, event: str, **fields: Any) -> None:
        """For whoever looks closely."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """What happens in the normal course of things."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """What somebody may want to look at."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """What somebody has to look at."""
        self._write("error", event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """The same, with the traceback of the exception being handled."""
        self._write("exception", event, fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        try:
            getattr(_logger, level)(event, **fields)
            self.unwritten = 0
        except Exception:
            self.unwritten += 1


log = Log()
