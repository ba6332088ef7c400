"""`pulse-outbox prune`."""

from __future__ import annotations

import pytest

from tests.cli.conftest import bury


@pytest.fixture
def aged(calls):
    """2,000 events that completed eight days ago, three dead as long, one completed now and one that waits."""
    calls.conn.execute(
        """insert into pulse.outbox (event_id, topic, payload, idempotency_key, status, completed_at)
           select id, 'mail', '{}', id::text, 'COMPLETED', clock_timestamp() - interval '8 days'
             from (select gen_random_uuid() as id from generate_series(1, 2000)) as new"""
    )
    bury(calls, "mail", "Boom", 3)
    calls.conn.execute(
        "update pulse.outbox set completed_at = completed_at - interval '8 days' where status = 'DEAD_LETTERED'"
    )
    calls.enqueue("fax")
    calls.complete(calls.claim("fax"))
    calls.enqueue("fax")
    return calls


def left(calls) -> dict[str, int]:
    rows = calls.conn.execute("select status::text, count(*) from pulse.outbox group by 1").fetchall()
    return {row["status"]: row["count"] for row in rows}


def test_prune_deletes_what_is_older_than_seven_days(command, aged):
    result = command("prune", "--yes", "--json")

    assert (result.code, result.json) == (0, {"pruned": 2000, "retention_seconds": 604800.0, "dead": False})
    assert left(aged) == {"COMPLETED": 1, "DEAD_LETTERED": 3, "PENDING": 1}


def test_dead_letters_only_when_asked(command, aged):
    assert command("prune", "--yes", "--dead").out == "2,003 events deleted\n"
    assert left(aged) == {"COMPLETED": 1, "PENDING": 1}


@pytest.mark.parametrize(("retention", "kept"), [("0", 0), ("9d", 2001), ("191h", 1), ("1w", 1)])
def test_retention_is_a_duration(command, aged, retention, kept):
    command("prune", "--yes", "--retention", retention)

    assert left(aged).get("COMPLETED", 0) == kept


@pytest.mark.parametrize("retention", ["-1", "soon", "7y", ""])
def test_nonsense_is_refused(command, aged, retention):
    result = command("prune", "--yes", f"--retention={retention}")

    assert result.code == 2
    assert "90s, 15m, 2h, 7d" in result.err
    assert left(aged)["COMPLETED"] == 2001


def test_without_a_terminal_it_needs_a_yes(command, aged):
    result = command("prune")

    assert result.code == 2
    assert "Give --yes" in result.err
    assert left(aged)["COMPLETED"] == 2001


def test_table_of_many_pages_is_walked_to_its_end(command, aged, monkeypatch):
    from pulse_outbox.commands import prune

    monkeypatch.setattr(prune, "PAGES", 3)

    assert command("prune", "--yes").out == "2,000 events deleted\n"


def test_what_handlers_did_is_forgotten_only_when_asked(command, aged):
    aged.conn.execute("delete from pulse.outbox where status in ('PENDING', 'DEAD_LETTERED')")
    aged.conn.execute(
        """insert into pulse.event_handled
           select 'h', n::text, clock_timestamp() - n * interval '1 day' from generate_series(1, 500) n"""
    )
    command("prune", "--yes", "--retention", "0")
    assert command("prune", "--handled-older-than", "400d").code == 2, "it asks"
    assert command("prune", "--handled-older-than", "400d", "--dead", "--yes").code == 2
    [row] = aged.conn.execute("select count(*) from pulse.event_handled").fetchall()
    assert row["count"] == 500

    result = command("prune", "--handled-older-than", "400d", "--yes", "--json")
    assert (result.code, result.json) == (0, {"pruned": 101, "handled_older_than_seconds": 34560000.0})
    assert (
        command("prune", "--handled-older-than", "399d", "--yes").out
        == "1 record of handled events deleted\n"
    )
