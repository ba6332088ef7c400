"""A TCP proxy between a dispatcher and PostgreSQL that can lose packets, answers or connections, as networks do."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from psycopg.conninfo import conninfo_to_dict, make_conninfo

# Names that psycopg gives, which prepares in a message of its own, and names that a link gives.
_PREPARE = re.compile(rb"P....((?:_pg3|pulse_outbox)_\d+)\0([^\0]*)\0", re.DOTALL)
_BIND = re.compile(rb"B....\0((?:_pg3|pulse_outbox)_\d+)\0", re.DOTALL)


class Proxy:
    """Forwards bytes both ways. Set the attributes to make it misbehave."""

    def __init__(self, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        self._host, self._port = str(given["host"]), int(str(given["port"]))
        self._dsn = dsn
        self._numbers = itertools.count()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.frozen = False
        """Bytes vanish in both directions, connections stay: what a router that forgot them does."""
        self._starts: dict[int, bytes] = {}
        self._frozen: set[int] = set()
        self.lose_answer_to: bytes | None = None
        """The first request with these bytes reaches the server; instead of its answer the connection is cut."""
        self.lose_only_rows = False
        """An answer without rows passes, the next one is lost instead: that of a claim that took something, say."""
        self.refuse_once_lost = False
        """With the answer everything is lost: from then on new connections are refused."""
        self.lost_answers = 0
        self.refuse = False
        """New connections are closed at once."""

    @property
    def dsn(self) -> str:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return make_conninfo(self._dsn, host="127.0.0.1", port=port)

    def freeze(self, application: str) -> int:
        """Freezes the connections that this application has now, not those that it will make; how many."""
        found = {number for number, start in self._starts.items() if application.encode() in start}
        self._frozen |= found
        return len(found)

    def cut(self) -> None:
        """Every connection ends, now."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._connection(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            return
        self._writers.add(writer)
        if self._host.startswith("/"):
            path = f"{self._host}/.s.PGSQL.{self._port}"
            up_reader, up_writer = await asyncio.open_unix_connection(path)
        else:
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        number = next(self._numbers)
        self._starts[number] = b""
        losing: bytes | None = None
        prepared: dict[bytes, bytes] = {}

        def is_it(data: bytes) -> bool:
            """Whether a request is the one whose answer is to be lost, as text or by its prepared name."""
            if self.lose_answer_to is None:
                return False
            if self.lose_answer_to in data and (_BIND.search(data) or not _PREPARE.match(data)):
                return True
            return any(self.lose_answer_to in prepared.get(name, b"") for name in _BIND.findall(data))

        async def upward() -> None:
            nonlocal losing
            while data := await reader.read(65536):
                if len(self._starts[number]) < 300:
                    self._starts[number] += data
                if self.frozen or number in self._frozen:
                    continue
                prepared.update(_PREPARE.findall(data))
                if is_it(data):
                    losing, self.lose_answer_to = self.lose_answer_to, None
                up_writer.write(data)
                await up_writer.drain()

        async def downward() -> None:
            nonlocal losing
            while data := await up_reader.read(65536):
                if losing and self.lose_only_rows and b"SELECT 0\0" in data:
                    losing, self.lose_answer_to = None, losing
                if losing:
                    self.lost_answers += 1
                    self.refuse = self.refuse or self.refuse_once_lost
                    return  # the server has done its work, and nobody will hear of it
                if self.frozen or number in self._frozen:
                    continue
                writer.write(data)
                await writer.drain()

        ways = [asyncio.create_task(upward()), asyncio.create_task(downward())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._starts[number]
            up_writer.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[Proxy]:
    """A proxy to the DSN's server for as long as the context is open."""
    proxy = Proxy(dsn)
    proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    try:
        yield proxy
    finally:
        proxy._server.close()
        for task in list(proxy._tasks):
            task.cancel()
        await asyncio.gather(*proxy._tasks, return_exceptions=True)
        await proxy._server.wait_closed()
