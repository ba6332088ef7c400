"""Imports orders and tells others about them: rows and events are there together, or none of them."""

import os
import sys
from datetime import timedelta

import psycopg
from pydantic import BaseModel

from pulse_outbox import Event, NewEvent, Outbox

outbox = Outbox()


class OrderImported(BaseModel):
    order_id: int


@outbox.handler("order.imported", completed="delete")  # a million of these need not be kept
def confirm(event: Event[OrderImported]) -> None:
    print(f"order {event.payload.order_id} is confirmed", flush=True)


@outbox.handler("import.finished")
def report(event: Event[dict[str, int]]) -> None:
    print(f"{event.payload['orders']} orders were imported", flush=True)


@outbox.handler("order.reminder")
def remind(event: Event[OrderImported]) -> None:
    print(f"order {event.payload.order_id} is still open", flush=True)


def import_orders(conn: psycopg.Connection, number: int) -> None:
    with conn.transaction():
        conn.execute("create table if not exists imported (id integer primary key)")
        conn.cursor().executemany("insert into imported values (%s)", [(order,) for order in range(number)])
        outbox.enqueue_many(
            conn, (NewEvent("order.imported", OrderImported(order_id=order)) for order in range(number))
        )
        outbox.enqueue(conn, "order.reminder", OrderImported(order_id=0), delay=timedelta(days=7))
        outbox.enqueue(
            conn, "import.finished", {"orders": number}, priority=9, idempotency_key="import:2030-01"
        )


if __name__ == "__main__":
    with psycopg.connect(os.environ["PULSE_OUTBOX_DSN"]) as connection:
        import_orders(connection, int(sys.argv[1]))
