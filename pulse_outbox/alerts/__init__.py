"""Alerts: what has died is told to Sentry, to the application's hook or to the log, and then the debt is paid.

Read `paying` (the loop that pays), then `sentry` (what is sent, and what the answers mean) and `errands` (calls that
must keep nobody waiting).
"""

from pulse_outbox.alerts.paying import Alerts

__all__ = ["Alerts"]
