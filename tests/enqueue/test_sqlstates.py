"""The SQLSTATEs of our own functions become exceptions in one place."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from pulse_outbox import BadArgument, EventNotFound, TransitionRefused
from pulse_outbox.errors import from_database_error


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("select pulse.outbox_replay(%(unknown)s, 0, 'ops')", EventNotFound),
        ("select pulse.outbox_replay(%(pending)s, 0, 'ops')", TransitionRefused),
        ("select pulse.outbox_enqueue('', '{}')", BadArgument),
    ],
)
def test_each_sqlstate_has_its_exception(conn, statement, kind):
    """As an operator in psql and the process see the same guards."""
    [pending] = conn.execute("select pulse.outbox_enqueue('t', '{}')").fetchone()

    with pytest.raises(psycopg.Error) as caught:
        conn.execute(statement, {"unknown": uuid4(), "pending": pending})

    ours = from_database_error(caught.value)
    assert type(ours) is kind
    assert str(ours) == caught.value.diag.message_primary


def test_other_errors_are_not_ours(conn):
    """They reach the caller as they are."""
    with pytest.raises(psycopg.Error) as caught:
        conn.execute("select 1 / 0")

    assert from_database_error(caught.value) is None
    assert from_database_error(ValueError()) is None
