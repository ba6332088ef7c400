"""What happens when an invoice is paid; the events come from a trigger."""

from pydantic import BaseModel

from pulse_outbox import Event, Outbox

outbox = Outbox()


class InvoicePaid(BaseModel):
    invoice_id: int
    cents: int


@outbox.handler("invoice.paid")
async def thank(event: Event[InvoicePaid]) -> None:
    print(f"thanks for {event.payload.cents} cents of invoice {event.payload.invoice_id}", flush=True)
