"""Turns a numbered file of migrations/ into a migration of Django's."""

from __future__ import annotations

import os
from typing import Any

from django.conf import settings
from django.db import router
from django.db.migrations import Migration
from django.db.migrations.exceptions import IrreversibleError
from django.db.migrations.operations.base import Operation

from pulse_outbox import schema as schemas


def numbered(module: str) -> type[Migration]:
    """The migration of a module that is named like its file: `Migration = numbered(__name__)`."""
    label = module.rpartition(".")[2]
    version = int(label[:4])
    earlier = schemas.find_migrations()[: version - 1]
    return type(
        "Migration",
        (Migration,),
        {
            "__module__": module,
            "dependencies": [("pulse_outbox", migration.label) for migration in earlier[-1:]],
            "operations": [Apply(version)],
        },
    )


class Apply(Operation):  # type: ignore[misc]  # Django ships no types
    """Applies one file, unless it has been applied in another way; on PostgreSQL only."""

    reversible = True  # so that it is our text that refuses
    reduces_to_sql = True
    atomic = True

    def __init__(self, version: int) -> None:
        self.version = version

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        return (type(self).__qualname__, [self.version], {})

    def state_forwards(self, app_label: str, state: Any) -> None:
        """There are no models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if _is_for(schema_editor.connection, app_label):
            schema_editor.execute(schemas.statement(self.version, schema_name()), params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if _is_for(schema_editor.connection, app_label):
            raise IrreversibleError(
                "the outbox can't be unapplied, since its events would be lost; if that is meant: "
                f'`drop schema "{schema_name()}" cascade`, then `manage.py migrate --fake pulse_outbox zero`'
            )

    def describe(self) -> str:
        return f"Apply file {self.version:04d} of pulse-outbox"


def schema_name() -> str:
    """The schema that the app's migrations make."""
    given = getattr(settings, "PULSE_OUTBOX_SCHEMA", None) or os.environ.get("PULSE_OUTBOX_SCHEMA")
    return schemas.check_schema_name(given or schemas.DEFAULT_SCHEMA)


def _is_for(connection: Any, app_label: str) -> bool:
    return bool(connection.vendor == "postgresql" and router.allow_migrate(connection.alias, app_label))
