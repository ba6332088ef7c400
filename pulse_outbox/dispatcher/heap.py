"""What a dispatcher that has the process for itself does to the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Takes all that exists now out of the collector's rounds, until the end.

    Modules and models are a hundred thousand objects that stay. Under load the collector would go through them several
    times a second, for a tenth of the dispatcher's time. An application that has done so itself keeps what it has.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
