"""docs/reference/sql.md, as the catalog of a migrated database says it. Written anew by

python3 dev.py run python -m tests.docs.sql_reference
"""

from __future__ import annotations

import re
from typing import Any

import psycopg

from tests.docs.pages import ROOT

PAGE = ROOT / "docs/reference/sql.md"
BEGIN = "<!-- from here on written by tests/docs/sql_reference.py -->\n"
ROLES = ("producer", "dispatcher", "operator")
NOBODY = "its owner alone"

_RELATIONS = """
    select c.relname, obj_description(c.oid, 'pg_class')
      from pg_class c
     where c.relnamespace = 'pulse'::regnamespace and c.relkind = %s
     order by array_position(%s::text[], c.relname::text), c.relname"""
_COLUMNS = """
    select a.attname,
           case t.typtype
             when 'd' then format('%%s (%%s)', format_type(t.typbasetype, t.typtypmod), t.typname)
             else format_type(a.atttypid, a.atttypmod)
           end, a.attnotnull, a.attidentity <> '',
           pg_get_expr(d.adbin, d.adrelid), col_description(a.attrelid, a.attnum)
      from pg_attribute a
      join pg_type t on t.oid = a.atttypid
      left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
     where a.attrelid = ('pulse.' || %s)::regclass and a.attnum > 0 and not a.attisdropped
     order by a.attnum"""
_FUNCTIONS = """
    select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
           obj_description(p.oid, 'pg_proc'),
           array(select r.name
                   from unnest(array['pulse_producer', 'pulse_dispatcher', 'pulse_operator'])
                          with ordinality as r (name, place)
                  where has_function_privilege(r.name, p.oid, 'execute')
                  order by r.place)
      from pg_proc p
     where p.pronamespace = 'pulse'::regnamespace
     order by p.proname"""
_RIGHTS = """
    select c.relname,
           array(select distinct lower(x.privilege_type)
                   from aclexplode(c.relacl) x where x.grantee = %s::regrole),
           array(select distinct lower(x.privilege_type)
                   from pg_attribute a, aclexplode(a.attacl) x where a.attrelid = c.oid and x.grantee = %s::regrole)
      from pg_class c
     where c.relnamespace = 'pulse'::regnamespace and c.relkind in ('r', 'v')
     order by c.relname"""
_INDEXES = """
    select c.relname, pg_get_indexdef(c.oid)
      from pg_class c
     where c.relnamespace = 'pulse'::regnamespace and c.relkind = 'i' and c.relname like 'outbox\\_%'
     order by c.relname"""
_DOMAINS = """
    select t.typname, format_type(t.typbasetype, t.typtypmod), pg_get_constraintdef(c.oid)
      from pg_type t
      join pg_constraint c on c.contypid = t.oid
     where t.typnamespace = 'pulse'::regnamespace
     order by t.typname"""
_TABLES = ["outbox", "event_handled", "pause", "dispatcher", "sweep", "migration"]
_VIEWS = ["topic_status", "dead_kind", "dead_letter", "blocked_key", "dispatcher_status"]


def rendered(conn: psycopg.Connection[Any]) -> str:
    """Everything after the page's own introduction."""
    functions = conn.execute(_FUNCTIONS.encode()).fetchall()
    parts = [
        _relations(conn, "r", "Tables", _TABLES, with_defaults=True),
        _domains(conn),
        _indexes(conn),
        _relations(conn, "v", "Views", _VIEWS, with_defaults=False),
        "## Functions\n\nEvery `p_now` is for tests: null, the default, is the database's clock.\n",
    ]
    titles = {
        "pulse_producer": "For producers",
        "pulse_dispatcher": "For dispatchers",
        "pulse_operator": "For operators",
    }
    for role, title in titles.items():
        mine = [row for row in functions if row[4][:1] == [role]]
        parts.append(f"### {title}\n\n" + "\n".join(_function(*row) for row in mine))
    owners = [row for row in functions if not row[4]]
    public = [row for row in owners if row[3]]
    parts.append("### For the owner\n\n" + "\n".join(_function(*row) for row in public))
    inside = [
        f"| `{name}({_flat(arguments)})` | `{_flat(result)}` |"
        for name, arguments, result, comment, _ in owners
        if not comment
    ]
    parts.append(
        "### Inside\n\nCalled by the functions above; nobody else may. Their comments are in `migrations/`.\n\n"
        "| function | returns |\n|---|---|\n" + "\n".join(inside) + "\n"
    )
    parts.append(_roles(conn, functions))
    return "\n".join(parts)


