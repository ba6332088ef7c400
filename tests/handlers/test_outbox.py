"""The Outbox itself: settings, lifespan, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

import pulse_outbox
from pulse_outbox import Outbox, SettingsError


def test_the_schema_comes_from_argument_environment_or_default(monkeypatch):
    """In that order."""
    monkeypatch.delenv("PULSE_OUTBOX_SCHEMA", raising=False)
    assert Outbox().schema == "pulse"
    monkeypatch.setenv("PULSE_OUTBOX_SCHEMA", "other")

    assert Outbox().schema == "other"
    assert Outbox(schema="mine").schema == "mine"


@pytest.mark.parametrize("schema", ["Pulse", "a-b", "pg_x", "1a", 'x"; drop table y', "a" * 42, "é"])
def test_a_hostile_schema_name_is_refused(schema: str):
    """It becomes part of SQL text."""
    with pytest.raises(SettingsError, match="can't be the schema's name"):
        Outbox(schema=schema)


@pytest.mark.parametrize(
    "settings",
    [{"max_payload_bytes": 0}, {"max_payload_bytes": "1"}, {"max_payload_bytes": 2**30}, {"redact": 3}],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any]):
    """When the outbox is made."""
    with pytest.raises(SettingsError):
        Outbox(**settings)


def lifespans(log: list[str]) -> dict[str, Any]:
    async def as_async_generator():
        log.append("open")
        yield "pool"
        log.append("close")

    def as_generator():
        log.append("open")
        yield "pool"
        log.append("close")

    return {
        "async generator": as_async_generator,
        "generator": as_generator,
        "async context manager": asynccontextmanager(as_async_generator),
        "context manager": contextmanager(as_generator),
    }


@pytest.mark.parametrize("kind", ["async generator", "generator", "async context manager", "context manager"])
async def test_a_lifespan_opens_and_closes_in_every_form(kind: str):
    """People know these forms from web frameworks."""
    log: list[str] = []
    outbox, factory = Outbox(), lifespans(log)[kind]

    assert outbox.lifespan(factory) is factory
    for _ in range(2):
        async with outbox.open_resources() as resources:
            assert (resources, log.pop()) == ("pool", "open")
        assert log.pop() == "close"


async def test_a_lifespan_closes_after_a_failure():
    """Connections must not leak when a dispatcher ends badly."""
    log: list[str] = []
    outbox = Outbox()

    @outbox.lifespan
    async def resources():
        try:
            yield 1
        finally:
            log.append("closed")

    with pytest.raises(RuntimeError):
        async with outbox.open_resources():
            raise RuntimeError

    assert log == ["closed"]


async def test_without_a_lifespan_there_are_no_resources():
    """`event.resources` is None then."""
    async with Outbox().open_resources() as resources:
        assert resources is None


async def test_a_lifespan_that_is_none_is_told():
    """A coroutine function is the usual mistake; so is a second lifespan."""
    outbox = Outbox()
    outbox.lifespan(lambda: 3)

    with pytest.raises(SettingsError, match="not a context manager"):
        async with outbox.open_resources():
            pass
    with pytest.raises(SettingsError, match="already"):
        outbox.lifespan(lambda: 3)


def test_every_public_name_can_be_imported():
    """They are loaded on first use, so nothing else would notice a stale one."""
    for name in pulse_outbox.__all__:
        assert getattr(pulse_outbox, name) is not None
    assert set(pulse_outbox.__all__) <= set(dir(pulse_outbox))
    with pytest.raises(AttributeError, match="no attribute 'invented'"):
        pulse_outbox.invented  # noqa: B018


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import pulse_outbox", ["pydantic", "psycopg", "asyncio"]),
        ("from pulse_outbox import Outbox; Outbox()", ["psycopg", "tenacity", "sentry_sdk", "structlog"]),
        ("import pulse_outbox.enqueue", ["tenacity", "sentry_sdk", "structlog", "psycopg_pool"]),
    ],
)
def test_importing_loads_no_more_than_needed(code: str, absent: list[str]):
    """A web application that enqueues must not pay for a worker."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sorted(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert not set(absent) & set(done.stdout.split())
