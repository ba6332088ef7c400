from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.runbooks.following import follows
from tests.runbooks.shift import Shift
from tests.runbooks.states import Night


@pytest.fixture
def behind(night: Night) -> Night:
    """The newest migration is missing: with one in all, that is a database without the schema."""
    night.conn.execute("drop schema pulse cascade")
    return night


@follows("upgrade-the-schema", "plan", "migrate", "check", "installed", "alive")
def test_apply_what_is_missing(shift: Shift, behind: Night):
    planned = shift.run("plan")
    assert "to be applied" in planned
    assert "Locks:" in planned

    shift.run("migrate")

    assert "current" in shift.run("check")
    assert "outbox" in shift.run("installed")
    behind.alive("shop-1", "mail.send")
    assert "0.1.0" in shift.run("alive")


@follows("upgrade-the-schema", "in-the-way", "plan")
def test_who_would_be_waited_for(shift: Shift, night: Night, logins: dict[str, str]):
    with (
        psycopg.connect(make_conninfo(logins["operator"], application_name="long report")) as conn,
        psycopg.connect(logins["owner"]) as other,
    ):
        conn.execute("select count(*) from pulse.outbox")
        other.execute("select count(*) from pulse.outbox")
        assert "long report" not in shift.run("in-the-way"), "it is not old"
        night.conn.execute("select pg_sleep(5)")
        shown = shift.run("in-the-way")
        assert str(other.info.backend_pid) in shown, (
            "of another login the age is hidden, but not that it is there"
        )

    assert "long report" in shown
    assert "to be applied" not in shift.run("plan")
