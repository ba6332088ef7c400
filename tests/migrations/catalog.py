"""What a schema consists of, as PostgreSQL's catalogs describe it: two equal answers are two equal schemas."""

from __future__ import annotations

import re
from typing import Any

import psycopg

# Each lists one kind of object, as text; %(schema)s is the schema's name, %(quoted)s the same as an identifier.
QUERIES = {
    "schema": """
        select nspname, nspacl::text[], obj_description(oid, 'pg_namespace')
          from pg_namespace where nspname = %(schema)s""",
    "relations": """
        select relkind, relname, relpersistence, relrowsecurity, reloptions, relacl::text[],
               obj_description(oid, 'pg_class')
          from pg_class where relnamespace = %(quoted)s::text::regnamespace""",
    "columns": """
        select relname, attnum, attname, format_type(atttypid, atttypmod), attnotnull, attidentity, attgenerated,
               attstorage, attcompression, attstattarget, attacl::text[], pg_get_expr(adbin, adrelid),
               col_description(attrelid, attnum)
          from pg_attribute
          join pg_class on pg_class.oid = attrelid
          left join pg_attrdef on adrelid = attrelid and adnum = attnum
         where relnamespace = %(quoted)s::text::regnamespace and attnum > 0 and not attisdropped""",
    "constraints": """
        select conrelid::regclass, conname, pg_get_constraintdef(oid), convalidated,
               obj_description(oid, 'pg_constraint')
          from pg_constraint where connamespace = %(quoted)s::text::regnamespace""",
    "indexes": """
        select pg_get_indexdef(indexrelid), indisunique, indisvalid, obj_description(indexrelid, 'pg_class')
          from pg_index join pg_class on pg_class.oid = indrelid
         where relnamespace = %(quoted)s::text::regnamespace""",
    "sequences": """
        select seqrelid::regclass, seqtypid::regtype, seqstart, seqincrement, seqmin, seqmax, seqcache, seqcycle
          from pg_sequence join pg_class on pg_class.oid = seqrelid
         where relnamespace = %(quoted)s::text::regnamespace""",
    "views": """
        select relname, pg_get_viewdef(oid)
          from pg_class where relkind in ('v', 'm') and relnamespace = %(quoted)s::text::regnamespace""",
    "triggers": """
        select pg_get_triggerdef(pg_trigger.oid)
          from pg_trigger join pg_class on pg_class.oid = tgrelid
         where not tgisinternal and relnamespace = %(quoted)s::text::regnamespace""",
    "types": """
        select typname, typtype, format_type(typbasetype, typtypmod), typnotnull, typdefault,
               array(select enumlabel from pg_enum where enumtypid = pg_type.oid order by enumsortorder)
          from pg_type
         where typtype in ('d', 'e') and typnamespace = %(quoted)s::text::regnamespace""",
    "functions": """
        select oid::regprocedure, pg_get_functiondef(oid), proacl::text[], obj_description(oid, 'pg_proc')
          from pg_proc where prokind in ('f', 'p') and pronamespace = %(quoted)s::text::regnamespace""",
    "roles": """
        select rolname, rolsuper, rolinherit, rolcreaterole, rolcreatedb, rolcanlogin
          from pg_roles where rolname like %(schema)s || '\\_%%'""",
}


def fingerprint(dsn: str, schema: str) -> dict[str, list[str]]:
    """All objects of the schema with everything that can be said about them, apart from who owns them."""
    found: dict[str, list[str]] = {}
    with psycopg.connect(dsn, options="-c search_path=pg_catalog") as conn:
        owner = _owner(conn, schema)
        for kind, query in QUERIES.items():
            rows = conn.execute(query.encode(), {"schema": schema, "quoted": f'"{schema}"'})
            found[kind] = sorted(
                " | ".join(str(_without_owner(value, owner)) for value in row) for row in rows
            )
        rows = conn.execute(f'select version, name, oldest_code, checksum from "{schema}".migration'.encode())
        found["migrations"] = sorted(map(repr, rows))
    return found


def _owner(conn: psycopg.Connection[Any], schema: str) -> str:
    row = conn.execute(
        "select pg_get_userbyid(nspowner) from pg_namespace where nspname = %s", (schema,)
    ).fetchone()
    assert row is not None
    return str(row[0])


def _without_owner(value: Any, owner: str) -> Any:
    """Grants ("grantee=rights/grantor") in a fixed order, with OWNER for the owner's name."""
    if not isinstance(value, list):
        return value
    name = rf'(?:{re.escape(owner)}|"{re.escape(owner)}")'
    return sorted(re.sub(rf"^{name}(?==)|(?<=/){name}$", "OWNER", str(item)) for item in value)
