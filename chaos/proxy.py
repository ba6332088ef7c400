"""Run as a program: a TCP proxy before PostgreSQL that understands its protocol and can misbehave as networks do.

It prints the port that it listens on. Orders come on standard input as lines of JSON, and stay in force until the next
about the same thing: {"upstream": SOCKET}, {"lose": rate}, {"delay": seconds}, {"forget": rate}, {"refuse": bool};
{"reset": rate} cuts so many of the connections that there are, once.

To lose an answer it forwards a request that changes something (COMMIT, or a call of one of our functions), waits until
the server has said that it is done, and then cuts the connection, or goes silent, instead of passing the answer on.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from chaos.journal import Journal

CHANGES = re.compile(rb"\b(commit)\b|\boutbox_(\w+)", re.IGNORECASE)
READY_FOR_QUERY = ord("Z")
_SPECIAL = {80877102, 80877103, 80877104}  # cancel, TLS, GSS: requests before the startup message


class Requests:
    """What a client sends: names the requests in it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._started = False
        self._prepared: dict[bytes, bytes] = {}

    def feed(self, data: bytes) -> list[str]:
        """The changing requests that these bytes complete: `commit`, `claim`, `complete` …"""
        buffer = self._buffer
        buffer += data
        found = []
        while True:
            head = 1 if self._started else 0
            if len(buffer) < head + 4:
                break
            length = head + int.from_bytes(buffer[head : head + 4])
            if len(buffer) < length:
                break
            kind, body = bytes(buffer[:head]), bytes(buffer[head + 4 : length])
            del buffer[:length]
            if not self._started:
                self._started = int.from_bytes(body[:4]) not in _SPECIAL
            elif (text := self._text(kind, body)) and (match := CHANGES.search(text)):
                found.append((match[1] or match[2]).decode().lower())
        return found

    def _text(self, kind: bytes, body: bytes) -> bytes:
        if kind == b"Q":
            return body
        if kind == b"P":
            name, query, _ = body.split(b"\0", 2)
            self._prepared[name] = query
        if kind == b"B":
            _, name, _ = body.split(b"\0", 2)
            return self._prepared.get(name, b"")
        return b""


class Answers:
    """What the server sends: only its ends are of interest."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> bool:
        """Whether the server is ready for the next request."""
        self._buffer += data
        ready = False
        while len(self._buffer) >= 5:
            length = 1 + int.from_bytes(self._buffer[1:5])
            if len(self._buffer) < length:
                break
            ready = self._buffer[0] == READY_FOR_QUERY
            del self._buffer[:length]
        return ready


class Connection:
    """One client and its way to the server."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader, self.writer = reader, writer
        self._requests, self._answers = Requests(), Answers()
        self._losing: str | None = None
        self.forgotten = proxy.chance(proxy.forget)
        """Bytes vanish in both directions, and nobody is told: what a router does that has lost its memory."""

    async def run(self) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(self._proxy.upstream)
        ways = [
            asyncio.create_task(self._upward(up_writer)),
            asyncio.create_task(self._downward(up_reader)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up_writer.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _upward(self, up_writer: asyncio.StreamWriter) -> None:
        while data := await self._reader.read(65536):
            if self.forgotten:
                continue
            if self._proxy.delay:
                await asyncio.sleep(self._proxy.delay)
            for request in self._requests.feed(data):
                if self._proxy.chance(self._proxy.lose):
                    self._losing = request
            up_writer.write(data)
            await up_writer.drain()

    async def _downward(self, up_reader: asyncio.StreamReader) -> None:
        while data := await up_reader.read(65536):
            ready = self._answers.feed(data)
            if self.forgotten:
                continue
            if self._losing is not None:
                if ready:
                    silently = self._proxy.chance(0.3)
                    self._proxy.journal.write("lost", request=self._losing, silently=silently)
                    if not silently:
                        return
                    self.forgotten = True
                continue
            self.writer.write(data)
            await self.writer.drain()


class Proxy:
    """All connections, and what is wrong with the network at present."""

    def __init__(self, journal: Journal, seed: int) -> None:
        self.journal = journal
        self.upstream = ""
        self.lose = 0.0
        self.delay = 0.0
        self.forget = 0.0
        self.refuse = False
        self._random = random.Random(seed)
        self._connections: dict[Connection, asyncio.Task[None]] = {}

    def chance(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, until one side ends."""
        connection = Connection(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            if not self.refuse:
                await connection.run()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            writer.transport.abort()
            del self._connections[connection]

    def obey(self, order: dict[str, Any]) -> None:
        for name, value in order.items():
            if name == "reset":
                for connection in list(self._connections):
                    if self.chance(value):
                        connection.writer.transport.abort()
            else:
                setattr(self, name, value)
            if name == "forget":
                for connection in self._connections:
                    connection.forgotten = connection.forgotten or self.chance(value)
            if name == "upstream":
                for connection in self._connections:
                    connection.writer.transport.abort()


async def main(directory: str, seed: str) -> None:
    proxy = Proxy(Journal(Path(directory) / "proxy.jsonl"), int(seed))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        proxy.obey(json.loads(line))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
