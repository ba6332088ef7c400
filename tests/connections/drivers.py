"""One way to reach the database for each library and driver, all with the same few verbs.

The asynchronous ones run on a loop of their own, so that one suite holds them all to the same rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import asyncpg
import pg8000.dbapi
import psycopg
import psycopg2
import sqlalchemy as sa
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from pulse_outbox import Event, Outbox


class Driver:
    """A connection on which a transaction is open, as its library's users open one."""

    given: Any
    """What the application passes to the outbox."""
    begin: str
    """What the refusal of autocommit tells its users."""
    copies = True

    def __init__(self, dsn: str, *, autocommit: bool = False) -> None:
        self.dsn = dsn
        self.autocommit = autocommit

    def enqueue(self, outbox: Outbox, topic: str, payload: object = None, **options: Any) -> Any:
        return outbox.enqueue(self.given, topic, payload, **options)

    def enqueue_many(self, outbox: Outbox, events: Any, **options: Any) -> Any:
        return outbox.enqueue_many(self.given, events, **options)

    def first_time(self, outbox: Outbox, event: Event[Any], name: str) -> bool:
        return outbox.first_time(self.given, event, name=name)

    def open(self) -> None:
        raise NotImplementedError

    def execute(self, statement: str) -> None:
        """A write of the application's own."""
        raise NotImplementedError

    def commit(self) -> None:
        self.given.commit()

    def rollback(self) -> None:
        self.given.rollback()

    def savepoint(self) -> Any:
        """A context in which an error rolls back to the savepoint and goes on."""
        raise NotImplementedError

    def close(self) -> None:
        """As the application does it."""
        self.given.close()

    def dispose(self) -> None:
        """Leaves nothing open, whatever happened."""
        self.close()


class Psycopg(Driver):
    begin = "with conn.transaction():"

    def open(self) -> None:
        self.given = psycopg.connect(self.dsn, autocommit=self.autocommit)

    def execute(self, statement: str) -> None:
        self.given.execute(statement)

    def savepoint(self) -> Any:
        return self.given.transaction()


class Dbapi(Driver):
    """Savepoints by hand, as the DB-API leaves them."""

    begin = "conn.autocommit = False"
    copies = False

    def execute(self, statement: str) -> None:
        cursor = self.given.cursor()
        cursor.execute(statement)
        cursor.close()

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        self.execute("savepoint here")
        try:
            yield
        except BaseException:
            self.execute("rollback to savepoint here")
            raise


class Psycopg2(Dbapi):
    def open(self) -> None:
        self.given = psycopg2.connect(self.dsn)
        self.given.autocommit = self.autocommit


class Pg8000(Dbapi):
    def open(self) -> None:
        parts = parts_of(self.dsn)
        if parts["host"].startswith("/"):
            parts["unix_sock"] = f"{parts.pop('host')}/.s.PGSQL.{parts.pop('port')}"
        self.given = pg8000.dbapi.connect(**parts)
        self.given.autocommit = self.autocommit

    def dispose(self) -> None:
        with suppress(pg8000.dbapi.InterfaceError):
            self.given.close()


class SASession(Driver):
    begin = 'without isolation_level="AUTOCOMMIT"'
    name = "psycopg"

    def make_engine(self) -> sa.Engine:
        options = {"isolation_level": "AUTOCOMMIT"} if self.autocommit else {}
        return sa.create_engine(url_of(self.dsn, self.name), poolclass=NullPool, **options)

    def open(self) -> None:
        self.engine = self.make_engine()
        self.given = Session(self.engine)

    def execute(self, statement: str) -> None:
        self.given.execute(sa.text(statement))

    def savepoint(self) -> Any:
        return self.given.begin_nested()

    def close(self) -> None:
        # A Session is usable again after close(); its connection isn't.
        connection = self.given.connection()
        self.given.close()
        self.given = connection

    def dispose(self) -> None:
        self.given.close()
        self.engine.dispose()


class SAScopedSession(SASession):
    def open(self) -> None:
        self.engine = self.make_engine()
        self.given = scoped_session(sessionmaker(self.engine))


class SAConnection(SASession):
    def open(self) -> None:
        self.engine = self.make_engine()
        self.given = self.engine.connect()

    def close(self) -> None:
        self.given.close()


class SASessionPsycopg2(SASession):
    name = "psycopg2"
    copies = False


class SASessionPg8000(SASession):
    name = "pg8000"
    copies = False


