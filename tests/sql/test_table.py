"""The table refuses impossible rows, whoever writes them."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

LEASE = {"lease_until": "2030-01-01", "locked_by": "w", "claim_token": "00000000-0000-4000-8000-000000000000"}
RUNNING = {"status": "RUNNING", "max_attempts": 5, **LEASE}

IMPOSSIBLE = {
    "a lease without RUNNING": LEASE,
    "a holder without RUNNING": {"locked_by": "w"},
    "RUNNING without a lease": {"status": "RUNNING", "max_attempts": 5},
    "RUNNING without its end": {**RUNNING, "lease_until": None},
    "RUNNING without a holder": {**RUNNING, "locked_by": None},
    "RUNNING without a token": {**RUNNING, "claim_token": None},
    "RUNNING without a budget": {**RUNNING, "max_attempts": None},
    "a completed row with a lease": {**LEASE, "status": "COMPLETED", "completed_at": "2030-01-01"},
    "completed, but when": {"status": "COMPLETED"},
    "dead, but when": {"status": "DEAD_LETTERED"},
    "discarded, but when": {"status": "DISCARDED"},
    "completed before it ran": {"completed_at": "2030-01-01"},
    "completed while it runs": {**RUNNING, "completed_at": "2030-01-01"},
    "negative attempts": {"attempts": -1},
    "negative lapses": {"lapses": -1},
    "negative snoozes": {"snoozes": -1},
    "negative lease_seq": {"lease_seq": -1},
    "negative generation": {"generation": -1},
    "priority 10": {"priority": 10},
    "priority -10": {"priority": -10},
    "no budget": {"max_attempts": 0},
    "no budget of the producer's": {"producer_max_attempts": 0},
    "an empty topic": {"topic": ""},
    "a long topic": {"topic": "x" * 201},
    "no topic": {"topic": None},
    "no payload": {"payload": None},
    "an empty idempotency key": {"idempotency_key": ""},
    "a long idempotency key": {"idempotency_key": "x" * 401},
    "an empty ordering key": {"ordering_key": ""},
    "a long ordering key": {"ordering_key": "x" * 401},
    "a long error": {"last_error": "x" * 8193},
    "waiting for no key": {"parked": True},
    "waiting while it runs": {**RUNNING, "parked": True, "ordering_key": "k"},
    "waiting after its end": {
        "status": "COMPLETED",
        "completed_at": "2030-01-01",
        "parked": True,
        "ordering_key": "k",
    },
    "an unknown state": {"status": "SLEEPING"},
    "a time before all times": {"next_run_at": "-infinity"},
    "a time after all times": {"next_run_at": "infinity"},
    "a time that Python can't hold": {"next_run_at": "20000-01-01"},
    "made before all times": {"created_at": "-infinity"},
}


@pytest.mark.parametrize("columns", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_row_is_refused(outbox, columns):
    """By insert and by update alike."""
    event_id = outbox.enqueue()
    changes = sql.SQL(", ").join(
        sql.SQL("{} = {}").format(sql.Identifier(name), sql.Placeholder()) for name in columns
    )
    with pytest.raises((psycopg.IntegrityError, psycopg.DataError)):
        outbox.insert(**columns)
    with pytest.raises((psycopg.IntegrityError, psycopg.DataError)):
        outbox.conn.execute(
            sql.SQL("update pulse.outbox set {} where event_id = {}").format(changes, sql.Placeholder()),
            [*columns.values(), event_id],
        )


def test_possible_rows_are_accepted(outbox):
    """The control: the same ways of writing, with nothing wrong."""
    for columns in (
        {},
        RUNNING,
        {"status": "COMPLETED", "completed_at": "2030-01-01"},
        {"status": "DEAD_LETTERED", "completed_at": "2030-01-01", "claim_token": LEASE["claim_token"]},
        {"parked": True, "ordering_key": "k"},
        {"priority": 9, "topic": "x" * 200, "last_error": "x" * 8192},
    ):
        outbox.insert(**columns)


def test_order_of_insertion_is_the_databases(outbox):
    with pytest.raises(psycopg.errors.GeneratedAlways):
        outbox.insert(seq=1)


def test_large_payloads_are_compressed_with_the_best_that_the_server_has(outbox):
    [row] = outbox.conn.execute("""
        select s.enumvals as offered, a.attcompression::text as used
          from pg_settings s, pg_attribute a
         where s.name = 'default_toast_compression'
           and a.attrelid = 'pulse.outbox'::regclass and a.attname = 'payload'
        """)

    assert row["used"] == ("l" if "lz4" in row["offered"] else "")
