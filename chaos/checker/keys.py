"""Rules about ordering keys."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from chaos.checker.lives import Life, Violation, claims_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chaos.evidence import Evidence


def check_keys(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """order: of one key one runs at a time, and a later event waits until the earlier one has ended."""
    keys: defaultdict[str, list[Life]] = defaultdict(list)
    for life in lives:
        if life.born.ordering_key is not None:
            keys[life.born.ordering_key].append(life)
    told = {act.request: act.told for act in evidence.acts if act.told is not None}
    for key, its in keys.items():
        yield from check_one_at_a_time(key, its)
        yield from check_order(key, its, told)


def check_one_at_a_time(key: str, its: list[Life]) -> Iterator[Violation]:
    held: list[tuple[int, int, str]] = []
    for life in its:
        held += [(claim.id, end, life.event) for claim, end in claims_of(life)]
    held.sort()
    for (_, end, first), (start, _, second) in pairwise(held):
        if start < end:
            yield Violation("order", second, f"ran at the same time as {first}, of the same key {key}")


class Hold(NamedTuple):
    """From which step to which an event kept later ones of its key waiting; seen by claims that began after *told*."""

    since: int
    until: int
    told: float
    life: Life


def check_order(key: str, its: list[Life], told: dict[str, float]) -> Iterator[Violation]:
    """Only of transactions that did not overlap: the earlier was acknowledged before the later was begun."""
    known = [life for life in its if life.wish is not None]
    holds = sorted((hold for life in known for hold in _holds(life, told)), key=lambda hold: hold.since)
    claims = [(step, life) for life in known for verb, _, step in life.changes if verb == "claim"]
    claims.sort(key=lambda claim: claim[0].id)
    # All that is unfinished at the moment of each claim; few at any time, since a key drains in order.
    position = 0
    unfinished: list[Hold] = []
    for claim, later in claims:
        while position < len(holds) and holds[position].since < claim.id:
            unfinished.append(holds[position])
            position += 1
        unfinished = [hold for hold in unfinished if hold.until > claim.id]
        for hold in unfinished:
            if hold.life is later or hold.told > claim.began or not _before(hold.life, later):
                continue
            yield Violation(
                "order",
                later.event,
                f"was claimed before {hold.life.event}, the earlier one of key {key}, had ended",
            )


def _before(earlier: Life, later: Life) -> bool:
    assert earlier.wish is not None
    assert later.wish is not None
    acked = earlier.wish.acked
    return acked is not None and acked < later.wish.intended and len(earlier.wish.events) == 1


def _holds(life: Life, told: dict[str, float]) -> Iterator[Hold]:
    since: int | None = life.born.id
    visible = -math.inf
    for verb, _, step in life.changes:
        waits = step.status in ("PENDING", "RETRYING", "RUNNING") or (
            step.status == "DEAD_LETTERED" and life.born.holds_key is True
        )
        if since is not None and not waits:
            yield Hold(since, step.id, visible, life)
            since = None
        elif since is None and waits and verb == "replay":
            since, visible = step.id, told.get(step.request or "", math.inf)
    if since is not None:
        yield Hold(since, 1 << 62, visible, life)
