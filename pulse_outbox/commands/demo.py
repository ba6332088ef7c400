"""`pulse-outbox demo`: the schema, and one event written in the application's own transaction."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pulse_outbox import embedded, schema
from pulse_outbox.commands.database import add_database_arguments, dsn_of, schema_of

if TYPE_CHECKING:
    import argparse

TABLES = "select string_agg(relname, ', ' order by relname) from pg_class where relkind = 'r' and relnamespace = {}"
FUNCTIONS = "select string_agg(distinct proname, ', ') from pg_proc where pronamespace = {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Starts a PostgreSQL of its own, migrates it, writes an event and shows it. Nothing stays behind.
With --dsn or PULSE_OUTBOX_DSN it uses that database instead, where the schema stays and the event does not."""
    add_database_arguments(parser)


def run(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        if args.dsn or os.environ.get("PULSE_OUTBOX_DSN"):
            dsn = dsn_of(args)
        else:
            print("starting a PostgreSQL for this demo", flush=True)
            dsn = stack.enter_context(embedded.start()).dsn
        show(dsn, schema_of(args))
    return 0


def show(dsn: str, name: str) -> None:
    schema.migrate(dsn, schema=name, report=print)
    namespace = sql.SQL("{}::regnamespace").format(sql.Literal(f'"{name}"'))
    with psycopg.connect(dsn, row_factory=dict_row, prepare_threshold=None) as conn:
        print(f"PostgreSQL {conn.info.parameter_status('server_version')}, schema {name}")
        for title, text in (("tables", TABLES), ("functions", FUNCTIONS)):
            with conn.cursor() as cursor:
                found = cursor.execute(sql.SQL(text).format(namespace)).fetchone() or {}
            print(f"  {title}: {found['string_agg']}")
        conn.execute("create temporary table orders (id integer primary key, paid boolean)")
        conn.commit()

        print("\nOne transaction changes an order and writes the event; both are there or neither is:")
        with conn.transaction(force_rollback=True):
            conn.execute("insert into orders values (7, true)")
            conn.execute(
                sql.SQL(
                    "select {}.outbox_enqueue('order.paid', '{{\"order_id\": 7}}', p_ordering_key => 'order:7')"
                ).format(sql.Identifier(name))
            )
            rows = conn.execute(
                sql.SQL("select * from {}.outbox order by seq desc limit 1").format(sql.Identifier(name))
            )
            for column, value in (rows.fetchone() or {}).items():
                if value is not None:
                    print(f"  {column:22} {value}")
    print(
        "\nThe dispatcher that runs it is the next thing to be built. Read migrations/ for the whole picture."
    )
