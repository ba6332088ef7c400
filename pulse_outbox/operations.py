"""What an operator may read and change, over one plain connection: the SQL views and functions as values.

Everything here works with the rights of the operator's role. Nothing reads a payload except `event`, when asked to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row, tuple_row

from pulse_outbox import schema as schemas
from pulse_outbox.errors import UNMIGRATED_SQLSTATES, OutboxError, SettingsError, from_database_error

LOCK_PATIENCE = timedelta(seconds=5)
"""How long a change waits for a row that somebody else has locked."""


class RowLocked(OutboxError):
    """Somebody else has locked the event for longer than we wait."""


class Kind(NamedTuple):
    """Dead letters that most likely have one cause: of one topic and one error class ('' when it has none)."""

    topic: str
    error_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which dead letters are meant. Nothing given: all of them."""

    event_ids: tuple[UUID, ...] | None = None
    topics: tuple[str, ...] | None = None
    error_class: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    limit: int | None = None

    def condition(self) -> tuple[sql.SQL, dict[str, object]]:
        """For the columns of the view dead_letter."""
        parts = {
            "event_id = any (%(event_ids)s::uuid[])": self.event_ids,
            "topic = any (%(topics)s::text[])": self.topics,
            "error_class = %(error_class)s": self.error_class,
            "dead_lettered_at >= %(since)s": self.since,
            "dead_lettered_at < %(until)s": self.until,
        }
        values: dict[str, object] = {
            "event_ids": list(self.event_ids) if self.event_ids is not None else None,
            "topics": list(self.topics) if self.topics is not None else None,
            "error_class": self.error_class,
            "since": self.since,
            "until": self.until,
            "limit": self.limit,
        }
        given = [text for text, value in parts.items() if value is not None]
        return sql.SQL(" and ".join(given) or "true"), values


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """Unfinished work of one topic. due, later and parked hold what waits, and retrying those of it that failed."""

    topic: str
    due: int
    later: int
    running: int
    retrying: int
    parked: int
    dead: int
    oldest_wait: timedelta | None
    longest_running: timedelta | None
    rate: float | None
    """Completed per second, lately; None when no dispatcher has said it yet."""
    paused: str | None
    served_by: list[str]
    unserved: int
    """Those that wait and whose topic and generation no living dispatcher serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherStatus:
    worker: str
    alive: bool
    host: str
    pid: int
    version: str
    topics: list[str]
    generations: list[int] | None
    """None: all."""
    in_flight: int
    completed: int
    rate: float | None
    """Completed per second."""
    last_seen: timedelta
    started_at: datetime

    def serves(self, topic: str, generation: int) -> bool:
        """Whether it would claim such an event."""
        return (
            self.alive
            and topic in self.topics
            and (generation == 0 or self.generations is None or generation in self.generations)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    topic: str | None
    """None: all."""
    reason: str
    paused_by: str
    paused_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadKind:
    topic: str
    error_class: str
    dead: int
    first_died_at: datetime
    last_died_at: datetime
    generations: list[int]
    died_before: int
    """Those that had been replayed, and are dead again."""
    last_error: str | None

    @property
    def kind(self) -> Kind:
        return Kind(self.topic, self.error_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    event_id: UUID
    topic: str
    error_class: str
    dead_lettered_at: datetime
    attempts: int
    generation: int
    earlier_cycles: int
    ordering_key: str | None
    last_error: str | None

    @property
    def kind(self) -> Kind:
        return Kind(self.topic, self.error_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedKey:
    ordering_key: str
    event_id: UUID
    topic: str
    status: str
    why: str
    since: datetime
    waiting: int
    """How many wait behind the event, at most 1000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What has become of a replayed event. *status* None: the row is gone, as its topic deletes what completed."""

    event_id: UUID
    status: str | None
    error_class: str = ""
    last_error: str | None = None
    attempts: int = 0
    max_attempts: int | None = None


@dataclass(slots=True, kw_only=True)
class Relapses:
    """Events of one request that failed again, by the kind that they were of."""

    same_dead: dict[Kind, int] = field(default_factory=dict)
    other_dead: dict[Kind, int] = field(default_factory=dict)
    same_retrying: dict[Kind, int] = field(default_factory=dict)


@contextmanager
def connect(dsn: str, *, name: str = "pulse-outbox") -> Iterator[psycopg.Connection[Any]]:
    """A connection in autocommit: nothing that an operator does holds a transaction open."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's own message quotes pieces of the text, which may be pieces of the password.
        raise SettingsError("the DSN is neither a libpq URI (postgresql://…) nor a conninfo string") from None
    defaults: dict[str, Any] = {"fallback_application_name": name, "client_encoding": "utf8"}
    if "PGCONNECT_TIMEOUT" not in os.environ:
        defaults["connect_timeout"] = "10"
    conninfo = make_conninfo("", **(defaults | given))
    with psycopg.connect(conninfo, autocommit=True, prepare_threshold=None) as conn:
        yield conn


