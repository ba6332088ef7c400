"""The state machine in SQL and the model of SPEC 3 agree, step by step."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import OutboxMachine


def test_database_and_model_agree(dsn):
    run_state_machine_as_test(
        OutboxMachine.on(dsn),
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
