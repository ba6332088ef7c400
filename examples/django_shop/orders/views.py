from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from orders.events import OrderPaid, outbox
from orders.models import Order


@csrf_exempt
@require_POST
def orders(request: HttpRequest) -> JsonResponse:
    with transaction.atomic():
        order = Order.objects.create(email=request.POST["email"])
        paid = OrderPaid(order_id=order.pk)
        outbox.enqueue(connection, "order.paid", paid, ordering_key=f"order:{order.pk}")
        order.full_clean()  # an address that is none: ValidationError, and neither order nor event
    return JsonResponse(paid.model_dump(), status=201)
