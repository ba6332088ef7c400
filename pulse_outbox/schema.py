"""Numbered migrations: find them, give them a schema name, apply them, check them, print them.

The files in migrations/ are the single source for every way of applying them: `pulse-outbox migrate`,
`migrate()` here, plain `psql -f`, the text of `sql()`, or `statement()` in a migration of Alembic's or Django's.
Each file records itself in `<schema>.migration`, so whichever way was taken, the others know.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import psycopg
from psycopg import sql as query
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import tuple_row

from pulse_outbox import __version__
from pulse_outbox.errors import SchemaError, SettingsError
from pulse_outbox.events import check_schema_name as check_schema_name

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

DEFAULT_SCHEMA = "pulse"
ROLES = ("producer", "dispatcher", "operator")
OLDEST_SERVER = 14

# How long one migrate waits for another one before it gives up and names it.
WAIT_FOR_OTHERS = timedelta(minutes=10)
LOCK_ATTEMPTS = 4
RACE_ATTEMPTS = 20

Report = Callable[[str], None]
Connection = psycopg.Connection[Any]


# The files


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One file of migrations/, with the literal schema name `pulse` in its text."""

    version: int
    name: str
    text: str

    @property
    def label(self) -> str:
        return f"{self.version:04d}_{self.name}"

    @property
    def checksum(self) -> str:
        """Of the file as shipped, so that it is the same whatever the schema is called."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def transactional(self) -> bool:
        """False for a file with the line `-- transaction: none`, such as one that creates an index concurrently.

        Its statements commit one by one; each ends with a semicolon at a line's end, none holds a dollar-quoted body.
        It must be safe to repeat, since a failure leaves what came before it, and must record itself last.
        """
        return re.search(r"^-- transaction: none$", self.text, re.MULTILINE) is None


def find_migrations(folder: Traversable | None = None) -> tuple[Migration, ...]:
    """All migrations of this release (or of *folder*), oldest first; a gap or a stray name is refused."""
    folder = folder or _migrations_folder()
    found: dict[int, Migration] = {}
    for file in sorted(folder.iterdir() if folder.is_dir() else (), key=lambda file: file.name):
        if not file.name.endswith(".sql"):
            continue
        parts = re.fullmatch(r"(\d{4})_([a-z0-9_]+)\.sql", file.name)
        if not parts:
            raise SchemaError(f"{file.name} is not named like a migration: 0002_add_topic_pause.sql")
        version = int(parts[1])
        if version in found:
            raise SchemaError(
                f"two migrations have the number {version:04d}: {found[version].name}, {parts[2]}"
            )
        found[version] = Migration(version=version, name=parts[2], text=file.read_text(encoding="utf-8"))
    if not found:
        raise SchemaError("this installation holds no migrations: install pulse-outbox again")
    if sorted(found) != list(range(1, len(found) + 1)):
        raise SchemaError(f"the migrations are not numbered 1 to {len(found)}: {sorted(found)}")
    return tuple(found.values())


def _migrations_folder() -> Traversable:
    inside = resources.files("pulse_outbox") / "migrations"
    if inside.is_dir():
        return inside
    # A checkout or an editable install: the folder stands beside the package.
    return Path(__file__).resolve().parent.parent / "migrations"


# The schema's name


# Whole words only: the command pulse-outbox and the package pulse_outbox keep their names.
_LITERAL_NAME = re.compile(
    r"""
    (?P<quote> ['"] ) pulse (?P=quote)             # 'pulse' is data, "pulse" an identifier
  | (?<![\w$.-]) pulse (?= _ (?: producer | dispatcher | operator | outbox_wake ) (?![\w$]) )
  | (?<![\w$.-]) (?P<schema> pulse ) (?![\w$-])
    """,
    re.VERBOSE,
)


def render(migration: Migration, schema: str = DEFAULT_SCHEMA) -> str:
    """The migration's text for this schema. For `pulse` it is the file itself."""
    if check_schema_name(schema) == DEFAULT_SCHEMA:
        return migration.text

    def name(match: re.Match[str]) -> str:
        # As a schema it is quoted, since it may be a keyword, such as order.
        quote = match["quote"] or ('"' if match["schema"] else "")
        return f"{quote}{schema}{quote}"

    return _LITERAL_NAME.sub(name, migration.text)


# Versions: what is installed, and may this code use it?


class VersionRow(NamedTuple):
    """A row of `<schema>.migration`, as `versions_query` selects it."""

    version: int
    name: str
    oldest_code: str
    checksum: str | None


State = Literal["missing", "behind", "current", "ahead-supported", "ahead-unsupported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaState:
    """How an installed schema and this release fit together."""

    schema: str
    state: State
    installed: int
    """Newest migration in the database; 0 when there is none."""
    shipped: int
    """Newest migration of this release."""
    code: str
    oldest_code: str | None
    """The oldest release that the installed schema supports."""
    pending: tuple[str, ...]
    changed: tuple[str, ...]
    """Applied files whose text is no longer what was applied."""

    def require_supported(self) -> None:
        """Raise `SchemaError` with the command to run, unless this release may use the schema."""
        match self.state:
            case "missing":
                raise SchemaError(f"this database has no schema {self.schema}: run `{self._command()}`")
            case "behind":
                raise SchemaError(
                    f"schema {self.schema} is at {self.installed} and pulse-outbox {self.code} needs "
                    f"{self.shipped}: run `{self._command()}`"
                )
            case "ahead-unsupported":
                raise SchemaError(
                    f"schema {self.schema} is at {self.installed} and no longer supports pulse-outbox "
                    f"{self.code}: run `pip install 'pulse-outbox>={self.oldest_code}'`"
                )
            case "current" | "ahead-supported":
                return

    def require_unchanged(self) -> None:
        """Raise `SchemaError` if a file was edited after it had been applied."""
        if self.changed:
            raise SchemaError(
                f"{', '.join(self.changed)} was changed after it had been applied to schema {self.schema}: "
                "put the released text back and make the change in a new migration"
            )

    def _command(self) -> str:
        return "pulse-outbox migrate" + ("" if self.schema == DEFAULT_SCHEMA else f" --schema {self.schema}")


def versions_query(schema: str = DEFAULT_SCHEMA) -> query.Composed:
    """Selects the `VersionRow`s; 42P01 from it means that there is no schema, and no row to judge."""
    return query.SQL("select version, name, oldest_code, checksum from {}.migration order by version").format(
        query.Identifier(check_schema_name(schema))
    )


def judge_versions(
    rows: Sequence[tuple[Any, ...]],
    *,
    schema: str = DEFAULT_SCHEMA,
    migrations: Sequence[Migration] | None = None,
    code: str = __version__,
) -> SchemaState:
    """Decide from the rows of `versions_query` whether this release may use the schema; asks no database."""
    shipped = find_migrations() if migrations is None else migrations
    installed = {row.version: row for row in map(VersionRow._make, rows)}
    newest_installed = max(installed, default=0)
    newest_shipped = max((migration.version for migration in shipped), default=0)
    oldest_code = installed[newest_installed].oldest_code if installed else None
    pending = tuple(migration.label for migration in shipped if migration.version not in installed)
    changed = tuple(
        migration.label
        for migration in shipped
        if (row := installed.get(migration.version))
        and (row.name != migration.name or row.checksum not in (None, migration.checksum))
    )
    state: State
    if not installed:
        state = "missing"
    elif oldest_code is not None and _release(code) < _release(oldest_code):
        state = "ahead-unsupported"
    elif pending:
        state = "behind"
    elif newest_installed > newest_shipped:
        state = "ahead-supported"
    else:
        state = "current"
    return SchemaState(
        schema=schema,
        state=state,
        installed=newest_installed,
        shipped=newest_shipped,
        code=code,
        oldest_code=oldest_code,
        pending=pending,
        changed=changed,
    )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release. A pre-release counts as its release: that is what it tries out."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    if not numbers:
        raise SchemaError(f"{version!r} is not a release number")
    return tuple(int(number) for number in numbers[0].split("."))


def check(
    database: str | Connection,
    schema: str = DEFAULT_SCHEMA,
    *,
    migrations: Sequence[Migration] | None = None,
) -> SchemaState:
    """Read what is installed and compare it with this release; changes nothing."""
    with _connected(database) as conn:
        return judge_versions(_read_versions(conn, schema), schema=schema, migrations=migrations)


def require_supported(database: str | Connection, schema: str = DEFAULT_SCHEMA) -> None:
    """Raise `SchemaError` with the command to run, unless this release may use the installed schema."""
    check(database, schema).require_supported()


def _read_versions(conn: Connection, schema: str) -> list[tuple[Any, ...]]:
    try:
        # Asked first, because an error would end the caller's transaction and stand in the server's log.
        table = f'"{check_schema_name(schema)}".migration'
        [exists] = _one(conn, "select to_regclass(%s) is not null", table)
        if not exists:
            return []
        with conn.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(versions_query(schema)).fetchall()
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaError(
            f"user {conn.info.user} may not read {schema}.migration: connect as the schema's owner, or "
            f"`grant {schema}_operator to {conn.info.user}`"
        ) from error
    except psycopg.errors.UndefinedColumn as error:
        raise SchemaError(
            f"the table {schema}.migration is not one of pulse-outbox: choose another schema (--schema)"
        ) from error


# Applying


def migrate(
    database: str | Connection,
    *,
    schema: str = DEFAULT_SCHEMA,
    target: int | None = None,
    lock_timeout: float | timedelta = 5,
    report: Report = lambda line: None,
    migrations: Sequence[Migration] | None = None,
) -> list[Migration]:
    """Bring the schema to *target*, by default to this release's newest, and return what was applied.

    Each file is one transaction, unless it says otherwise. Any number of processes may do this at once:
    one works, the others wait and find nothing to do. *lock_timeout* (seconds) bounds each wait for a
    table lock, because everyone else queues behind a migration that queues. Needs a direct connection, not
    one through PgBouncer.
    """
    check_schema_name(schema)
    shipped = find_migrations() if migrations is None else migrations
    patience = _seconds(lock_timeout)
    if target is not None and not 1 <= target <= len(shipped):
        raise SettingsError(f"there is no migration {target}: this release ships 1 to {len(shipped)}")
    with _connected(database, alone=True) as conn, _only_migrator(conn, schema, report):
        state = judge_versions(_read_versions(conn, schema), schema=schema, migrations=shipped)
        if state.state == "ahead-unsupported":
            state.require_supported()
        state.require_unchanged()
        todo = [
            migration
            for migration in shipped
            if migration.label in state.pending and (target is None or migration.version <= target)
        ]
        if todo and todo[0].version != state.installed + 1:
            raise SchemaError(
                f"schema {schema} is at {state.installed} but {todo[0].label} was never applied: "
                f"apply it with `pulse-outbox migrate --sql --from {todo[0].version} --to {todo[0].version}`"
            )
        _fill_checksums(conn, schema, shipped)
        for migration in todo:
            started = time.monotonic()
            _apply(conn, migration, schema, patience, report)
            report(f"{migration.label}  applied in {time.monotonic() - started:.2f} s")
        if not todo:
            newer = ", newer than this release" if state.state == "ahead-supported" else ""
            report(f"nothing to do: schema {schema} is at {state.installed}{newer}")
        _settle_roles(conn, schema, report)
    return todo


def _settings(patience: float) -> str:
    # statement_timeout: a role's own limit must not end a long index build in the middle.
    # search_path: nothing that someone put into public can stand in for a built-in operator.
    return (
        f"set local lock_timeout = {max(1, round(patience * 1000))};\n"
        "set local statement_timeout = 0;\n"
        "set local search_path = pg_catalog, pg_temp;\n"
    )


def _apply(conn: Connection, migration: Migration, schema: str, patience: float, report: Report) -> None:
    """Run one file in one transaction; again when that lost a race, a few times when a lock is taken."""
    waits = races = 0
    while True:
        try:
            return _apply_once(conn, migration, schema, patience)
        except psycopg.errors.LockNotAvailable as error:
            waits += 1
            blockers = _blockers(conn, schema)
            if waits == LOCK_ATTEMPTS:
                raise SchemaError(
                    f"{migration.label} gave up after {waits} waits of {patience:g} s for a lock; {blockers}"
                ) from error
            report(f"{migration.label}  waits for a lock: {blockers}")
            # Not at once: everyone who queued behind the migration gets through first.
            time.sleep(patience / 2)
        except psycopg.Error as error:
            races += 1
            if conn.broken or conn.closed:
                raise SchemaError(
                    f"the connection was lost while {migration.label} was being applied: run migrate again, "
                    "it sees what was committed"
                ) from error
            if not _lost_a_race(error) or races == RACE_ATTEMPTS:
                raise _failure(conn, migration, schema, error) from error
            time.sleep(0.02 * races)


def _apply_once(conn: Connection, migration: Migration, schema: str, patience: float) -> None:
    if not migration.transactional:
        _apply_statements(conn, migration, schema)
        return
    with conn.transaction():
        conn.execute(_settings(patience).encode())
        conn.execute(render(migration, schema).encode(conn.info.encoding))
        _record(conn, migration, schema)


def _apply_statements(conn: Connection, migration: Migration, schema: str) -> None:
    """Run a file that may not be one transaction, each statement by itself, on a connection in autocommit."""
    names = ("lock_timeout", "statement_timeout", "search_path")
    before = [_one(conn, "select current_setting(%s)", name)[0] for name in names]
    # No limit on waiting: what is done concurrently waits for old transactions, and nobody queues behind it.
    wanted = ("0", "0", "pg_catalog, pg_temp")
    try:
        _set(conn, zip(names, wanted, strict=True))
        for text in _statements(migration, schema):
            conn.execute(text.encode(conn.info.encoding))
        _record(conn, migration, schema)
    finally:
        if not conn.broken and not conn.closed:
            _set(conn, zip(names, before, strict=True))


def _set(conn: Connection, settings: Iterable[tuple[str, str]]) -> None:
    for name, value in settings:
        conn.execute("select set_config(%s, %s, false)", (name, value))


def _statements(migration: Migration, schema: str) -> list[str]:
    text = render(migration, schema)
    if "$$" in text:
        raise SchemaError(f"{migration.label} has no transaction: a function belongs into a file of its own")
    return [part for part in re.split(r"(?<=;)[ \t]*$", text, flags=re.MULTILINE) if part.strip()]


def _record(conn: Connection, migration: Migration, schema: str) -> None:
    recorded = conn.execute(
        query.SQL("update {}.migration set checksum = %s where version = %s and name = %s").format(
            query.Identifier(schema)
        ),
        (migration.checksum, migration.version, migration.name),
    )
    if recorded.rowcount != 1:
        raise SchemaError(f"{migration.label} does not record itself in {schema}.migration: add the insert")


def _lost_a_race(error: psycopg.Error) -> bool:
    """Whether the file would succeed now: mostly two databases of a cluster that create the same roles."""
    match error.sqlstate:
        case "40001" | "40P01":
            return True
        case "XX000":
            return "concurrently" in (error.diag.message_primary or "")  # "tuple concurrently updated"
        case "23505":
            return error.diag.schema_name == "pg_catalog"
        case _:
            return False


def _failure(conn: Connection, migration: Migration, schema: str, error: psycopg.Error) -> SchemaError:
    line = ""
    if (position := error.diag.statement_position) and migration.transactional:
        number = render(migration, schema).count("\n", 0, int(position) - 1) + 1
        line = f" at line {number}"
    remedy = ""
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        remedy = (
            f": migrate as the owner of schema {schema}, or first "
            f"`grant create on database {conn.info.dbname} to {conn.info.user}`"
        )
    reason = error.diag.message_primary or type(error).__name__
    left = "nothing of it was applied" if migration.transactional else "migrate again begins it anew"
    return SchemaError(f"{migration.label} failed{line}, {left}: {reason}{remedy}")


def _fill_checksums(conn: Connection, schema: str, shipped: Sequence[Migration]) -> None:
    """Files that someone ran through plain psql recorded themselves without a checksum."""
    for version, _, _, checksum in _read_versions(conn, schema):
        if checksum is None and version <= len(shipped):
            conn.execute(
                query.SQL("update {}.migration set checksum = %s where version = %s").format(
                    query.Identifier(schema)
                ),
                (shipped[version - 1].checksum, version),
            )


# One migrator at a time, on a connection that can hold a lock


@contextlib.contextmanager
def _connected(database: str | Connection, *, alone: bool = False) -> Iterator[Connection]:
    """The caller's connection, or one of our own; *alone*: with no transaction around what we do."""
    if isinstance(database, str):
        with psycopg.connect(_conninfo(database), autocommit=True, prepare_threshold=None) as conn:
            yield conn
    elif not alone:
        yield database
    elif database.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        raise SchemaError(
            "migrate commits each file by itself: give it a connection without an open transaction"
        )
    else:
        before = database.autocommit
        database.autocommit = True
        try:
            yield database
        finally:
            if not database.closed:
                database.autocommit = before


def _conninfo(dsn: str) -> str:
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # libpq's own message quotes pieces of the text, which may be pieces of the password.
        raise SettingsError("the DSN is neither a libpq URI (postgresql://…) nor a conninfo string") from None
    defaults: dict[str, Any] = {
        "fallback_application_name": "pulse-outbox migrate",
        "client_encoding": "utf8",
    }
    if "PGCONNECT_TIMEOUT" not in os.environ:
        defaults["connect_timeout"] = "10"
    return make_conninfo("", **(defaults | given))


def _lock_key(schema: str) -> int:
    digest = hashlib.sha256(f"pulse-outbox migrate {schema}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


@contextlib.contextmanager
def _only_migrator(conn: Connection, schema: str, report: Report) -> Iterator[None]:
    _refuse_unfit(conn)
    key = _lock_key(schema)
    deadline = time.monotonic() + WAIT_FOR_OTHERS.total_seconds()
    waiting = False
    # Asking again and again instead of waiting inside the server: a waiting statement holds a snapshot, and
    # `create index concurrently` in the process that has the lock would wait for that snapshot for ever.
    while not _one(conn, "select pg_try_advisory_lock(%s)", key)[0]:
        if time.monotonic() > deadline:
            raise SchemaError(
                f"another migrate of schema {schema} is not done after {WAIT_FOR_OTHERS} "
                f"({_lock_holder(conn, key)}): end it and try again"
            )
        if not waiting:
            report(f"waiting for another migrate of schema {schema}")
            waiting = True
        time.sleep(0.1)
    try:
        yield
    finally:
        if not conn.closed:
            conn.execute("select pg_advisory_unlock(%s)", (key,))


def _refuse_unfit(conn: Connection) -> None:
    if conn.info.server_version < OLDEST_SERVER * 10_000:
        version = conn.info.parameter_status("server_version")
        raise SchemaError(f"this server is PostgreSQL {version}: {OLDEST_SERVER} or newer is needed")
    [backend, standby] = _one(conn, "select pg_backend_pid(), pg_is_in_recovery()")
    # A pooler answers with process numbers of its own invention.
    if backend != conn.info.backend_pid:
        raise SchemaError(
            "this DSN leads through a connection pooler, which may lose the migration lock: give migrate a "
            "direct DSN, or apply the text of `pulse-outbox migrate --sql`"
        )
    if standby:
        raise SchemaError(
            "this server is a read-only standby: give migrate the primary's DSN, or add "
            "target_session_attrs=read-write to this one"
        )


def _lock_holder(conn: Connection, key: int) -> str:
    holder = _any(
        conn,
        """
        select activity.pid, activity.usename, activity.application_name
          from pg_locks as held
          join pg_stat_activity as activity using (pid)
         where held.locktype = 'advisory'
           and held.granted
           and held.objsubid = 1
           and held.database = (select oid from pg_database where datname = current_database())
           and held.classid::bigint << 32 | held.objid::bigint = %s
        """,
        key,
    )
    return "pid {}, user {}, {}".format(*holder) if holder else "its session is gone now"


def _blockers(conn: Connection, schema: str) -> str:
    """Who holds locks on the schema's tables now, the oldest first, and what to do about it.

    `pg_blocking_pids` knows only who blocks a statement that still waits; ours has given up by then.
    """
    blocker = _any(
        conn,
        """
        select held.pid,
               relation.relname,
               held.mode,
               coalesce(activity.usename, '?'),
               coalesce(nullif(activity.application_name, ''), '?'),
               coalesce(activity.state, '?'),
               coalesce(extract(epoch from clock_timestamp() - activity.xact_start)::bigint::text, '?')
          from pg_locks as held
          join pg_class as relation on relation.oid = held.relation
          join pg_namespace as namespace on namespace.oid = relation.relnamespace
          left join pg_stat_activity as activity on activity.pid = held.pid
         where namespace.nspname = %s
           and held.granted
           and held.database = (select oid from pg_database where datname = current_database())
           and held.pid is distinct from pg_backend_pid()
         order by activity.xact_start nulls last,
                  relation.relkind = 'i',
                  held.pid
         limit 1
        """,
        schema,
    )
    if blocker is None:
        return "whoever held it is gone now: run migrate again"
    pid, table, mode, user, application, state, age = blocker
    if pid is None:
        return f"a prepared transaction holds {mode} on {schema}.{table}: end it (see pg_prepared_xacts)"
    return (
        f"pid {pid} (user {user}, application {application}, {state}, transaction open for {age} s) holds "
        f"{mode} on {schema}.{table}: let it finish, or end it with `select pg_terminate_backend({pid})`"
    )


# Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """Which of the three roles named after the schema can be used."""

    missing: tuple[str, ...]
    ungranted: tuple[str, ...]


def role_names(schema: str = DEFAULT_SCHEMA) -> tuple[str, ...]:
    return tuple(f"{check_schema_name(schema)}_{role}" for role in ROLES)


def check_roles(conn: Connection, schema: str = DEFAULT_SCHEMA) -> RoleState:
    """Look which roles exist, and which of those may not use the schema."""
    missing, ungranted = [], []
    for role in role_names(schema):
        usable = _any(
            conn,
            "select has_schema_privilege(oid, %s, 'usage') from pg_roles where rolname = %s",
            schema,
            role,
        )
        if usable is None:
            missing.append(role)
        elif not usable[0]:
            ungranted.append(role)
    return RoleState(missing=tuple(missing), ungranted=tuple(ungranted))


def roles_sql(roles: Sequence[str], schema: str = DEFAULT_SCHEMA) -> str:
    """What an administrator runs to create these roles and let them in."""
    grant = f'"{schema}"' if schema != DEFAULT_SCHEMA else schema
    return "\n".join([*(f"create role {role} nologin;" for role in roles), f"select {grant}.outbox_grant();"])


def _settle_roles(conn: Connection, schema: str, report: Report) -> None:
    """Let in the roles that an administrator created since; say which are missing and how to create them."""
    state = check_roles(conn, schema)
    if state.ungranted and _may_grant(conn, schema):
        with conn.transaction():
            conn.execute(query.SQL("select {}.outbox_grant()").format(query.Identifier(schema)))
        report(f"granted: {', '.join(state.ungranted)}")
        state = check_roles(conn, schema)
    if state.missing:
        report(
            f"not created, for want of the right to create roles: {', '.join(state.missing)}\n"
            f"an administrator can do it, in this database:\n\n{roles_sql(state.missing, schema)}\n"
        )
    if state.ungranted:
        report(
            f"not granted: {', '.join(state.ungranted)}\n"
            f"the owner of schema {schema} can do it:\n\n{roles_sql((), schema)}\n"
        )


def _may_grant(conn: Connection, schema: str) -> bool:
    [owner] = _one(
        conn,
        """
        select pg_has_role(nspowner, 'usage')
               and to_regprocedure(%s) is not null
          from pg_namespace
         where nspname = %s
        """,
        f'"{schema}".outbox_grant()',
        schema,
    )
    return bool(owner)


# Printing


def sql(
    first: int = 1,
    last: int | None = None,
    schema: str = DEFAULT_SCHEMA,
    *,
    transactions: bool = True,
    lock_timeout: float | timedelta = 5,
    migrations: Sequence[Migration] | None = None,
) -> str:
    """The migrations *first* to *last* as text, which leaves the same schema as `migrate` does.

    With *transactions* each file stands between begin and commit, for psql. Without, for tools that open
    their own transaction around whole files (Flyway). Either way the text takes the lock of `migrate` and
    refuses to run out of turn.
    """
    check_schema_name(schema)
    shipped = find_migrations() if migrations is None else migrations
    last = len(shipped) if last is None else last
    patience = _seconds(lock_timeout)
    chosen = [migration for migration in shipped if first <= migration.version <= last]
    if not chosen or last > len(shipped):
        raise SettingsError(
            f"there is no migration {first} to {last}: this release ships 1 to {len(shipped)}"
        )
    if not transactions and (alone := next((file for file in chosen if not file.transactional), None)):
        raise SettingsError(
            f"{alone.label} can't run inside a transaction: apply it with `pulse-outbox migrate`"
        )
    return "\n".join(_printed(migration, schema, patience if transactions else None) for migration in chosen)


def _printed(migration: Migration, schema: str, patience: float | None) -> str:
    version, table = migration.version, f'"{schema}".migration'
    lock = f"perform pg_advisory_xact_lock({_lock_key(schema)})"
    begin = commit = ""
    if not migration.transactional:
        # Not waiting, which would hold a snapshot that the other migration may wait for in its turn.
        begin = "\\set ON_ERROR_STOP on\n"
        lock = f"""if not pg_try_advisory_lock({_lock_key(schema)}) then
    raise exception 'another migration of schema {schema} is under way: try again later';
  end if"""
        commit = f"select pg_advisory_unlock({_lock_key(schema)});\n"
    elif patience is not None:
        begin, commit = f"begin;\n{_settings(patience)}", "commit;\n"
    if version == 1:
        out_of_turn = f"to_regclass('{table}') is not null"
    else:
        out_of_turn = f"(select max(version) from {table}) is distinct from {version - 1}"  # noqa: S608
    # The only piece that comes from outside is the schema's name, and that has been checked.
    return f"""\
-- {migration.label} for schema {schema}, printed by pulse-outbox {__version__}
{begin}do $turn$
begin
  {lock};  -- one migration at a time, by whatever tool
  if {out_of_turn} then
    raise exception 'schema {schema} is not at {version - 1}: {migration.label} is not the next migration';
  end if;
end
$turn$;

{render(migration, schema).rstrip()}

update {table} set checksum = '{migration.checksum}' where version = {version};
{commit}"""  # noqa: S608


def statement(
    version: int,
    schema: str = DEFAULT_SCHEMA,
    *,
    lock_timeout: float | timedelta = 5,
    migrations: Sequence[Migration] | None = None,
) -> str:
    """One migration as one statement without parameters, for the transaction of Alembic, Django and their like.

    Does nothing where the migration has been applied, by whichever way; refuses to run out of turn. A single statement,
    because some drivers take no more at once; the settings of the transaction are afterwards what they were.
    """
    check_schema_name(schema)
    shipped = find_migrations() if migrations is None else migrations
    if not 1 <= version <= len(shipped):
        raise SettingsError(f"there is no migration {version}: this release ships 1 to {len(shipped)}")
    migration, table = shipped[version - 1], f'"{schema}".migration'
    text = render(migration, schema).rstrip()
    tag = "$migration$"
    if tag in text:
        raise SchemaError(f"{migration.label} holds {tag}, which stands around it: use another tag in it")
    apply = f"execute {tag}\n{text}\n{tag}"
    if not migration.transactional:
        command = f"pulse-outbox migrate --to {version}"
        apply = f"raise exception '{migration.label} can''t run inside a transaction: run `{command}` before this'"
    return f"""\
-- {migration.label} for schema {schema}, by pulse-outbox {__version__}
do $pulse_outbox$
declare
  v_search_path  text := pg_catalog.current_setting('search_path');
  v_lock_timeout text := pg_catalog.current_setting('lock_timeout');
  v_installed    integer;
  v_applied      boolean;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  perform pg_advisory_xact_lock({_lock_key(schema)});  -- one migration at a time, by whatever tool
  if to_regclass('{table}') is not null then
    select max(version), bool_or(version = {version})
      into v_installed, v_applied
      from {table};
  end if;
  if v_applied is not true then
    if v_installed is distinct from {"null" if version == 1 else version - 1} then
      raise exception 'schema {schema} is at %: {migration.label} is not the next migration', coalesce(v_installed, 0);
    end if;
    perform set_config('lock_timeout', '{max(1, round(_seconds(lock_timeout) * 1000))}', true);
    {apply};
    update {table} set checksum = '{migration.checksum}' where version = {version};
    perform set_config('lock_timeout', v_lock_timeout, true);
  end if;
  perform set_config('search_path', v_search_path, true);
end
$pulse_outbox$"""  # noqa: S608  of the schema's name nothing but a checked identifier gets here


# Asking


def _any(conn: Connection, text: str, *parameters: object) -> tuple[Any, ...] | None:
    with conn.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(text.encode(), parameters).fetchone()


def _one(conn: Connection, text: str, *parameters: object) -> tuple[Any, ...]:
    row = _any(conn, text, *parameters)
    assert row is not None
    return row


def _seconds(duration: float | timedelta) -> float:
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    if not 0 < seconds < 3600:
        raise SettingsError(
            "lock_timeout must be above 0 and below an hour: everyone queues behind a migration"
        )
    return seconds
