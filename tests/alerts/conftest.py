"""What the tests of alerts share: a Sentry of their own, and times short enough for a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
import structlog

from pulse_outbox import Event, Outbox, TerminalHandlerError
from pulse_outbox.alerts import paying
from tests.support.dispatching import Table
from tests.support.sentry_receiver import Receiver, receiving


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paying, "LEASE", timedelta(seconds=0.5))
    monkeypatch.setattr(paying, "BACKOFF_FIRST", 0.05)
    monkeypatch.setattr(paying, "BACKOFF_LONGEST", 0.2)
    monkeypatch.delenv("SENTRY_DSN", raising=False)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def sentry(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Receiver:
    """A Sentry that only the environment knows of."""
    monkeypatch.setenv("SENTRY_DSN", receiver.dsn)
    monkeypatch.setenv("SENTRY_ENVIRONMENT", "test")
    return receiver


@pytest.fixture
def outbox() -> Outbox:
    return with_handlers(Outbox())


def with_handlers(outbox: Outbox) -> Outbox:
    """`dies` raises what its payload says, `works` does nothing."""

    @outbox.handler("dies")
    async def dies(event: Event[dict]) -> None:
        raise {"value": TerminalHandlerError, "key": NoSuchKey}[event.payload.get("kind", "value")]("no")

    outbox.handler("works")(works)
    return outbox


async def works(event: Event[dict]) -> None:
    """Nothing to do."""


class NoSuchKey(TerminalHandlerError):
    """Another class, so another kind."""


@pytest_asyncio.fixture
async def table(dsn: str) -> AsyncIterator[Table]:
    table = Table(dsn)
    yield table
    await table.close()


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield lines
