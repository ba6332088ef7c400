"""Any other DB-API connection to PostgreSQL: psycopg2, pg8000 and their like."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pulse_outbox.connections import Ask, Copy, Row, State, Unfit

_MARKS: dict[str, Callable[[str], str]] = {
    "format": lambda _: "%s",
    "pyformat": lambda _: "%s",
    "qmark": lambda _: "?",
    "numeric": lambda number: f":{number}",
    "named": lambda number: f":p{number}",
    "numeric_dollar": lambda number: f"${number}",
}


def find_route(connection: object) -> DbapiRoute | None:
    methods = [getattr(connection, name, None) for name in ("cursor", "commit", "rollback")]
    if not all(map(callable, methods)):
        return None
    if any(map(inspect.iscoroutinefunction, methods)):
        raise Unfit(
            "of the asynchronous libraries psycopg, SQLAlchemy and asyncpg are known: pass a connection of theirs"
        )
    return DbapiRoute(connection)


class DbapiRoute:
    """A connection of which only the DB-API is known, with what psycopg2 and pg8000 tell beside it."""

    __slots__ = ("_connection",)
    is_async = False
    call = None
    begin = "set `conn.autocommit = False`"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def state(self) -> State:
        connection = self._connection
        if getattr(connection, "closed", False) or getattr(connection, "_usock", connection) is None:
            return State.CLOSED
        # libpq's number (psycopg2) or the protocol's letter (pg8000).
        ask = getattr(connection, "get_transaction_status", None)
        status = ask() if callable(ask) else getattr(connection, "_transaction_status", None)
        if status in (3, b"E"):
            return State.FAILED
        if status == 1:
            return State.BUSY
        if status in (2, b"T") or not getattr(connection, "autocommit", False):
            return State.OPEN
        return State.OUTSIDE

    def ask(self, ask: Ask) -> list[Row]:
        style = _paramstyle(self._connection)
        text = re.sub(r"\$(\d)", lambda number: _MARKS[style](number[1]), ask.text)
        parameters: Any = ask.parameters
        if style == "named":
            parameters = {f"p{place}": value for place, value in enumerate(parameters, 1)}
        cursor = self._connection.cursor()
        try:
            cursor.execute(text, parameters)
            if not ask.has_rows:
                return []
            # Some applications have rows as dictionaries.
            return [tuple(row.values() if isinstance(row, Mapping) else row) for row in cursor.fetchall()]
        finally:
            cursor.close()

    def copies(self) -> bool:
        return False

    def copy(self, copy: Copy) -> None:
        raise NotImplementedError  # copies() says so


def _paramstyle(connection: object) -> str:
    """As the module of the connection says, or a package above it, at this moment: pg8000's can be changed."""
    name = type(connection).__module__
    while name:
        style = getattr(sys.modules.get(name), "paramstyle", None)
        if style in _MARKS:
            return str(style)
        name = name.rpartition(".")[0]
    return "format"
