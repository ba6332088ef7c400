"""What is wrong with an outbox and its database, each with its remedy and its runbook.

A check that may not see what it looks for says so, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import psycopg

from pulse_outbox.doctor import installation, server, work
from pulse_outbox.doctor.findings import Finding, schema_finding
from pulse_outbox.errors import OutboxError, SchemaError

if TYPE_CHECKING:
    from pulse_outbox.operations import Operations

__all__ = ["CHECKS", "Finding", "examine"]

Check = Callable[["Operations"], Iterator[Finding]]

CHECKS: dict[str, Check] = {
    "schema": installation.check_schema,
    "server": server.check_standby,
    "indexes": installation.check_indexes,
    "roles": installation.check_roles,
    "dispatchers": work.check_dispatchers,
    "topics": work.check_topics,
    "dead": work.check_dead,
    "blocked_keys": work.check_blocked_keys,
    "leases": work.check_leases,
    "alerts": work.check_alerts,
    "settings": server.check_settings,
    "vacuum": server.check_vacuum_horizon,
    "autovacuum": server.check_autovacuum,
    "clock": server.check_clock,
}


def examine(operations: Operations) -> list[Finding]:
    """All checks, the worst findings first."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            findings.extend(check(operations))
        except SchemaError as error:
            findings.append(schema_finding(str(error)))
            return findings  # nothing else can be asked of a schema that does not fit
        except psycopg.errors.InsufficientPrivilege as error:
            findings.append(_unseen(name, operations, error.diag.message_primary or "permission denied"))
        except OutboxError as error:
            findings.append(_unseen(name, operations, str(error)))
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(findings, key=lambda finding: order[finding.severity])


def _unseen(name: str, operations: Operations, why: str) -> Finding:
    return Finding(
        check=name,
        severity="info",
        what=f"could not be checked: {why}",
        remedy=f"connect as a member of {operations.schema}_operator, or as the schema's owner",
    )
