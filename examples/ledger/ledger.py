"""Double entry: both sides of a booking, the next event and the completion of this one are one transaction."""

import psycopg
from pydantic import BaseModel, PositiveInt

from pulse_outbox import Event, Outbox

outbox = Outbox()


class Booking(BaseModel):
    debit: str
    credit: str
    cents: PositiveInt


@outbox.handler("ledger.booking", transactional=True)
def book(event: Event[Booking]) -> None:
    conn: psycopg.Connection = event.connection
    booking = event.payload
    for account, cents in ((booking.debit, -booking.cents), (booking.credit, booking.cents)):
        # Do not commit: the dispatcher does, with the event's completion.
        conn.execute("insert into entry (account, cents) values (%s, %s)", (account, cents))
    outbox.enqueue(conn, "ledger.booked", booking)


@outbox.handler("ledger.booked")
async def tell(event: Event[Booking]) -> None:
    print(f"{event.payload.cents} cents from {event.payload.debit} to {event.payload.credit}", flush=True)
