"""What a dispatcher and its child processes say to each other: JSON, one message a line, over a socket of their own.

To the child: an order first, then `["job", number, claim…]`, `["give_back", topics]`, `["end"]`.
From the child: `["ready", topics]` or `["broken", why]`, then `["started", number]` before a handler is called and one
of completed, over, failed, snoozed or returned after it; `["alive", still]`, `["stalled", …]`, `["exhausted", why]`.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json, to_json

from pulse_outbox.claims import Claim
from pulse_outbox.dispatcher.jobs import Completed, Failed, Lapsed, Over, Released, Snoozed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pulse_outbox.dispatcher.jobs import Job, Outcome

CHUNK = 256 * 1024
"""Bytes that one read takes."""


class Lines:
    """Puts lines together from whatever pieces the socket hands out."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now."""
        first, *others = data.split(b"\n")
        self._pieces.append(first)
        if not others:
            return []
        lines = [b"".join(self._pieces), *others[:-1]]
        self._pieces = [others[-1]]
        return lines


def decode(line: bytes) -> Any:
    """A message."""
    return from_json(line)


def encode(*message: object) -> bytes:
    """A message as a line. Text of any kind may be in it."""
    return json.dumps(message, default=str).encode() + b"\n"


def encode_job(number: int, claim: Claim) -> bytes:
    """A claim for the child, under the number by which both sides will call it."""
    return to_json(["job", number, *claim], bytes_mode="hex") + b"\n"


def decode_claim(fields: Sequence[Any]) -> Claim:
    """The claim, as the parent had it from the database."""
    claim = Claim(*fields)
    return claim._replace(raw_id=bytes.fromhex(claim.raw_id), raw_token=bytes.fromhex(claim.raw_token))  # type: ignore[arg-type]  # text until here


def encode_outcome(number: int, outcome: Outcome) -> bytes:
    """What came of a job."""
    match outcome:
        case Completed():
            return b'["completed",%d]\n' % number
        case Over():
            return encode("over", number, outcome.lost)
        case Released():
            return b'["returned",%d]\n' % number
        case Failed():
            return encode(
                "failed",
                number,
                outcome.error,
                dict(outcome.failure),
                outcome.delay.total_seconds(),
                outcome.terminal,
            )
        case Snoozed():
            return encode("snoozed", number, outcome.delay.total_seconds(), outcome.reason)
        case Lapsed():
            raise AssertionError("only a parent sees that")


def decode_outcome(kind: str, job: Job, rest: Sequence[Any]) -> Outcome:
    """The outcome of a job, as the child saw it."""
    match kind, rest:
        case "completed", []:
            return Completed(job)
        case "over", [lost]:
            return Over(job, lost=lost)
        case "returned", []:
            return Released(job)
        case "failed", [error, failure, delay, terminal]:
            return Failed(job, error, failure, timedelta(seconds=delay), terminal)
        case "snoozed", [delay, reason]:
            return Snoozed(job, timedelta(seconds=delay), reason)
        case _:
            raise ValueError(f"no kind of outcome: {kind}")
