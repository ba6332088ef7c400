"""The numbered migrations in a revision of Alembic:

    import pulse_outbox.alembic

    def upgrade() -> None:
        pulse_outbox.alembic.upgrade(1)

    def downgrade() -> None:
        pass        # the outbox stays, with its events; upgrading again finds it there

A release that brings a new file wants a revision of its own with the next number.
"""

from __future__ import annotations

from alembic import op
from alembic.util import CommandError

from pulse_outbox import schema as schemas
from pulse_outbox.errors import OutboxError


def upgrade(to: int, *, schema: str = schemas.DEFAULT_SCHEMA) -> None:
    """Applies the files up to number *to* that are missing, in the revision's own transaction; offline too.

    What was applied another way is left alone.
    """
    context = op.get_context()
    if context.dialect.name != "postgresql":
        raise CommandError(
            f"the outbox lives in PostgreSQL, and this revision runs on {context.dialect.name}"
        )
    try:
        statements = [schemas.statement(version, schema) for version in range(1, to + 1)]
    except OutboxError as error:
        raise CommandError(str(error)) from error
    for statement in statements:
        if context.as_sql:
            # Not op.execute: it would take a colon or a percent sign for a parameter.
            context.impl.static_output(f"{statement};")
        else:
            op.get_bind().exec_driver_sql(statement, execution_options={"no_parameters": True})
