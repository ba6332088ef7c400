"""The health endpoint: GET /live and GET /ready, with what is wrong in words."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pulse_outbox.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

REQUEST_TIMEOUT = 5.0
MAX_REQUEST = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What the endpoint asks. Both give the complaints: an empty list is well.

    Live says whether a restart would help; ready whether this process takes work.
    """

    live: Callable[[], list[str]]
    ready: Callable[[], list[str]]
    facts: Callable[[], dict[str, Any]]


@contextlib.asynccontextmanager
async def serve_health(address: str | None, health: Health) -> AsyncIterator[None]:
    """Serves at HOST:PORT while the context is open; nothing at all when there is no address."""
    if address is None:
        yield
        return
    host, port = split_address(address)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                request = await reader.readuntil(b"\r\n")
                writer.write(respond(request, health))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked has gone, or never said what he wanted
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(answer, host, port, limit=MAX_REQUEST)
    except OSError as error:
        raise SettingsError(f"health: can't listen on {address}: {error.strerror or error}") from error
    async with server:
        yield


def respond(request: bytes, health: Health) -> bytes:
    """The whole response to one request line."""
    parts = request.split()
    path = parts[1].split(b"?")[0] if len(parts) > 1 else b""
    match path:
        case b"/live" | b"/livez" | b"/healthz":
            complaints = health.live()
        case b"/ready" | b"/readyz":
            complaints = health.live() + health.ready()
        case _:
            return _response("404 Not Found", {"error": "ask for /live or /ready"})
    status = "503 Service Unavailable" if complaints else "200 OK"
    return _response(status, {"ok": not complaints, "wrong": complaints, **health.facts()})


def _response(status: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + text


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT, as in 127.0.0.1:8080, [::1]:8080 or :8080 for all interfaces."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingsError(f"health: HOST:PORT is needed, not {address!r}")
    return host.strip("[]"), int(port)
