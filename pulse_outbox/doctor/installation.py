"""Checks of the schema as it is installed: version, indexes, roles."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pulse_outbox import schema as schemas
from pulse_outbox.doctor.findings import Finding, quoted, rows, schema_finding
from pulse_outbox.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pulse_outbox.operations import Operations


def check_schema(operations: Operations) -> Iterator[Finding]:
    state = schemas.check(operations.conn, operations.schema)
    state.require_supported()
    try:
        state.require_unchanged()
    except SchemaError as error:
        yield schema_finding(str(error))
    if state.state == "ahead-supported":
        yield Finding(
            check="schema",
            severity="info",
            what=f"the schema is at {state.installed}, newer than this release, which it still supports",
            remedy=f"install the release that brought migration {state.installed}",
            runbook="upgrade-the-schema.md",
        )


def expected_indexes(schema: str = schemas.DEFAULT_SCHEMA) -> dict[str, str]:
    """The indexes that the migrations make, each with the SQL that makes it again without a long lock."""
    quoted = f'"{schema}"' if schema != schemas.DEFAULT_SCHEMA else schema
    found: dict[str, str] = {}
    for migration in schemas.find_migrations():
        text = re.sub(r"--[^\n]*", "", schemas.render(migration, schema))
        for table, body in re.findall(r"create (?:unlogged )?table \S+?\.(\w+) \((.*?)\n\)", text, re.DOTALL):
            for name, key in re.findall(
                r"constraint (\w+) (primary key \([^)]*\)(?: with \([^)]*\))?)", body
            ):
                found[name] = f"alter table {quoted}.{table} add constraint {name} {key};"
        for unique, name, rest in re.findall(
            r"create (unique )?index (?:concurrently )?(\w+)\s+(on [^;]*;)", text
        ):
            found[name] = " ".join(f"create {unique}index concurrently {name} {rest}".split())
    return found


def check_indexes(operations: Operations) -> Iterator[Finding]:
    found = rows(
        operations,
        """select c.relname as name, i.indisvalid and i.indisready as valid
             from pg_index i
             join pg_class c on c.oid = i.indexrelid
             join pg_namespace n on n.oid = c.relnamespace
            where n.nspname = %(schema)s""",
    )
    valid = {row["name"]: row["valid"] for row in found}
    for name, statement in expected_indexes(operations.schema).items():
        if name not in valid:
            yield Finding(
                check="indexes",
                severity="error",
                what=f"the index {name} is missing: correctness or speed depends on it",
                remedy=statement,
                runbook="upgrade-the-schema.md",
            )
    for name, is_valid in valid.items():
        if not is_valid:
            yield Finding(
                check="indexes",
                severity="error",
                what=f"the index {name} is invalid: writes pay for it, reads can't use it",
                remedy=f"reindex index concurrently {quoted(operations.schema)}.{quoted(name)};",
                runbook="upgrade-the-schema.md",
            )


def check_roles(operations: Operations) -> Iterator[Finding]:
    state = schemas.check_roles(operations.conn, operations.schema)
    if state.missing or state.ungranted:
        yield Finding(
            check="roles",
            severity="warning",
            what=f"missing or without rights: {', '.join([*state.missing, *state.ungranted])}",
            remedy=schemas.roles_sql(state.missing, operations.schema).replace("\n", " "),
            runbook="upgrade-the-schema.md",
        )
