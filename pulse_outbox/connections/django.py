"""Django's connections: `django.db.connection`, or a named one of `django.db.connections`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from django.conf import settings
from django.db import connections as django_connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy

from pulse_outbox import connections
from pulse_outbox.connections import Ask, Copy, Row, State, Unfit


def find_route(connection: object) -> DjangoRoute | None:
    if isinstance(connection, ConnectionHandler):
        raise Unfit('this holds all of Django\'s connections: pass one (`connections["default"]`)')
    if not isinstance(connection, BaseDatabaseWrapper | ConnectionProxy):
        return None
    if _in_event_loop() and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise Unfit(
            "Django's transactions are synchronous: put the transaction and enqueue into one function and "
            "`await sync_to_async(function)()`"
        )
    if connection.vendor != "postgresql":
        raise Unfit(f"this is a connection to {connection.vendor}: pass one to the PostgreSQL database")
    return DjangoRoute(connection)


class DjangoRoute:
    """A connection of Django's."""

    __slots__ = ("_beneath", "_connection")
    is_async = False
    call = None
    begin = "use `with transaction.atomic():`"

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._beneath: Any = None

    def state(self) -> State:
        connection = self._connection
        if connection.closed_in_transaction:
            return State.CLOSED
        if connection.needs_rollback:
            return State.FAILED
        connection.ensure_connection()
        self._beneath = connections.find_route(connection.connection)
        state: State = self._beneath.state()
        return state

    def ask(self, ask: Ask) -> list[Row]:
        # Through Django's own cursor: the application's wrappers, its log and its count of queries see it.
        with self._connection.cursor() as cursor:
            cursor.execute(ask.text_with_percents, ask.parameters)
            return [tuple(row) for row in cursor.fetchall()] if ask.has_rows else []

    def copies(self) -> bool:
        return bool(self._beneath.copies())

    def copy(self, copy: Copy) -> None:
        with self._connection.wrap_database_errors:
            self._beneath.copy(copy)


def end_request() -> None:
    """What Django does before and after a request, for a handler's thread, which has none: closes its old connections.

    One that a restart of the database has broken would fail every handler in the thread from then on, and idle threads
    would hold theirs. A connection with a transaction, a test's, is left alone.
    """
    if not settings.configured:
        return
    for connection in django_connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()


def _in_event_loop() -> bool:
    # As Django itself finds out that waiting here would stop a loop.
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
