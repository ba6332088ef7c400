"""Delivers webhooks, and comes back when the receiver says."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx
from pydantic import BaseModel, HttpUrl

from pulse_outbox import Event, Outbox, RetryPolicy, Verdict

outbox = Outbox()

LONGEST_WAIT = timedelta(hours=6)
"""A receiver may ask for a year; this is what it gets."""


class Delivery(BaseModel):
    url: HttpUrl
    body: dict[str, Any]


def classify(error: BaseException) -> Verdict | Literal["terminal", "transient"] | None:
    """What an answer means for the next attempt. None: the rules after it decide (a lost connection is transient)."""
    if not isinstance(error, httpx.HTTPStatusError):
        return None
    response = error.response
    if response.status_code in (429, 503):
        # Transient: the attempt is spent, so that a receiver which never recovers ends in a dead letter.
        when = retry_after(response.headers.get("Retry-After", ""))
        return Verdict(kind="transient", rule=f"http.{response.status_code}", **when)
    if response.is_client_error:
        return Verdict(kind="terminal", rule=f"http.{response.status_code}")
    return "transient"


def retry_after(value: str) -> dict[str, Any]:
    """The delay or time that a Retry-After header names, as a Verdict takes it; nothing where it names none."""
    if value.isascii() and value.isdigit():
        return {"delay": min(timedelta(seconds=min(int(value), 10**9)), LONGEST_WAIT)}
    try:
        at: datetime = parsedate_to_datetime(value)
    except ValueError:
        return {}
    return {"at": at} if at.tzinfo is not None else {}


@outbox.lifespan
async def open_client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=10) as client:
        yield client


@outbox.handler("webhook", retry=RetryPolicy(max_attempts=20, classify=classify), timeout=30, concurrency=50)
async def deliver(event: Event[Delivery]) -> None:
    client: httpx.AsyncClient = event.resources
    response = await client.post(
        str(event.payload.url),
        json=event.payload.body,
        headers={"Idempotency-Key": event.idempotency_key},
    )
    response.raise_for_status()
