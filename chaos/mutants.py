"""Mutants: faults put into the product on purpose. The checker must find each of them.

A mutant is any number of replacements in the SQL functions of the migrated database (`changes`, applied by the rig
after `migrate`) and of patches in Python (`patch`, applied in every dispatcher and in the children of dispatchers).
`python3 dev.py chaos --mutant NAME` runs with one of them and must end with a violation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault, and which rules of the checker are expected to notice it."""

    why: str
    """What a user would see of it."""
    noticed_by: tuple[str, ...]
    """Names of rules; one of them must be among the violations."""
    changes: tuple[tuple[str, str, str], ...] = ()
    """Function, what it says, what it says now."""
    before: str = ""
    """SQL that is executed before the changes."""
    patch: Callable[[], None] | None = None
    """Called in every process that runs handlers, before anything else."""
    mix: str = "all"
    """The faults under which it shows soonest, as --mix takes them."""


MUTANTS: dict[str, Mutant] = {
    "no fence": Mutant(
        why="a worker whose lease was reaped stores its result over that of its successor",
        noticed_by=("fence",),
        changes=(
            ("lock_claimed", "o.claim_token = c.token", "true"),
            ("answers", "when o.claim_token is distinct from c.token then 'lost'", ""),
        ),
    ),
}


def patch(name: str) -> None:
    """Applies the Python half of a mutant to this process; nothing when there is none."""
    if name and (patched := MUTANTS[name].patch) is not None:
        patched()


def change_database(conn: psycopg.Connection[object], name: str, schema: str = "pulse") -> None:
    """Applies the SQL half: the functions are read from the catalogue and created again with other words."""
    mutant = MUTANTS[name]
    if mutant.before:
        conn.execute(mutant.before.encode())
    for function, old, new in mutant.changes:
        row = conn.execute(
            "select pg_get_functiondef(p.oid) from pg_proc p join pg_namespace n on n.oid = p.pronamespace"
            " where n.nspname = %s and p.proname = %s",
            (schema, function),
        ).fetchone()
        assert isinstance(row, tuple), f"there is no function {function}"
        text = str(row[0])
        assert old in text, f"{function} does not say: {old}"
        conn.execute(text.replace(old, new).encode())
