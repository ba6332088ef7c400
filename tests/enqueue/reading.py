"""What the tests of enqueue share."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import dict_row


def rows(conn: psycopg.Connection[Any]) -> list[dict[str, Any]]:
    """The whole outbox in the order of insertion."""
    return conn.cursor(row_factory=dict_row).execute("select * from pulse.outbox order by seq").fetchall()
