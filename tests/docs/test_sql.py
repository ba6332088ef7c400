"""docs/reference/sql.md is what the catalog says, comments included."""

from __future__ import annotations

import re

from pulse_outbox.errors import ERROR_OF_SQLSTATE
from tests.docs import sql_reference
from tests.docs.pages import text_of

PAGE = text_of("docs/reference/sql.md")


def test_the_page_is_what_the_catalog_says(conn):
    """After a change of the schema: python3 dev.py run python -m tests.docs.sql_reference"""
    introduction, _, on_page = PAGE.partition(sql_reference.BEGIN)

    assert introduction
    assert on_page.strip() == sql_reference.rendered(conn).strip()


def test_everything_has_a_comment(conn):
    """Whoever looks with \\d+ and \\df+ finds the sentences of the page; inside functions have theirs in the file."""
    bare = conn.execute(
        """select c.relname || coalesce('.' || a.attname, '')
             from pg_class c
             left join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
            where c.relnamespace = 'pulse'::regnamespace and c.relkind in ('r', 'v')
              and (obj_description(c.oid, 'pg_class') is null or col_description(c.oid, a.attnum) is null)
           union all
           select p.proname::text
             from pg_proc p, pg_roles r
            where p.pronamespace = 'pulse'::regnamespace
              and r.rolname in ('pulse_producer', 'pulse_dispatcher', 'pulse_operator')
              and has_function_privilege(r.rolname, p.oid, 'execute')
              and obj_description(p.oid, 'pg_proc') is null"""
    ).fetchall()

    assert bare == [], "add `comment on …` in migrations/"


def test_errors_and_statuses_are_on_the_page(conn):
    errors = dict(re.findall(r"^\| `(PO\d+)` \| .* \| `(\w+)` \|$", PAGE, re.MULTILINE))
    statuses = conn.execute("select enum_range(null::pulse.status)::text[]").fetchone()[0]
    [line] = re.findall(r"## Statuses\n\n(.*?): \[", PAGE)

    assert errors == {state: kind.__name__ for state, kind in ERROR_OF_SQLSTATE.items()}
    assert re.findall(r"`(\w+)`", line) == statuses
