"""The connections that an application may have: one short module for each library, and one place that finds it.

What pulse-outbox needs of a library is little (`SyncRoute`, `AsyncRoute`): the state of the transaction, one statement
with text parameters, and COPY where there is one. Nothing here or below commits, rolls back or opens a transaction.
A library's module is loaded when a connection of that library is seen: none is imported that the application has not.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar

from pulse_outbox.errors import UNMIGRATED_SQLSTATES, OutboxError, from_database_error, sqlstate_of

if TYPE_CHECKING:
    from typing import ClassVar

    from typing_extensions import TypeIs

R = TypeVar("R")
Row = tuple[Any, ...]


# What the application's type checker sees. Told by their shape, so that no library is needed to check against it.


class SyncTransaction(Protocol):
    """psycopg's Connection, SQLAlchemy's Session and Connection, Django's `connections[…]`, any DB-API connection."""

    def commit(self) -> None: ...
    def rollback(self) -> None: ...


class DjangoConnection(Protocol):
    """Django's `connection`, which shows its type checkers nothing but a proxy."""

    def __getattr__(self, item: str, /) -> Any: ...
    def __contains__(self, key: Any, /) -> bool: ...


class AsyncTransaction(Protocol):
    """psycopg's AsyncConnection, SQLAlchemy's AsyncSession and AsyncConnection."""

    def commit(self) -> Awaitable[None]: ...
    def rollback(self) -> Awaitable[None]: ...


class AsyncpgConnection(Protocol):
    """asyncpg's Connection."""

    def is_in_transaction(self) -> bool: ...
    def fetchrow(self, query: Any, /, *args: Any) -> Awaitable[Any]: ...


class AsyncpgLoan(Protocol):
    """asyncpg's Connection as its pool lends it, which shows nothing but a proxy."""

    def __getattr__(self, attr: str, /) -> Any: ...
    def _detach(self) -> Any: ...


SyncConnection = SyncTransaction | DjangoConnection
AsyncConnection = AsyncTransaction | AsyncpgConnection | AsyncpgLoan


# What pulse-outbox sees


class State(Enum):
    """What the next statement on a connection would be part of."""

    OPEN = "a transaction, or one that begins with it"
    OUTSIDE = "nothing: it would commit by itself"
    FAILED = "a transaction that can only be rolled back"
    BUSY = "nothing, before the one that is under way has ended"
    CLOSED = "nothing"


class Ask(NamedTuple):
    """One statement; `$1`, `$2` stand for its parameters, which are all text: no adapter of the application applies."""

    text: str
    parameters: tuple[str, ...]
    has_rows: bool = True

    @property
    def text_with_percents(self) -> str:
        """With `%s` instead: our statements name each parameter once and in order, and hold no percent sign."""
        return re.sub(r"\$\d", "%s", self.text)


class Copy(NamedTuple):
    """A COPY into a table, in the binary format."""

    schema: str
    table: str
    columns: Sequence[str]
    parts: Iterator[bytes]
    is_stream: bool = False
    """Code of the application runs where the next part is made."""


Steps = Generator[Ask | Copy, Sequence[Row], R]
"""What is to be done, one after the other. What a step raises is thrown into it, and it may take further steps."""


class SyncRoute(Protocol):
    """A connection as pulse-outbox uses it."""

    is_async: ClassVar[bool] = False
    begin: str
    """What its users write to open a transaction."""
    call: Callable[[bytes, Sequence[object]], Row] | None
    """Runs one statement with Python's own values, where the library is known to take them; returns the first row."""

    def state(self) -> State: ...
    def ask(self, ask: Ask) -> Sequence[Row]: ...
    def copies(self) -> bool: ...
    def copy(self, copy: Copy) -> None: ...


class AsyncRoute(Protocol):
    """The same, asynchronous."""

    is_async: ClassVar[bool] = True
    begin: str
    call: Callable[[bytes, Sequence[object]], Awaitable[Row]] | None

    async def state(self) -> State: ...
    async def ask(self, ask: Ask) -> Sequence[Row]: ...
    def copies(self) -> bool: ...
    async def copy(self, copy: Copy) -> None: ...


