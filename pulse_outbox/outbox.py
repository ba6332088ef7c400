"""The Outbox: where an application registers its handlers and enqueues its events. Holds no connection."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pulse_outbox import bulk, enqueue
from pulse_outbox.errors import SettingsError
from pulse_outbox.events import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    Event,
    EventOptions,
    NewEvent,
    as_timedelta,
    check_schema_name,
)
from pulse_outbox.handlers import Handler, WhenCompleted, make_handler

if TYPE_CHECKING:
    from datetime import datetime, timedelta
    from typing import Unpack
    from uuid import UUID

    from pulse_outbox.connections import AsyncConnection, SyncConnection
    from pulse_outbox.enqueue import EncodedEvent
    from pulse_outbox.failures import Redact
    from pulse_outbox.retry import RetryPolicy

F = TypeVar("F", bound=Callable[[Event[Any]], Any])
L = TypeVar("L", bound=Callable[[], Any])

# PostgreSQL takes 256 MB of jsonb at most.
MAX_PAYLOAD_BYTES_LIMIT = 200 * 1024 * 1024


class Outbox:
    """Handlers and enqueue of one schema.

    `redact` gets the text of every failure before it is stored, logged or sent, and returns what may be seen.
    `on_dead_letter` is called by the dispatcher beside the alert.
    """

    def __init__(
        self,
        schema: str | None = None,
        *,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
        redact: Redact | None = None,
        on_dead_letter: Callable[..., Any] | None = None,
    ) -> None:
        self.schema = check_schema_name(schema or os.environ.get("PULSE_OUTBOX_SCHEMA") or "pulse")
        if type(max_payload_bytes) is not int or not 1 <= max_payload_bytes <= MAX_PAYLOAD_BYTES_LIMIT:
            raise SettingsError(f"max_payload_bytes must be between 1 and {MAX_PAYLOAD_BYTES_LIMIT:,}")
        self.max_payload_bytes = max_payload_bytes
        for name, hook in (("redact", redact), ("on_dead_letter", on_dead_letter)):
            if hook is not None and not callable(hook):
                raise SettingsError(f"{name} must be callable")
        self.redact = redact
        self.on_dead_letter = on_dead_letter
        self._handlers: dict[str, Handler] = {}
        self._lifespan: Callable[[], Any] | None = None
        # Set by pulse_outbox.testing: while it gives a time, the delay of a new event counts from there.
        self._simulated: Callable[[], datetime | None] | None = None

    def __repr__(self) -> str:
        return f"<Outbox {self.schema}: {', '.join(sorted(self._handlers)) or 'no handlers'}>"

    def use_schema(self, schema: str) -> None:
        """Moves this outbox, handlers and enqueue alike, to another schema: what `run --schema` does at start."""
        self.schema = check_schema_name(schema)

    def _in_time(self, event: NewEvent) -> NewEvent:
        now = self._simulated() if self._simulated is not None else None
        # What is no NewEvent at all is for the encoding to refuse.
        if now is None or getattr(event, "delay", None) is None:
            return event
        return event._replace(run_at=now + as_timedelta("delay", event.delay), delay=None)

    def _all_in_time(self, events: Iterable[NewEvent]) -> Iterable[NewEvent]:
        return events if self._simulated is None else map(self._in_time, events)

    # Registration

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The registered handlers by topic."""
        return MappingProxyType(self._handlers)

    def handler(
        self,
        topic: str,
        *,
        retry: RetryPolicy | None = None,
        timeout: float | timedelta | None = None,
        concurrency: int | None = None,
        transactional: bool = False,
        completed: WhenCompleted = "keep",
    ) -> Callable[[F], F]:
        """Registers the decorated function, plain or async, for a topic and returns it unchanged.

        The payload's type comes from its annotation: `Event[OrderPaid]` is validated, `Event` and `Event[dict]` are
        not. `timeout` is in seconds; `completed="delete"` deletes rows instead of keeping them as COMPLETED.
        """
        # A model defined inside a function is visible where the decorator stands, and only there.
        local_names = sys._getframe(1).f_locals

        def register(function: F) -> F:
            handler = make_handler(
                topic,
                function,
                retry=retry,
                timeout=timeout,
                concurrency=concurrency,
                transactional=transactional,
                completed=completed,
                local_names=local_names,
            )
            if other := self._handlers.get(topic):
                raise SettingsError(
                    f"{topic!r} has two handlers: {other.name} ({other.place}) and {handler.name} ({handler.place}); "
                    "a topic has one: call both from it, or enqueue two events"
                )
            self._handlers[topic] = handler
            return function

        return register

    def lifespan(self, factory: L) -> L:
        """Registers what opens and closes the resources that handlers share, and returns it unchanged.

        A generator function with one `yield`, async or not, or a function that returns a context manager. What it
        yields is `event.resources`. Runs once in each process that runs handlers.
        """
        if self._lifespan is not None:
            raise SettingsError("this outbox has a lifespan already: open all resources in one")
        if not callable(factory):
            raise SettingsError("a lifespan is a generator function with one `yield`")
        if inspect.isasyncgenfunction(factory):
            self._lifespan = contextlib.asynccontextmanager(factory)
        elif inspect.isgeneratorfunction(factory):
            self._lifespan = contextlib.contextmanager(factory)
        else:
            self._lifespan = factory
        return factory

    @contextlib.asynccontextmanager
    async def open_resources(self) -> AsyncIterator[Any]:
        """Opens the lifespan, if there is one, and yields what it yields."""
        if self._lifespan is None:
            yield None
            return
        manager = self._lifespan()
        if hasattr(manager, "__aenter__"):
            async with manager as resources:
                yield resources
        elif hasattr(manager, "__enter__"):
            with manager as resources:
                yield resources
        else:
            raise SettingsError(
                f"the lifespan returned {type(manager).__qualname__}, not a context manager: "
                "write a generator function with one `yield`"
            )

    # Enqueue

    def enqueue(
        self,
        connection: SyncConnection,
        topic: str,
        payload: object,
        *,
        outside_transaction: bool = False,
        **options: Unpack[EventOptions],
    ) -> UUID:
        """Writes an event in the connection's transaction and returns its id.

        With an `idempotency_key` or `event_id` that exists, returns the id of the event that is there. Refuses a
        connection in autocommit without an open transaction unless *outside_transaction* says that this is meant.
        """
        event = self._encoded(topic, payload, options)
        return enqueue.enqueue(connection, self.schema, event, outside_transaction=outside_transaction)

    async def enqueue_async(
        self,
        connection: AsyncConnection,
        topic: str,
        payload: object,
        *,
        outside_transaction: bool = False,
        **options: Unpack[EventOptions],
    ) -> UUID:
        """`enqueue` on an asynchronous connection."""
        event = self._encoded(topic, payload, options)
        return await enqueue.enqueue_async(
            connection, self.schema, event, outside_transaction=outside_transaction
        )

    def _encoded(self, topic: str, payload: object, options: EventOptions) -> EncodedEvent:
        if not options:
            return enqueue.encode_plain(topic, payload, self.max_payload_bytes)
        event = self._in_time(NewEvent(topic, payload, **options))
        return enqueue.encode_event(event, self.max_payload_bytes)

    def enqueue_many(
        self,
        connection: SyncConnection,
        events: Iterable[NewEvent],
        *,
        outside_transaction: bool = False,
        stream: bool = False,
    ) -> list[UUID]:
        """Writes many events at once and returns their ids in order; one bad event refuses all, before any SQL.

        With *stream*, the server writes the first events while the later ones are read, under a savepoint that undoes
        it if one of these is bad. What makes the events must not use *connection* then, which is busy.
        """
        batch = bulk.encode_events(self._all_in_time(events), self.max_payload_bytes, stream=stream)
        return bulk.enqueue_many(connection, self.schema, batch, outside_transaction=outside_transaction)

    async def enqueue_many_async(
        self,
        connection: AsyncConnection,
        events: Iterable[NewEvent],
        *,
        outside_transaction: bool = False,
        stream: bool = False,
    ) -> list[UUID]:
        """`enqueue_many` on an asynchronous connection."""
        batch = bulk.encode_events(self._all_in_time(events), self.max_payload_bytes, stream=stream)
        return await bulk.enqueue_many_async(
            connection, self.schema, batch, outside_transaction=outside_transaction
        )

    # Once only

    def first_time(self, connection: SyncConnection, event: Event[Any], *, name: str | None = None) -> bool:
        """Records in the connection's transaction that this event's work is done, and says whether that is news.

        Call it in the transaction that does the work, and do the work only if it says True. *name* is the effect's, the
        handler's own by default: give one where a handler has several effects, or may be renamed.
        """
        from pulse_outbox import handled

        return handled.first_time(
            connection, self.schema, self._effect_name(event, name), event.idempotency_key
        )

    async def first_time_async(
        self, connection: AsyncConnection, event: Event[Any], *, name: str | None = None
    ) -> bool:
        """`first_time` on an asynchronous connection."""
        from pulse_outbox import handled

        return await handled.first_time_async(
            connection, self.schema, self._effect_name(event, name), event.idempotency_key
        )

    def _effect_name(self, event: Event[Any], name: str | None) -> str:
        if name is not None:
            return name
        handler = self._handlers.get(event.topic)
        if handler is None:
            raise SettingsError(f"first_time: this outbox has no handler of {event.topic!r}; give a name=")
        return handler.name