class Django(Driver):
    begin = "with transaction.atomic():"

    def open(self) -> None:
        from django.db import connection, transaction

        use_django(self.dsn)
        self.given = connection
        self.atomic: Any = None
        self.transaction = transaction
        if not self.autocommit:
            self._begin()

    def _begin(self) -> None:
        self.atomic = self.transaction.atomic()
        self.atomic.__enter__()

    def _end(self) -> None:
        if self.atomic is not None:
            atomic, self.atomic = self.atomic, None
            atomic.__exit__(None, None, None)

    def execute(self, statement: str) -> None:
        with self.given.cursor() as cursor:
            cursor.execute(statement)

    def commit(self) -> None:
        self._end()
        self._begin()

    def rollback(self) -> None:
        self.transaction.set_rollback(True)
        self._end()
        self._begin()

    def savepoint(self) -> Any:
        return self.transaction.atomic()

    def close(self) -> None:
        self.given.close()

    def dispose(self) -> None:
        if self.atomic is not None:
            self.transaction.set_rollback(True)
        self._end()
        self.given.close()


class DjangoNamed(Django):
    """A named database, while the default one leads nowhere."""

    def open(self) -> None:
        from django.db import connections, transaction

        use_django(self.dsn, "other")
        self.given = connections["other"]
        self.atomic = None
        self.transaction = transaction
        if not self.autocommit:
            self._begin()

    def _begin(self) -> None:
        self.atomic = self.transaction.atomic(using="other")
        self.atomic.__enter__()

    def rollback(self) -> None:
        self.transaction.set_rollback(True, using="other")
        self._end()
        self._begin()

    def savepoint(self) -> Any:
        return self.transaction.atomic(using="other")

    def dispose(self) -> None:
        if self.atomic is not None:
            self.transaction.set_rollback(True, using="other")
        self._end()
        self.given.close()


# Asynchronous


class AsyncDriver(Driver):
    def __init__(self, dsn: str, *, autocommit: bool = False) -> None:
        super().__init__(dsn, autocommit=autocommit)
        self.runner = asyncio.Runner()
        self.run = self.runner.run

    def open(self) -> None:
        self.run(self.open_async())

    async def open_async(self) -> None:
        raise NotImplementedError

    def enqueue(self, outbox: Outbox, topic: str, payload: object = None, **options: Any) -> Any:
        return self.run(outbox.enqueue_async(self.given, topic, payload, **options))

    def enqueue_many(self, outbox: Outbox, events: Any, **options: Any) -> Any:
        return self.run(outbox.enqueue_many_async(self.given, events, **options))

    def first_time(self, outbox: Outbox, event: Event[Any], name: str) -> bool:
        return self.run(outbox.first_time_async(self.given, event, name=name))

    def execute(self, statement: str) -> None:
        self.run(self.given.execute(statement))

    def commit(self) -> None:
        self.run(self.given.commit())

    def rollback(self) -> None:
        self.run(self.given.rollback())

    def nested(self) -> Any:
        """The library's own context for a savepoint."""
        return self.given.transaction()

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        nested = self.nested()
        self.run(nested.__aenter__())
        try:
            yield
        except BaseException as error:
            self.run(nested.__aexit__(type(error), error, error.__traceback__))
            raise
        else:
            self.run(nested.__aexit__(None, None, None))

    def close(self) -> None:
        self.run(self.given.close())

    async def dispose_async(self) -> None:
        await self.given.close()

    def dispose(self) -> None:
        self.run(self.dispose_async())
        self.runner.close()


class AsyncPsycopg(AsyncDriver):
    begin = "async with conn.transaction():"

    async def open_async(self) -> None:
        self.given = await psycopg.AsyncConnection.connect(self.dsn, autocommit=self.autocommit)


class Asyncpg(AsyncDriver):
    begin = "async with conn.transaction():"

    async def open_async(self) -> None:
        self.given = await asyncpg.connect(**parts_of(self.dsn))
        await self.begin_async()

    async def begin_async(self) -> None:
        if not self.autocommit:
            self.outer = self.given.transaction()
            await self.outer.start()

    async def end_async(self, how: str) -> None:
        await getattr(self.outer, how)()
        await self.begin_async()

    def commit(self) -> None:
        self.run(self.end_async("commit"))

    def rollback(self) -> None:
        self.run(self.end_async("rollback"))


