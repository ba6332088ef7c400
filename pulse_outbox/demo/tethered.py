"""`python -m pulse_outbox.demo.tethered ARGS…` is `pulse-outbox ARGS…` that ends with whoever holds its standard input.

The demo may be killed at any moment; the dispatcher that it started must not go on without it.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading


def end_with_input() -> None:
    """Waits for the end of standard input, which nobody ever writes to, and ends the process."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    runpy.run_module("pulse_outbox.cli", run_name="__main__", alter_sys=True)
