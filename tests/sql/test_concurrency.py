"""Eight sessions at once, at random: nothing deadlocks, nothing runs twice, nothing is lost."""

from __future__ import annotations

import uuid

from tests.sql.turmoil import Held, Ledger, Settled, turmoil


def test_eight_sessions_at_random(dsn):
    """Claims, settlements, heartbeats, reaping, replays, discards and overlapping producers on a dozen keys."""
    ledger = turmoil(dsn, 6, seed=7)

    assert ledger.complaints() == []
    assert min(len(ledger.enqueued), len(ledger.claimed), len(ledger.settled)) > 200
    assert ledger.calls["reap"] > 10
    assert ledger.calls["replay"] > 10
    assert sum(count for answer, count in ledger.answers.items() if answer.endswith("lost")) > 0, (
        "nothing was reaped"
    )


def held(seq: int, since: float) -> Held:
    return Held(
        event_id=uuid.uuid4(), token=uuid.uuid4(), seq=seq, key="one producer", lease_seq=1, since=since
    )


def test_the_ledger_complains():
    """The control: it sees a key that ran twice at once, a start that two claims got, and a broken order."""
    first, second = held(1, since=0), held(2, since=1)
    both = Ledger(claimed=[first, first, second])
    both.settled = [
        Settled(held=first, until=2, how="complete"),
        Settled(held=second, until=1.5, how="complete"),
    ]

    complaints = [complaint.split(":")[0] for complaint in both.complaints()]
    assert complaints == ["claimed twice", "key ran twice at once", "out of order"]
