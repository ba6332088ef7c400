"""Checks of the server: clock, settings, and what keeps vacuum from its work."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pulse_outbox.doctor.findings import Finding, lasting, literal, quoted, rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pulse_outbox.operations import Operations

CLOCK_TOLERANCE = timedelta(seconds=2)
VACUUM_LAG = 5
"""Dead rows, in multiples of what should have brought autovacuum."""
LONG_TRANSACTION = timedelta(minutes=5)
BRIEF_TRANSACTION = timedelta(seconds=10)
"""Where dead rows pile up already, this is long."""
LONG_SNAPSHOT = 100_000
"""Transactions since an old snapshot was taken, where its time can't be seen."""


def check_clock(operations: Operations) -> Iterator[Finding]:
    before = time.monotonic()
    here = datetime.now(UTC)
    there = operations.now()
    difference = there - here - timedelta(seconds=(time.monotonic() - before) / 2)
    if abs(difference) > CLOCK_TOLERANCE:
        yield Finding(
            check="clock",
            severity="info",
            what=f"this machine's clock is {abs(difference).total_seconds():.1f} s "
            f"{'behind' if difference > timedelta(0) else 'ahead of'} the database's",
            remedy="jobs run by the database's clock, so nothing is wrong; mind it when you compare log lines",
        )


def check_standby(operations: Operations) -> Iterator[Finding]:
    [row] = rows(
        operations,
        "select pg_is_in_recovery() as standby, current_setting('transaction_read_only') = 'on' as read_only",
    )
    if row["standby"] or row["read_only"]:
        yield Finding(
            check="server",
            severity="error",
            what="this server is a read-only standby" if row["standby"] else "sessions here are read-only",
            remedy="give the primary's DSN, or add target_session_attrs=read-write to this one",
            runbook="database-failover.md",
        )


HARMFUL = {
    "fsync": ("off", "error", "a crash of the server loses or corrupts data"),
    "full_page_writes": ("off", "error", "a crash of the server may corrupt pages"),
    "synchronous_commit": (
        "off",
        "warning",
        "a crash of the server may take back what was just committed, events among it",
    ),
    "autovacuum": ("off", "error", "the table grows without end and claims slow down"),
    "track_counts": ("off", "error", "autovacuum sees nothing to do"),
    "default_transaction_isolation": (
        ("repeatable read", "serializable"),
        "warning",
        "claims and enqueues fail with 40001 under load",
    ),
    "idle_in_transaction_session_timeout": (
        "0",
        "info",
        "a session that forgets its transaction holds vacuum back until somebody ends it",
    ),
}
REMEDIES = {"idle_in_transaction_session_timeout": "10min", "default_transaction_isolation": "read committed"}


def check_settings(operations: Operations) -> Iterator[Finding]:
    found = rows(
        operations,
        "select name, setting from pg_settings where name = any (%(names)s)",
        names=list(HARMFUL),
    )
    for row in found:
        bad, severity, harm = HARMFUL[row["name"]]
        if row["setting"] in ((bad,) if isinstance(bad, str) else bad):
            good = REMEDIES.get(row["name"], "on")
            yield Finding(
                check="settings",
                severity=severity,  # type: ignore[arg-type]  # one of the three, in the table above
                what=f"{row['name']} is {row['setting'] or 'empty'}: {harm}",
                remedy=f"alter system set {row['name']} = '{good}'; select pg_reload_conf();",
                runbook="retention-and-bloat.md" if "vacuum" in harm or "vacuum" in row["name"] else None,
            )
    [table] = rows(
        operations,
        """select coalesce('autovacuum_enabled=false' = any (reloptions)
                           or 'autovacuum_enabled=off' = any (reloptions), false) as off
             from pg_class where oid = %(table)s::regclass""",
        table=f'"{operations.schema}".outbox',
    )
    if table["off"]:
        yield Finding(
            check="settings",
            severity="error",
            what="autovacuum is switched off for the outbox: it grows without end and claims slow down",
            remedy=f"alter table {quoted(operations.schema)}.outbox reset (autovacuum_enabled);",
            runbook="retention-and-bloat.md",
        )


