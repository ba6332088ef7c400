"""The command in this process, as a login that has the operator's role and nothing else."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from pulse_outbox import cli
from tests.conftest import Connect
from tests.sql.calls import Calls
from tests.support.testbed import Testbed

HOSTILE = "'); drop schema pulse cascade; -- \x1b[31m\"%s $1 \\ \u202e\n{x}"
"""A name that would hurt as SQL text, as a format, or on a terminal."""


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Result]


@pytest.fixture(scope="session")
def operator(testbed: Testbed) -> Iterator[str]:
    """A login that may do what pulse_operator may."""
    name = f"login_operator_{secrets.token_hex(4)}"
    with psycopg.connect(testbed.server_dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("create role {} login in role pulse_operator").format(sql.Identifier(name)))
        yield name
        conn.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def operator_dsn(dsn: str, operator: str) -> str:
    return make_conninfo(dsn, user=operator)


@pytest.fixture
def command(operator_dsn: str, capsys: Any, monkeypatch: Any) -> Command:
    """`command("status", "--json").json`; a `--dsn` of its own overrides the operator's."""
    for name in ("PULSE_OUTBOX_SCHEMA", "PULSE_OUTBOX_TRACEBACK", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PULSE_OUTBOX_DSN", operator_dsn)

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as left:  # argparse leaves this way
            code = int(left.code or 0)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def calls(connect: Connect) -> Calls:
    """The SQL functions as the owner, in real time."""
    return Calls(connect(autocommit=True, row_factory=dict_row), None)


def bury(calls: Calls, topic: str, error_class: str, number: int, *, generation: int = 0) -> None:
    """So many dead letters of one kind, as terminal failures leave them; the payload holds a secret."""
    calls.conn.execute(
        """insert into pulse.outbox (event_id, topic, payload, headers, idempotency_key, status, attempts,
                                     max_attempts, generation, first_failed_at, completed_at, last_error, last_failure,
                                     indexed_as, known_as, indexed_at)
           select id, %(topic)s, '{"card": "SECRET-4711"}', '{"auth": "SECRET-4711"}', id::text, 'DEAD_LETTERED', 1, 5,
                  %(generation)s, clock_timestamp() - interval '1 hour', died_at,
                  %(class)s || ': it broke',
                  jsonb_build_object('handler', 'h', 'error_class', %(class)s::text, 'verdict', 'terminal',
                                     'rule', 'terminal.default'), 'DEAD_LETTERED', 'DEAD_LETTERED', died_at
             from (select gen_random_uuid() as id,
                          clock_timestamp() - interval '1 hour' + n * interval '1 millisecond' as died_at
                     from generate_series(1, %(number)s) as n) as new""",
        {"topic": topic, "class": error_class, "number": number, "generation": generation},
    )
