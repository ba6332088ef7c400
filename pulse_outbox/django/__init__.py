"""A Django app that brings the outbox's schema with `manage.py migrate`: add "pulse_outbox.django" to INSTALLED_APPS.

The schema's name is that of the setting PULSE_OUTBOX_SCHEMA, else of the environment variable, else `pulse`. There is
no way back: unapplying would take the events with it, so it is refused with the commands that do so on purpose.
"""
