"""Once only: a handler records in its own transaction that it has done its work for a key.

The record commits together with the work. A second run, after a crash between the two commits of handler and
dispatcher, finds it and leaves the work alone.
"""

from __future__ import annotations

from pulse_outbox.connections import Ask, Errand, Steps
from pulse_outbox.errors import SchemaError, SettingsError, TransactionNeeded
from pulse_outbox.events import check_text

MAX_NAME_CHARACTERS = 200

RECORD = Errand(
    complaint=TransactionNeeded,
    sync_call="first_time",
    async_call="first_time_async",
    written="record",
    beside="work",
    optional=False,
    unmigrated=(SchemaError, "this database has no {schema}.event_handled"),
    forbidden="this database user may not record what it has handled: `grant usage on schema {schema} to …; "
    "grant insert on {schema}.event_handled to …` lets it",
)


def first_time(connection: object, schema: str, name: str, key: str) -> bool:
    """Records the pair; False when it is there already.

    Waits for another transaction that has recorded the same and not ended: its rollback makes this the first.
    """
    _check_name(name)
    return RECORD.run(connection, schema, lambda _: _record(schema, name, key), outside=False)


async def first_time_async(connection: object, schema: str, name: str, key: str) -> bool:
    """The same on an asynchronous connection."""
    _check_name(name)
    return await RECORD.run_async(connection, schema, lambda _: _record(schema, name, key), outside=False)


def _record(schema: str, name: str, key: str) -> Steps[bool]:
    rows = yield Ask(
        f'insert into "{schema}".event_handled (handler_name, idempotency_key) '  # noqa: S608  checked by the Outbox
        "values (cast($1 as text), cast($2 as text)) on conflict do nothing returning 1",
        (name, key),
    )
    return len(rows) > 0


def _check_name(name: str) -> None:
    # Together with the longest key this is still an index entry that PostgreSQL takes.
    check_text("name", name, MAX_NAME_CHARACTERS, SettingsError)
