"""A finding, and the words and queries that all checks share."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from psycopg import sql
from psycopg.rows import dict_row

if TYPE_CHECKING:
    from pulse_outbox.operations import Operations

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that somebody should know. info: nothing is wrong by it."""

    check: str
    severity: Severity
    what: str
    remedy: str
    runbook: str | None = None
    """The file below runbooks/."""


def schema_finding(what: str) -> Finding:
    return Finding(
        check="schema",
        severity="error",
        what=what,
        remedy="pulse-outbox migrate --check tells more",
        runbook="upgrade-the-schema.md",
    )


def rows(operations: Operations, query: str, **values: object) -> list[dict[str, Any]]:
    with operations.conn.cursor(row_factory=dict_row) as cursor:
        cursor.execute(
            sql.SQL(query).format(schema=sql.Identifier(operations.schema)),
            {"schema": operations.schema, **values},
        )
        return cursor.fetchall()


def lasting(value: timedelta) -> str:
    seconds = max(0, int(value.total_seconds()))
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} seconds"


def quoted(name: str) -> str:
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    return sql.Literal(text).as_string(None)


def shell(text: str) -> str:
    return shlex.quote(text)
