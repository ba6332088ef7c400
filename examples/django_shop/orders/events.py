"""The events and their handlers. Plain functions run in threads, so the ORM may be used as in a view."""

from django.db import connection, transaction
from django.db.models import F
from pydantic import BaseModel

from orders.models import Order
from pulse_outbox import Event, Outbox

outbox = Outbox()


class OrderPaid(BaseModel):
    order_id: int


@outbox.handler("order.paid")
def send_receipt(event: Event[OrderPaid]) -> None:
    with transaction.atomic():
        # The record and the update commit together: a second run finds the record.
        if outbox.first_time(connection, event):
            Order.objects.filter(pk=event.payload.order_id).update(receipts_sent=F("receipts_sent") + 1)
