"""Run as a program: somebody else's session, which takes what others need for a while.

python -m chaos.intruder exhaust|lock|hold DSN SECONDS
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

import psycopg


def exhaust(dsn: str, until: float) -> None:
    """Takes every connection that there is, also those that come free."""
    taken: list[psycopg.Connection[Any]] = []
    while time.monotonic() < until:
        try:
            taken.append(psycopg.connect(dsn, connect_timeout=2))
        except psycopg.Error:
            time.sleep(0.02)


def lock(dsn: str, until: float) -> None:
    """An operator who has rows open in an editor."""
    with psycopg.connect(dsn, connect_timeout=2) as conn:
        conn.execute(
            "select 1 from pulse.outbox where status in ('RUNNING', 'RETRYING', 'DEAD_LETTERED', 'PENDING')"
            " order by random() limit 15 for update skip locked"
        )
        time.sleep(max(0.0, until - time.monotonic()))
        conn.rollback()


def hold(dsn: str, until: float) -> None:
    """A transaction that was forgotten: nothing that dies from now on can be vacuumed."""
    with psycopg.connect(dsn, connect_timeout=2) as conn:
        conn.execute("set transaction isolation level repeatable read")
        conn.execute("select count(*) from pulse.outbox")
        time.sleep(max(0.0, until - time.monotonic()))
        conn.rollback()


if __name__ == "__main__":
    what, dsn, seconds = sys.argv[1:]
    with suppress(psycopg.Error):  # its session was ended, or the server: others have that on their list too
        {"exhaust": exhaust, "lock": lock, "hold": hold}[what](dsn, time.monotonic() + float(seconds))