def check_vacuum_horizon(operations: Operations) -> Iterator[Finding]:
    """Who keeps dead rows from being removed: the oldest snapshot in this database, or wherever else it counts."""
    found = rows(
        operations,
        """select pid, usename, application_name, state, clock_timestamp() - xact_start as since,
                  greatest(age(backend_xmin), age(backend_xid)) as age
             from pg_stat_activity
            where (backend_xmin is not null or backend_xid is not null)
              and pid <> pg_backend_pid()
              and (datname is null or datname = current_database())
              and backend_type is distinct from 'walsender'
            order by greatest(age(backend_xmin), age(backend_xid)) desc
            limit 50""",
    )
    patience = (
        BRIEF_TRANSACTION if any(_is_behind(row) for row in _dead_rows(operations)) else LONG_TRANSACTION
    )
    hidden = False
    for row in found:
        if row["since"] is None:
            hidden = hidden or row["state"] is None
        if (row["since"] is not None and row["since"] > patience) or (
            row["since"] is None and row["age"] > LONG_SNAPSHOT
        ):
            since = (
                f"for {lasting(row['since'])}"
                if row["since"] is not None
                else f"for {row['age']:,} transactions"
            )
            yield Finding(
                check="vacuum",
                severity="warning",
                what=f"session {row['pid']} (user {row['usename'] or '?'}, application "
                f"{row['application_name'] or '?'}, {row['state'] or 'state hidden'}) has held its transaction open "
                f"{since}: vacuum can't remove what died since",
                remedy=f"let it finish, or select pg_terminate_backend({row['pid']});",
                runbook="retention-and-bloat.md",
            )
            break  # the oldest holds vacuum back; the next run names the next
    if hidden:
        yield Finding(
            check="vacuum",
            severity="info",
            what="the sessions of other users are hidden from this one: how old their transactions are can't be told",
            remedy=f"grant pg_read_all_stats to {quoted(str(operations.conn.info.user))};",
        )
    yield from _other_horizons(operations)


def _other_horizons(operations: Operations) -> Iterator[Finding]:
    slots = rows(
        operations,
        """select slot_name, active, greatest(age(xmin), age(catalog_xmin)) as age
             from pg_replication_slots
            where greatest(age(xmin), age(catalog_xmin)) > %(most)s
            order by 3 desc limit 1""",
        most=LONG_SNAPSHOT,
    )
    for row in slots:
        yield Finding(
            check="vacuum",
            severity="warning",
            what=f"replication slot {row['slot_name']} ({'active' if row['active'] else 'INACTIVE'}) holds vacuum back "
            f"by {row['age']:,} transactions",
            remedy=f"start its standby, or select pg_drop_replication_slot({literal(row['slot_name'])});",
            runbook="retention-and-bloat.md",
        )
    prepared = rows(
        operations,
        """select gid, owner, clock_timestamp() - prepared as since
             from pg_prepared_xacts
            where database = current_database() and prepared < clock_timestamp() - %(most)s
            order by prepared limit 1""",
        most=LONG_TRANSACTION,
    )
    for row in prepared:
        yield Finding(
            check="vacuum",
            severity="warning",
            what=f"prepared transaction {row['gid']} of {row['owner']} has been open for {lasting(row['since'])}: "
            "vacuum can't remove what died since",
            remedy=f"commit prepared {literal(row['gid'])}; or rollback prepared {literal(row['gid'])};",
            runbook="retention-and-bloat.md",
        )


def _dead_rows(operations: Operations) -> list[dict[str, Any]]:
    """Of the outbox: one row, or none where there is no such table."""
    return rows(
        operations,
        """select s.n_dead_tup as dead, s.n_live_tup as live,
                  clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum) as since,
                  20000 + 0.01 * greatest(c.reltuples, 0) as threshold,
                  age(c.relfrozenxid) as age
             from pg_stat_user_tables s
             join pg_class c on c.oid = s.relid
            where s.schemaname = %(schema)s and s.relname = 'outbox'""",
    )


def _is_behind(table: Mapping[str, Any]) -> bool:
    return bool(table["dead"] > VACUUM_LAG * table["threshold"])


def check_autovacuum(operations: Operations) -> Iterator[Finding]:
    for row in _dead_rows(operations):
        if _is_behind(row):
            last = f"{lasting(row['since'])} ago" if row["since"] is not None else "never"
            yield Finding(
                check="autovacuum",
                severity="warning",
                what=f"{row['dead']:,} dead rows beside {row['live']:,} living ones; last vacuumed {last}",
                remedy=f"vacuum (verbose) {quoted(operations.schema)}.outbox; and see what holds it back",
                runbook="retention-and-bloat.md",
            )
        if row["age"] > 1_500_000_000:
            yield Finding(
                check="autovacuum",
                severity="error",
                what=f"the outbox has not been frozen for {row['age']:,} transactions: the server stops at two billion",
                remedy=f"vacuum (freeze, verbose) {quoted(operations.schema)}.outbox;",
                runbook="retention-and-bloat.md",
            )
