"""What a dispatcher and its children say to each other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from pulse_outbox.claims import Claim, raw_time
from pulse_outbox.dispatcher.child_process import describe_exit
from pulse_outbox.dispatcher.jobs import Completed, Failed, Job, Over, Released, Snoozed
from pulse_outbox.dispatcher.wire import (
    Lines,
    decode,
    decode_claim,
    decode_outcome,
    encode_job,
    encode_outcome,
)
from pulse_outbox.handlers import make_handler

CLAIM = Claim(
    raw_id=uuid4().bytes,
    seq=7,
    topic="order.paid",
    payload='{"text": "two\\nlines, \u2028 and \U0001f4ee"}',
    headers=None,
    source=None,
    target="mail",
    idempotency_key="order:7\n",
    ordering_key=None,
    priority=-9,
    generation=2**62,
    attempts=1,
    max_attempts=5,
    lease_seq=3,
    lapses=1,
    snoozes=0,
    alone=False,
    raw_created_at=raw_time(datetime(2030, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)),
    raw_next_run_at=raw_time(datetime(2030, 1, 1, 12, tzinfo=UTC)),
    raw_looked_at=raw_time(datetime(2030, 1, 1, 12, 0, 0, 373456, tzinfo=UTC)),
    raw_token=uuid4().bytes,
)
JOB = Job(CLAIM, make_handler("order.paid", lambda event: None), 0.0)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_lines_are_whole_whatever_the_pieces(size):
    """A socket hands out what it likes."""
    text = b"first\n\nthird is longer than the others\nlast\n"
    lines = Lines()

    heard = [line for at in range(0, len(text), size) for line in lines.feed(text[at : at + size])]

    assert heard == text.split(b"\n")[:-1]


def test_half_a_line_is_no_message():
    """A child may die in the middle of a word."""
    assert Lines().feed(b'["completed",1') == []


def test_claim_arrives_as_it_was():
    """The child decodes and fences with what the database gave."""
    line = encode_job(12, CLAIM)
    kind, number, *fields = decode(line)

    assert line.count(b"\n") == 1
    assert (kind, number) == ("job", 12)
    assert decode_claim(fields) == CLAIM


@pytest.mark.parametrize(
    "outcome",
    [
        Completed(JOB),
        Over(JOB),
        Over(JOB, lost=True),
        Released(JOB),
        Failed(JOB, "a\nb \u2028 \U0001f4ee" * 1000, {"rule": "x"}, timedelta(seconds=1.5), terminal=True),
        Snoozed(JOB, timedelta(days=2, microseconds=1), "later"),
    ],
)
def test_outcome_arrives_as_it_was(outcome):
    """A result is a value, on both sides."""
    line = encode_outcome(12, outcome)
    kind, number, *rest = decode(line)

    assert line.count(b"\n") == 1
    assert number == 12
    assert decode_outcome(kind, JOB, rest) == outcome


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "worker process ended with exit code 0 in the middle of a job"),
        (-9, "worker process died: signal 9 (SIGKILL)"),
        (-11, "worker process died: signal 11 (SIGSEGV)"),
        (-50, "worker process died: signal 50"),
    ],
)
def test_exit_is_described(code, text):
    """This is what an operator finds in last_error."""
    assert describe_exit(code) == text
