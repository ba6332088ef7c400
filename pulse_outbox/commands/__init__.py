"""One module for each command of `pulse-outbox`; `pulse_outbox.cli` says what such a module holds."""
