"""Housekeeping that every dispatcher does beside its work: the watchdog, stuck ordering keys, retention."""

from __future__ import annotations

import asyncio
import itertools
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pulse_outbox.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pulse_outbox.dispatcher.settings import DispatcherSettings
    from pulse_outbox.store import Reaped, Store

REAP_LIMIT = 1000
FULL_SWEEP_EVERY = 6
HEAL_INTERVAL = 1.0
HEAL_LIMIT = 500
PRUNE_PAGES = 500
PRUNE_PAUSE = 0.2
PRUNE_ROUND_MAX = 3600.0


async def watchdog(
    store: Store,
    settings: DispatcherSettings,
    handlers: Mapping[str, str],
    reaped: Callable[[Sequence[Reaped]], None],
) -> None:
    """Sweeps for ever: leases that have run out are failures that nobody lived to report.

    *handlers*: their names by topic. *reaped* is told of each such failure.
    """
    interval = settings.seconds("watchdog")
    for number in itertools.count():
        started = time.monotonic()
        full = number % FULL_SWEEP_EVERY == 0
        while True:
            found = await store.reap(
                limit=REAP_LIMIT, lease=settings.lease_time, full=full, handlers=handlers
            )
            reaped(found)
            if len(found) < REAP_LIMIT:
                break
            full = True  # there are more, and they stand where this sweep began
        await asyncio.sleep(max(0.05, interval - (time.monotonic() - started)))


async def heal(store: Store) -> None:
    """Goes round the ordering keys for ever, a few hundred a second."""
    after: str | None = None
    while True:
        await asyncio.sleep(HEAL_INTERVAL)
        after, healed = await store.heal(after, limit=HEAL_LIMIT)
        if healed:
            log.info("outbox.healed", keys=healed)


async def prune(store: Store, retention: timedelta) -> None:
    """Walks along the table for ever and deletes what ended long ago, a few pages at a time."""
    page: int | None = 0
    pruned_in_round = 0
    while True:
        await asyncio.sleep(PRUNE_PAUSE)
        pruned, page = await store.prune(retention=retention, page=page or 0, pages=PRUNE_PAGES)
        pruned_in_round += pruned
        if page is None:
            if pruned_in_round:
                log.info("outbox.pruned", events=pruned_in_round, before=_ago(retention))
            pruned_in_round = 0
            await asyncio.sleep(min(PRUNE_ROUND_MAX, max(1.0, retention.total_seconds() / 100)))


def _ago(duration: timedelta) -> str:
    return (datetime.now(UTC) - duration).isoformat(timespec="seconds")