class Unfit(Exception):
    """What was given is known and is no connection; the text says what to pass instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What a connection is wanted for, in the words of its complaints."""

    complaint: type[OutboxError]
    sync_call: str
    async_call: str
    written: str
    """What is written: "event"."""
    beside: str
    """What it must commit together with: "data"."""
    optional: bool
    """`outside_transaction=True` exists."""
    unmigrated: tuple[type[OutboxError], str]
    """What is raised when the database has no schema of ours, and what is missing."""
    forbidden: str
    """What this database user may not do, and the grant. Both texts: {schema} stands for the schema."""

    # Which connection, and in what state

    def sync_route(self, connection: object, *, outside: bool) -> SyncRoute:
        """The connection, if what is written on it becomes part of the caller's transaction."""
        try:
            route = find_route(connection)
            if is_async(route):
                raise Unfit(f"this is an asynchronous connection: await {self.async_call}")
            state = route.state()
            if state is not State.OPEN:
                self._check(state, route, outside)
        except Unfit as unfit:
            raise self.complaint(str(unfit)) from unfit.__cause__
        return route

    async def async_route(self, connection: object, *, outside: bool) -> AsyncRoute:
        """The same for an asynchronous connection."""
        try:
            route = find_route(connection)
            if not is_async(route):
                raise Unfit(f"this is a synchronous connection: call {self.sync_call}")
            state = await route.state()
            if state is not State.OPEN:
                self._check(state, route, outside)
        except Unfit as unfit:
            raise self.complaint(str(unfit)) from unfit.__cause__
        return route

    def _check(self, state: State, route: SyncRoute | AsyncRoute, outside: bool) -> None:
        if state is State.OUTSIDE and outside:
            return
        if state is State.CLOSED:
            raise Unfit(
                f"the connection is closed: write the {self.written} before closing it, inside the transaction"
            )
        if state is State.FAILED:
            raise Unfit(_FAILED)
        if state is State.BUSY:
            raise Unfit("the connection is in the middle of a COPY or another statement: finish that first")
        meant = ", or say outside_transaction=True if that is meant" if self.optional else ""
        raise Unfit(
            f"the connection is in autocommit and no transaction is open, so the {self.written} would not commit "
            f"together with your {self.beside}: {route.begin}{meant}"
        )

    # What the database says

    def explained(self, error: Exception, schema: str) -> Exception:
        """The error in our words where it has to do with us; any other as it is."""
        sqlstate = sqlstate_of(error)
        if sqlstate in UNMIGRATED_SQLSTATES:
            kind, missing = self.unmigrated
            command = "pulse-outbox migrate" + ("" if schema == "pulse" else f" --schema {schema}")
            return kind(f"{missing.format(schema=schema)}: run `{command}`")
        if sqlstate == "42501":
            return self.complaint(self.forbidden.format(schema=schema))
        if sqlstate == "25P02":
            # A library that does not tell the transaction's state.
            return self.complaint(_FAILED)
        return from_database_error(error) or error

    # Doing it

    def run(
        self, connection: object, schema: str, steps: Callable[[SyncRoute], Steps[R]], *, outside: bool
    ) -> R:
        """Carries the steps out on the connection."""
        route = self.sync_route(connection, outside=outside)
        plan = steps(route)
        answer: Any = None
        failure: BaseException | None = None
        while True:
            try:
                step = plan.send(answer) if failure is None else plan.throw(failure)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # what Steps[R] returns
            finally:
                failure = None  # its traceback has this frame
            try:
                if isinstance(step, Ask):
                    answer = route.ask(step)
                else:
                    route.copy(step)
            except BaseException as error:
                failure = self._failure(error, schema)

    async def run_async(
        self, connection: object, schema: str, steps: Callable[[AsyncRoute], Steps[R]], *, outside: bool
    ) -> R:
        """The same on an asynchronous connection."""
        route = await self.async_route(connection, outside=outside)
        plan = steps(route)
        answer: Any = None
        failure: BaseException | None = None
        while True:
            try:
                step = plan.send(answer) if failure is None else plan.throw(failure)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                failure = None
            try:
                if isinstance(step, Ask):
                    answer = await route.ask(step)
                else:
                    await route.copy(step)
            except BaseException as error:
                failure = self._failure(error, schema)

    def _failure(self, error: BaseException, schema: str) -> BaseException:
        """What a step has raised, as the plan gets to know it: it may have something to undo."""
        if not isinstance(error, Exception):
            return error
        explained = self.explained(error, schema)
        if explained is not error:
            explained.__cause__ = error
        return explained


_FAILED = (
    "the connection's transaction has failed, so nothing more can be written in it: roll back and start again"
)


def raise_explained(error: Exception, explained: Exception) -> NoReturn:
    if explained is error:
        raise error
    raise explained from error


# Finding the library

# By the package that a connection's class, or one of its bases, comes from.
_MODULES = {
    "psycopg": "psycopg",
    "psycopg_pool": "psycopg",
    "sqlalchemy": "sqlalchemy",
    "django": "django",
    "asyncpg": "asyncpg",
}
_OTHER_DATABASES = {"sqlite3": "SQLite", "aiosqlite": "SQLite", "pymysql": "MySQL", "MySQLdb": "MySQL"}


def find_route(connection: object) -> SyncRoute | AsyncRoute:
    """The connection as its library's module knows it; raises Unfit for anything that is no connection."""
    kind: Any = type(connection)
    route = _finder(kind)(connection)
    if route is not None:
        return route
    if isinstance(connection, type):
        raise Unfit(f"{connection.__qualname__} is a class: pass a connection")
    if _is_cursor(connection):
        raise Unfit("this is a cursor: pass its connection")
    given = "None" if connection is None else f"{type(connection).__module__}.{type(connection).__qualname__}"
    raise Unfit(
        f"a connection is needed, not {given}: pass the psycopg, SQLAlchemy, Django, asyncpg or other DB-API "
        "connection, or the Session, whose transaction it belongs to"
    )


@lru_cache(maxsize=64)
def _finder(kind: type[Any]) -> Callable[[object], SyncRoute | AsyncRoute | None]:
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in _OTHER_DATABASES:
            raise Unfit(
                f"this is a connection to {_OTHER_DATABASES[package]}: pass one to the PostgreSQL database"
            )
        if package in _MODULES:
            return import_module(f"{__name__}.{_MODULES[package]}").find_route  # type: ignore[no-any-return]
    return import_module(f"{__name__}.dbapi").find_route  # type: ignore[no-any-return]


def is_async(route: SyncRoute | AsyncRoute) -> TypeIs[AsyncRoute]:
    return route.is_async


def _is_cursor(thing: object) -> bool:
    return all(hasattr(thing, name) for name in ("execute", "fetchone", "description"))
