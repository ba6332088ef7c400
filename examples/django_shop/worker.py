"""What `pulse-outbox run worker:outbox` imports: Django has to be set up before the models are."""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shopsite.settings")
django.setup()

from orders.events import outbox  # noqa: E402  after the set-up

__all__ = ["outbox"]