def _relations(
    conn: psycopg.Connection[Any], kind: str, title: str, order: list[str], *, with_defaults: bool
) -> str:
    text = f"## {title}\n"
    for name, comment in conn.execute(_RELATIONS.encode(), (kind, order)).fetchall():
        text += f"\n### `pulse.{name}`\n\n{comment}\n\n"
        text += (
            "| column | type | default | meaning |\n|---|---|---|---|\n"
            if with_defaults
            else "| column | type | meaning |\n|---|---|---|\n"
        )
        for column, type_name, not_null, identity, default, meaning in conn.execute(
            _COLUMNS.encode(), (name,)
        ).fetchall():
            cells = [
                f"`{column}`",
                _flat(type_name).replace("pulse.", ""),
            ]
            if with_defaults:
                shown = "identity" if identity else f"`{default}`" if default else "" if not_null else "null"
                cells.append(re.sub(r"::[\w.]+", "", shown))
            text += f"| {' | '.join([*cells, meaning or ''])} |\n"
    return text


def _domains(conn: psycopg.Connection[Any]) -> str:
    text = "### Domains\n\nWhat a column may hold by itself.\n\n| domain | over | rule |\n|---|---|---|\n"
    conn.execute("set timezone to 'UTC'")  # in which the rules' times are shown
    for name, base, rule in conn.execute(_DOMAINS.encode()).fetchall():
        rule = re.sub(r"::[\w.]+( with time zone)?", "", rule.removeprefix("CHECK "))
        text += f"| `{name}` | {_flat(base)} | `{rule}` |\n"
    return text


def _indexes(conn: psycopg.Connection[Any]) -> str:
    text = "### Indexes of `pulse.outbox`\n\n| index | on |\n|---|---|\n"
    for name, definition in conn.execute(_INDEXES.encode()).fetchall():
        unique = "unique: " if "UNIQUE" in definition else ""
        shown = re.sub(r"::[\w.]+(\[\])?", "", definition.partition(" USING btree ")[2])
        text += f"| `{name}` | {unique}`{shown}` |\n"
    return text


def _function(name: str, arguments: str, result: str, comment: str, roles: list[str]) -> str:
    arguments, result = _flat(arguments), _flat(result)
    listed = arguments.split(", ")
    signature = f"pulse.{name}({arguments})"
    if len(signature) > 100:
        signature = f"pulse.{name}(\n  " + ",\n  ".join(listed) + ")"
    returns = f"returns {result}"
    if len(returns) > 120:
        head, _, columns = returns.partition("TABLE(")
        returns = f"{head}TABLE(\n  " + _wrapped(columns.rstrip(")").split(", ")) + ")"
    may = ", ".join(f"`{role}`" for role in roles) or NOBODY
    return f"#### `{name}`\n\n{comment} May be called by: {may}.\n\n```text\n{signature}\n{returns}\n```\n"


def _wrapped(items: list[str]) -> str:
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) > 100:
            lines.append("")
        lines[-1] += f"{item}, "
    return "\n  ".join(line.rstrip() for line in lines).rstrip(",")


def _flat(text: str) -> str:
    """Without what PostgreSQL adds to its own answers."""
    return re.sub(
        r"(DEFAULT (?:'[^']*'|[^,:]+))::[\w ]+(\[\])?",
        r"\1",
        text.replace("timestamp with time zone", "timestamptz"),
    )


def _roles(conn: psycopg.Connection[Any], functions: list[tuple[Any, ...]]) -> str:
    text = (
        "## Roles\n\nNamed after the schema; none can log in. Grant them to logins. Functions run with their owner's "
        "rights, so nobody else needs any on the tables.\n\n| role | tables and views | functions |\n|---|---|---|\n"
    )
    for role in (f"pulse_{name}" for name in ROLES):
        rights = []
        for name, whole, columns in conn.execute(_RIGHTS.encode(), (role, role)).fetchall():
            granted = sorted(whole) + [f"{right} (some columns)" for right in sorted(columns)]
            if granted:
                rights.append((name, ", ".join(granted)))
        kinds: dict[str, list[str]] = {}
        for name, granted_text in rights:
            kinds.setdefault(granted_text, []).append(name)
        everything = len(rights) == len(_TABLES) + len(_VIEWS)
        tables = "; ".join(
            f"{right}: {'all' if everything else ', '.join(f'`{name}`' for name in names)}"
            for right, names in kinds.items()
        )
        callable_ = ", ".join(f"`{row[0]}`" for row in functions if role in row[4])
        text += f"| `{role}` | {tables} | {callable_} |\n"
    return text


def main() -> None:
    from pulse_outbox import embedded, schema

    with embedded.start() as server:
        schema.migrate(server.dsn)
        with psycopg.connect(server.dsn) as conn:
            introduction = PAGE.read_text().partition(BEGIN)[0]
            PAGE.write_text(introduction + BEGIN + "\n" + rendered(conn))


if __name__ == "__main__":
    main()
