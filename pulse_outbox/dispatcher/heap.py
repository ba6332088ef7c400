"""What a dispatcher that has the process for itself does to the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 5000
"""So many new objects before the collector looks at them: those of a batch of jobs, which end without its help. With
Python's own number, 700 or 2,000, it would look at each of them up to three times."""


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Spares the collector what stays, and what is gone before it is garbage; until the end.

    Modules and models are a hundred thousand objects that stay. Under load the collector would go through them several
    times a second. An application that has its own settings keeps them.
    """
    threshold, *older = gc.get_threshold()
    gc.set_threshold(max(threshold, YOUNG) if threshold else 0, *older)
    frozen_before = gc.get_freeze_count() > 0
    if not frozen_before:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(threshold, *older)
        if not frozen_before:
            gc.unfreeze()
