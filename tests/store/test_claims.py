"""What a claim becomes in Python: the same whichever of the two functions took it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import pytest_asyncio
from psycopg.abc import Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format
from psycopg.types.uuid import UUIDBinaryLoader

from pulse_outbox import Outbox
from pulse_outbox.link import Link
from pulse_outbox.store import Store

OF_ONE_CLAIM = {"raw_token", "raw_looked_at", "lease_seq"}


@pytest_asyncio.fixture
async def store(dsn):
    store = Store(Link(dsn))
    yield store
    await store.close()


def question(lane: dict[str, Any], *, plain: bool) -> dict[str, Any]:
    return {
        "limit": 10,
        "topics": ["fax", "mail"],
        "budgets": [1, 5],
        "slots": 10,
        "lanes": [{**lane, "quota": 10, "next_run_at": "2000-01-01T00:00Z", "seq": 0}],
        "plain": plain,
    }


@pytest.mark.parametrize("lapses", [0, 1, 2])
async def test_a_claim_of_one_lane_says_as_much_as_any(store, conn, lapses):
    """It is not told what it knows of its lane, and has to add that itself."""
    outbox = Outbox()
    outbox.enqueue(conn, "mail", {"n": 1}, priority=-2, generation=3)
    outbox.enqueue(
        conn, "mail", [2], headers={"a": "b"}, source="shop", target="bank", priority=-2, generation=3,
        max_attempts=7, idempotency_key="k",
    )  # fmt: skip
    conn.execute("update pulse.outbox set lapses = %s", [lapses])
    conn.commit()
    lane = {"topic": "mail", "generation": 3, "lapses": lapses, "priority": -2}

    short = await store.claim(**question(lane, plain=True))
    await store.release(short)
    long = await store.claim(**question(lane, plain=False))

    assert [claim.payload for claim in short] == ['{"n": 1}', "[2]"]
    assert [claim.headers for claim in short] == [None, '{"a": "b"}']
    assert [claim.max_attempts for claim in short] == [5, 7]
    assert {claim.alone for claim in short} == {lapses == 2}
    for one, other in zip(short, long, strict=True):
        differences = {name for name in one._fields if getattr(one, name) != getattr(other, name)}
        assert differences <= OF_ONE_CLAIM | {"raw_next_run_at"}  # a release is due at once


async def test_a_repeated_claim_of_one_lane_is_read_as_what_it_asks_for(store, conn):
    """The repetition goes the long way, whose answer has more columns."""
    Outbox().enqueue(conn, "mail", {"n": 1}, priority=4)
    conn.commit()
    lane = {"topic": "mail", "generation": 0, "lapses": 0, "priority": 4}
    asking = store.claim(**question(lane, plain=True), token=uuid4(), fresh=True)
    first = await asking

    again = await asking

    assert len(again) == 1
    assert again[0]._replace(raw_looked_at=0) == first[0]._replace(raw_looked_at=0)


async def test_who_was_left_behind_is_known_by_his_lane(store, conn):
    """A budget of one without a free slot, seen by a claim of one lane."""
    outbox = Outbox()
    for _ in range(2):
        outbox.enqueue(conn, "fax", {}, priority=3, delay=timedelta(0))
    conn.commit()
    lane = {"topic": "fax", "generation": 0, "lapses": 0, "priority": 3}

    claimed = await store.claim(**{**question(lane, plain=True), "slots": 1})

    assert [(claim.topic, claim.priority, claim.max_attempts) for claim in claimed] == [("fax", 3, 1)]
    [left] = claimed.left_behind
    assert (left.topic, left.generation, left.lapses, left.priority) == ("fax", 0, 0, 3)
    assert left.seq > claimed[0].seq


async def test_what_was_sent_is_read_as_it_was_asked(store, conn):
    """A claim that is made ready once more while its answer is on the way."""
    Outbox().enqueue(conn, "mail", {"n": 1})
    conn.commit()
    await store.paused()  # the connection stands
    lane = {"topic": "mail", "generation": 0, "lapses": 0, "priority": 0}
    asking = store.claim(**question(lane, plain=True))
    asking.send()

    asking.prepare()

    assert [claim.payload for claim in await asking] == ['{"n": 1}']


class OtherId:
    """What some libraries have instead of a UUID."""


class OtherLoader(Loader):
    format = Format.BINARY

    def load(self, data: Buffer) -> OtherId:
        return OtherId()


@pytest.fixture
def other_ids() -> Iterator[None]:
    psycopg.adapters.register_loader("uuid", OtherLoader)
    yield
    psycopg.adapters.register_loader("uuid", UUIDBinaryLoader)


async def test_answers_are_about_claims_whatever_the_application_reads_ids_as(dsn, conn, other_ids):
    """A result whose row is locked, or whose lease is lost, would be taken for stored."""
    Outbox().enqueue(conn, "mail", {})
    conn.commit()
    store = Store(Link(dsn))
    [claim] = await store.claim(limit=1, topics=["mail"])
    stale = claim._replace(raw_token=uuid4().bytes)

    assert await store.complete([stale]) == {claim.event_id: "lost"}
    assert await store.heartbeat([stale], lease=timedelta(seconds=30)) == {claim.event_id: "lost"}
    await store.close()
