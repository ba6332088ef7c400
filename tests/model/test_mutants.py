"""The tests of the tests: each deliberate fault is found, so the machine looks at what it should."""

from __future__ import annotations

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pulse_outbox import schema
from tests.model.machine import OutboxMachine
from tests.model.mutants import MUTANTS, Mutant

# More than twice what the slowest of them needs. Found is found: nothing is shrunk.
EFFORT = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_found(empty_dsn: str, mutant: Mutant):
    with psycopg.connect(empty_dsn) as conn:
        for migration in schema.find_migrations():
            text = mutant.apply(migration.text) if migration.version == 1 else migration.text
            conn.execute(text.encode())

    with pytest.raises((AssertionError, psycopg.errors.UniqueViolation)):  # the second: two of a key at once
        run_state_machine_as_test(OutboxMachine.on(empty_dsn), settings=EFFORT)