class AsyncpgPool(Asyncpg):
    """A connection as its pool lends it."""

    async def open_async(self) -> None:
        self.pool = await asyncpg.create_pool(**parts_of(self.dsn), min_size=1, max_size=1)
        self.given = await self.pool.acquire()
        await self.begin_async()

    def close(self) -> None:
        # Given back, and still in the application's hands.
        self.run(self.pool.release(self.given))

    async def dispose_async(self) -> None:
        self.pool.terminate()


class SAAsyncSession(AsyncDriver):
    begin = 'without isolation_level="AUTOCOMMIT"'
    name = "psycopg"

    def make_engine(self) -> Any:
        options = {"isolation_level": "AUTOCOMMIT"} if self.autocommit else {}
        return create_async_engine(url_of(self.dsn, self.name), poolclass=NullPool, **options)

    async def open_async(self) -> None:
        self.engine = self.make_engine()
        self.given: Any = AsyncSession(self.engine)

    def execute(self, statement: str) -> None:
        self.run(self.given.execute(sa.text(statement)))

    def nested(self) -> Any:
        return self.given.begin_nested()

    def close(self) -> None:
        async def close() -> AsyncConnection:
            connection: AsyncConnection = await self.given.connection()
            await self.given.close()
            return connection

        self.given = self.run(close())

    async def dispose_async(self) -> None:
        await self.given.close()
        await self.engine.dispose()


class SAAsyncSessionAsyncpg(SAAsyncSession):
    name = "asyncpg"


class SAAsyncConnection(SAAsyncSession):
    async def open_async(self) -> None:
        self.engine = self.make_engine()
        self.given = await self.engine.connect()

    def close(self) -> None:
        self.run(self.given.close())


class SAAsyncConnectionAsyncpg(SAAsyncConnection):
    name = "asyncpg"


DRIVERS: list[type[Driver]] = [
    Psycopg,
    Psycopg2,
    Pg8000,
    SASession,
    SAScopedSession,
    SAConnection,
    SASessionPsycopg2,
    SASessionPg8000,
    Django,
    DjangoNamed,
    AsyncPsycopg,
    Asyncpg,
    AsyncpgPool,
    SAAsyncSession,
    SAAsyncSessionAsyncpg,
    SAAsyncConnection,
    SAAsyncConnectionAsyncpg,
]

Open = Callable[..., Driver]


@contextmanager
def opening() -> Iterator[Open]:
    """Opens drivers, and disposes of them at the end."""
    with ExitStack() as stack:

        def open_one(kind: type[Driver], dsn: str, *, autocommit: bool = False) -> Driver:
            driver = kind(dsn, autocommit=autocommit)
            driver.open()
            stack.callback(driver.dispose)
            return driver

        yield open_one


# Addresses


def parts_of(dsn: str) -> dict[str, Any]:
    """For asyncpg and pg8000, which know no conninfo strings."""
    given = conninfo_to_dict(dsn)
    parts: dict[str, Any] = {"user": given["user"], "database": given["dbname"]}
    if given.get("password"):
        parts["password"] = given["password"]
    return parts | {"host": given["host"], "port": int(given.get("port") or 5432)}


def url_of(dsn: str, driver: str) -> sa.URL:
    """The address as SQLAlchemy wants it."""
    given = conninfo_to_dict(dsn)
    port = str(given.get("port") or 5432)
    host = str(given["host"])
    if not host.startswith("/"):
        return sa.URL.create(
            f"postgresql+{driver}",
            str(given["user"]),
            str(given["password"]) if given.get("password") else None,
            host,
            int(port),
            str(given["dbname"]),
        )
    query = {"unix_sock": f"{host}/.s.PGSQL.{port}"} if driver == "pg8000" else {"host": host, "port": port}
    return sa.URL.create(
        f"postgresql+{driver}", str(given["user"]), database=str(given["dbname"]), query=query
    )


def use_django(dsn: str, alias: str = "default") -> None:
    """Makes Django's connection of this name lead to the database."""
    import django
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        nowhere = {"ENGINE": "django.db.backends.postgresql", "NAME": "nowhere", "HOST": "/nowhere"}
        settings.configure(
            DATABASES={"default": nowhere, "other": {**nowhere}},
            INSTALLED_APPS=["pulse_outbox.django"],
            USE_TZ=True,
        )
        django.setup()
    given = conninfo_to_dict(dsn)
    connections.settings[alias].update(
        NAME=given["dbname"],
        USER=given["user"],
        PASSWORD=given.get("password") or "",
        HOST=given["host"],
        PORT=given.get("port") or "",
    )
    with suppress(AttributeError):
        del connections[alias]  # else it is made from the settings of the test before
