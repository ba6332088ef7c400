"""Rules about ordering keys."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from chaos.checker.lives import Change, Life, Violation, claims_of, is_locked_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chaos.evidence import Evidence, Turn

ENOUGH_TURNS = 5
"""So many can't nearly all have been missed because somebody else had locked the row just then."""
LONG_PARKED = 0.2
"""Seconds after which whoever ends a turn mostly sees who is parked behind him."""


def check_keys(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """order: of one key one runs at a time, and a later event waits until the earlier one has ended."""
    keys = _by_key(lives)
    told = {act.request: act.told for act in evidence.acts if act.told is not None}
    for key, its in keys.items():
        yield from check_one_at_a_time(key, its)
        yield from check_order(key, its, told)


def _by_key(lives: Iterable[Life]) -> dict[str, list[Life]]:
    keys: defaultdict[str, list[Life]] = defaultdict(list)
    for life in lives:
        if life.born.ordering_key is not None:
            keys[life.born.ordering_key].append(life)
    return keys


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


def check_turns(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """turn: whoever ends the turn of an event gives it to the next of its key, in the same transaction.

    A row that somebody else has locked is passed over and healed later: some may be missed, but not nearly all.
    """
    turns: defaultdict[str, list[Turn]] = defaultdict(list)
    for turn in evidence.turns:
        turns[turn.event_id].append(turn)
    is_locked = is_locked_at(evidence)
    given: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for its in _by_key(lives).values():
        for (verb, _, step), waits in _successions(its):
            parked = _parked(waits, turns[waits.event], step.id)
            if parked is None or parked > step.began - LONG_PARKED:
                continue
            if any(turn.transaction == step.transaction for turn in turns[waits.event]):
                given[verb] += 1
            elif not is_locked(step.at):
                missed[verb] += 1
    for verb, count in missed.items():
        if count >= ENOUGH_TURNS and count > 4 * given[verb]:
            yield Violation(
                "turn", "", f"{count} of {count + given[verb]} times a {verb} left the next of its key parked"
            )


def _successions(its: list[Life]) -> Iterator[tuple[Change, Life]]:
    """Each change that ended a turn of this key, and the first of those that waited then."""
    changes = {change.step.id: change for life in its for change in life.changes}
    moments = []
    for life in its:
        for hold in _holds(life, {}):
            moments += [(hold.since, hold), (hold.until, hold)]
    waiting: list[tuple[int, int, Hold]] = []
    for moment, hold in sorted(moments, key=lambda moment: moment[0]):
        if moment == hold.since:
            heapq.heappush(waiting, (hold.life.born.seq or 0, hold.since, hold))
            continue
        while waiting and waiting[0][2].until <= moment:
            heapq.heappop(waiting)
        if waiting and moment in changes:
            yield changes[moment], waiting[0][2].life


def _parked(life: Life, turns: list[Turn], before: int) -> float | None:
    """Since when it was parked at that step; None: it was not."""
    since = life.born.at if life.born.parked else None
    for turn in turns:
        if turn.id < before:
            since = turn.at if turn.parked else None
    return since
