"""The app as Django registers it."""

from __future__ import annotations

from django.apps import AppConfig


class PulseOutboxConfig(AppConfig):  # type: ignore[misc]  # Django ships no types
    name = "pulse_outbox.django"
    label = "pulse_outbox"
    verbose_name = "pulse-outbox"