class Operations:
    """The operator's reads and changes of one schema."""

    def __init__(self, conn: psycopg.Connection[Any], schema: str = schemas.DEFAULT_SCHEMA) -> None:
        self.conn = conn
        self.schema = schemas.check_schema_name(schema)

    def require_supported(self) -> None:
        """Raises SchemaError when the database's schema does not fit this code."""
        schemas.check(self.conn, self.schema).require_supported()

    # Reading

    def now(self) -> datetime:
        """The database's clock."""
        [(now,)] = self._rows("select clock_timestamp()")
        assert isinstance(now, datetime)
        return now

    def database(self) -> str:
        """The database's name, for questions that name what they are about."""
        [(name,)] = self._rows("select current_database()")
        return str(name)

    def topics(self) -> list[TopicStatus]:
        return self._values(
            TopicStatus,
            """select topic, due, later, running, retrying, parked, dead, oldest_wait, longest_running, rate,
                      paused, served_by, unserved
                 from {schema}.topic_status order by topic""",
        )

    def dispatchers(self) -> list[DispatcherStatus]:
        return self._values(
            DispatcherStatus,
            """select worker, alive, host, pid, version, topics, generations, in_flight, completed, rate, last_seen,
                      started_at
                 from {schema}.dispatcher_status order by worker""",
        )

    def pauses(self) -> list[Pause]:
        return self._values(
            Pause,
            "select topic, reason, paused_by, paused_at from {schema}.pause order by topic nulls first",
        )

    def dead_kinds(self, selection: Selection) -> list[DeadKind]:
        """By kind, the most numerous first. The selection's limit does not count here."""
        condition, values = selection.condition()
        return self._values(
            DeadKind,
            """select topic, error_class, count(*) as dead,
                      min(dead_lettered_at) as first_died_at,
                      max(dead_lettered_at) as last_died_at,
                      array_agg(distinct generation) as generations,
                      count(*) filter (where earlier_cycles > 0) as died_before,
                      (array_agg(last_error order by dead_lettered_at desc))[1] as last_error
                 from {schema}.dead_letter
                where {condition}
                group by topic, error_class
                order by dead desc, topic, error_class""",
            values,
            condition=condition,
        )

    def dead_letters(self, selection: Selection, *, newest_first: bool = True) -> list[DeadLetter]:
        condition, values = selection.condition()
        return self._values(
            DeadLetter,
            """select event_id, topic, error_class, dead_lettered_at, attempts, generation, earlier_cycles,
                      ordering_key, left(last_error, 2000) as last_error
                 from {schema}.dead_letter
                where {condition}
                order by dead_lettered_at {direction}, event_id
                limit %(limit)s::bigint""",
            values,
            condition=condition,
            direction=sql.SQL("desc" if newest_first else "asc"),
        )

    def event(self, event_id: UUID, *, payload: bool = False) -> dict[str, Any] | None:
        """All columns of one event, in whatever state, by name; payload and headers only when asked for."""
        columns = sql.SQL(
            """event_id, status::text, topic, created_at, next_run_at, attempts, max_attempts, snoozes, lapses,
               generation, priority, ordering_key, parked, holds_key, idempotency_key, source, target, claimed_at,
               locked_by, lease_until, lease_seq, first_failed_at, completed_at, last_error, last_failure,
               alert_id, alerted_at, failure_history"""
        )
        if payload:
            columns = sql.SQL("{}, headers, payload").format(columns)  # type: ignore[assignment]
        with self._explained(), self.conn.cursor(row_factory=dict_row) as cursor:
            query = sql.SQL("select {} from {}.outbox where event_id = %s")
            cursor.execute(query.format(columns, sql.Identifier(self.schema)), (event_id,))
            return cursor.fetchone()

    def blocked_keys(self) -> list[BlockedKey]:
        return self._values(
            BlockedKey,
            """select ordering_key, event_id, topic, status::text, why, since, waiting
                 from {schema}.blocked_key order by waiting desc, ordering_key""",
        )

    def outcomes(self, event_ids: Sequence[UUID]) -> dict[UUID, Outcome]:
        """What has become of each of these events."""
        found = self._values(
            Outcome,
            """select event_id, status::text, coalesce(last_failure ->> 'error_class', '') as error_class,
                      last_error, attempts, max_attempts
                 from {schema}.outbox where event_id = any (%(ids)s::uuid[])""",
            {"ids": list(event_ids)},
        )
        known = {outcome.event_id: outcome for outcome in found}
        return {
            event_id: known.get(event_id, Outcome(event_id=event_id, status=None)) for event_id in event_ids
        }

    def relapses(self, kinds: Sequence[Kind], *, request: UUID, since: datetime) -> Relapses:
        """Events that this request replayed since then, and that are dead or retrying again."""
        found = Relapses()
        if not kinds:
            return found
        rows = self._rows(
            """select o.topic, coalesce(c.cycle -> 'last_failure' ->> 'error_class', ''),
                      o.status::text, o.last_failure ->> 'error_class' is not distinct from
                        c.cycle -> 'last_failure' ->> 'error_class', count(*)
                 from (select d.topic, d.status, d.last_failure, d.failure_history
                         from {schema}.outbox d
                        where d.indexed_as = 'DEAD_LETTERED'
                          and d.topic = any (%(topics)s::text[])
                          and d.indexed_at >= %(since)s
                        union all
                       (select r.topic, r.status, r.last_failure, r.failure_history
                         from {schema}.outbox r
                        where r.indexed_as in ('PENDING', 'RETRYING')
                          and not r.parked
                          and r.topic = any (%(topics)s::text[])
                          and r.status = 'RETRYING'
                        limit 5000)) as o
                cross join lateral (select o.failure_history -> -1 as cycle) as c
                where c.cycle ->> 'request' = %(request)s
                group by 1, 2, 3, 4""",
            {"topics": sorted({kind.topic for kind in kinds}), "since": since, "request": str(request)},
        )
        for topic, error_class, status, same, count in rows:
            kind = Kind(topic, error_class)
            if status == "DEAD_LETTERED":
                where = found.same_dead if same else found.other_dead
                where[kind] = where.get(kind, 0) + count
            elif same:
                found.same_retrying[kind] = count
        return found

    # Changing

    def replay(self, event_id: UUID, *, generation: int, by: str, request: UUID) -> None:
        """DEAD_LETTERED → PENDING in place. Repeated with the same request it changes nothing."""
        self._change("outbox_replay(%s, %s::bigint, %s, %s::uuid)", (event_id, generation, by, request))

    def replay_many(
        self, event_ids: Sequence[UUID], *, generation: int | None, by: str, request: UUID
    ) -> int:
        """As many of these as are dead, and not locked by anybody. *generation* None: each keeps its own."""
        return self._many("outbox_replay_many", event_ids, generation, "bigint", by, request)

    def discard(self, event_id: UUID, *, reason: str, by: str, request: UUID) -> None:
        """PENDING, RETRYING or DEAD_LETTERED → DISCARDED."""
        self._change("outbox_discard(%s, %s, %s, %s::uuid)", (event_id, reason, by, request))

    def discard_many(self, event_ids: Sequence[UUID], *, reason: str, by: str, request: UUID) -> int:
        return self._many("outbox_discard_many", event_ids, reason, "text", by, request)

    def still_dead(self, event_ids: Sequence[UUID], *, request: UUID) -> list[UUID]:
        """Those of these that this request has not changed: locked by somebody when it came by."""
        rows = self._rows(
            """select event_id from {schema}.outbox
                where event_id = any (%(ids)s::uuid[])
                  and status = 'DEAD_LETTERED'
                  and failure_history -> -1 ->> 'request' is distinct from %(request)s""",
            {"ids": list(event_ids), "request": str(request)},
        )
        return [event_id for (event_id,) in rows]

    def pause(self, topic: str | None, *, reason: str, by: str) -> None:
        """No claim of this topic, or of any, from now on."""
        self._change("outbox_pause(%s, %s, %s)", (topic, reason, by))

    def resume(self, topic: str | None, *, by: str) -> bool:
        """Ends a pause; True when there was one."""
        [(there_was_one,)] = self._change("outbox_resume(%s, %s)", (topic, by))
        return bool(there_was_one)

    def prune(
        self, *, retention: timedelta, page: int, pages: int = 1000, dead: bool = False
    ) -> tuple[int, int | None]:
        """Deletes what ended long ago from some pages of the table: how many, and the page to go on with."""
        [(pruned, next_page)] = self._change(
            "outbox_prune(%s, %s::bigint, %s::integer, %s)", (retention, page, pages, dead)
        )
        return pruned, next_page

    def prune_handled(self, *, older_than: timedelta, page: int, pages: int = 1000) -> tuple[int, int | None]:
        """Forgets what handlers did long ago, as `prune` does with events."""
        [(pruned, next_page)] = self._change(
            "outbox_prune_handled(%s, %s::bigint, %s::integer)", (older_than, page, pages)
        )
        return pruned, next_page

    def pages(self, table: str) -> int:
        """Pages of a table, for a bar that shows how far a walk along it has come."""
        [(pages,)] = self._rows(
            "select pg_relation_size(%(table)s::regclass) / current_setting('block_size')::bigint",
            {"table": f'"{self.schema}".{table}'},
        )
        return int(pages)

    # Inside

    def _many(
        self, function: str, event_ids: Sequence[UUID], what: object, kind: str, by: str, request: UUID
    ) -> int:
        if not event_ids:
            return 0
        [(changed,)] = self._change(
            f"{function}(null, null, null, null, %s::integer, %s::{kind}, %s, %s::uuid[], %s::uuid)",
            (len(event_ids), what, by, list(event_ids), request),
        )
        return int(changed)

    def _change(self, call: str, parameters: tuple[object, ...]) -> list[tuple[Any, ...]]:
        """One function in a transaction of its own that does not wait for ever behind somebody's lock."""
        query = sql.SQL("select * from {}." + call)  # noqa: S608  # constants of this module
        with self._explained(), self.conn.transaction(), self.conn.cursor(row_factory=tuple_row) as cursor:
            patience = f"{int(LOCK_PATIENCE.total_seconds())}s"
            cursor.execute("select set_config('lock_timeout', %s, true)", (patience,))
            cursor.execute(query.format(sql.Identifier(self.schema)), parameters)
            return cursor.fetchall()

    def _rows(self, query: str, values: dict[str, object] | None = None) -> list[tuple[Any, ...]]:
        with self._explained(), self.conn.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(self._composed(query), values)
            return cursor.fetchall()

    def _values(
        self,
        kind: type[Any],
        query: str,
        values: dict[str, object] | None = None,
        **parts: sql.Composable,
    ) -> list[Any]:
        with self._explained(), self.conn.cursor(row_factory=dict_row) as cursor:
            cursor.execute(self._composed(query, **parts), values)
            return [kind(**row) for row in cursor]

    def _composed(self, query: str, **parts: sql.Composable) -> sql.Composed:
        text = sql.SQL(query)
        return text.format(schema=sql.Identifier(self.schema), **parts)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors that have a remedy, with it."""
        try:
            yield
        except psycopg.Error as error:
            if ours := from_database_error(error):
                raise ours from error
            match error.sqlstate:
                case "55P03":
                    raise RowLocked(
                        "somebody else has locked the row: `pulse-outbox doctor` names long transactions; try again"
                    ) from error
                case "42501":
                    primary = error.diag.message_primary
                    raise OutboxError(
                        f"{primary}: connect as a user that is a member of {self.schema}_operator "
                        f"(`grant {self.schema}_operator to …`)"
                    ) from error
                case "25006":
                    raise OutboxError(
                        "this server is a read-only standby: give the primary's DSN, or add "
                        "target_session_attrs=read-write to this one"
                    ) from error
                case state if state in UNMIGRATED_SQLSTATES:
                    schemas.check(self.conn, self.schema).require_supported()
            raise
