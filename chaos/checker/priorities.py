"""The rule about priorities: what waits with a higher one is claimed first."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from chaos.checker.lives import Life, Violation, is_locked_at
from chaos.topics import TOPICS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from chaos.evidence import Evidence, Step

LONG_WAIT = 2.0
"""Seconds after which a dispatcher under load has listed the priorities that there are, and listed them again."""
ENOUGH_CLAIMS = 10
"""So many claims can't mostly have been planned before their process stood still for a while."""


class Wait(NamedTuple):
    """Between two steps an event could be claimed, and was known to everybody."""

    entered: int
    left: int
    since: float
    priority: int
    claim: Step | None
    """What ended it, unless somebody discarded it."""


def check_priorities(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """priority: of one topic and generation, what has waited for long is claimed before what has a lower priority.

    Only claims count that had the choice between an older event and a more important one: whoever ignores priorities
    takes the older one nearly always.
    """
    is_locked = is_locked_at(evidence)
    lanes: defaultdict[tuple[str, int], list[Wait]] = defaultdict(list)
    for life in lives:
        for generation, wait in _waits(life):
            lanes[life.topic, generation].append(wait)
    right = wrong = 0
    for waits in lanes.values():
        for claim, taken, left in _choices(waits):
            if is_locked(claim.at):
                continue
            if max(wait.priority for wait in left) > min(wait.priority for wait in taken):
                wrong += 1
            elif any(
                one.priority > other.priority and one.since > other.since for one in taken for other in left
            ):
                right += 1
    if wrong >= ENOUGH_CLAIMS and wrong > right:
        yield Violation("priority", "", f"{wrong} of {wrong + right} claims passed over a higher priority")


def _waits(life: Life) -> Iterator[tuple[int, Wait]]:
    """Not those that wait for more than their turn: for their key, for a free slot, or for a child process."""
    acked = life.wish.acked if life.wish else None
    once = 1 in (life.born.budget, TOPICS[life.topic].max_attempts)
    if life.born.priority is None or life.born.ordering_key is not None or acked is None or once:
        return
    for verb, before, step in life.changes:
        if before.status in ("PENDING", "RETRYING") and before.lapses == 0:
            since = max(before.at, before.next_run_at or before.at, acked)
            claim = step if verb == "claim" else None
            yield before.generation, Wait(before.id, step.id, since, life.born.priority, claim)


def _choices(waits: list[Wait]) -> Iterator[tuple[Step, list[Wait], Collection[Wait]]]:
    """Each claim of this lane, what it took, and what had waited for long and was left."""
    taken: defaultdict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        if wait.claim is not None:
            taken[wait.claim.transaction].append(wait)
    last = {max(wait.left for wait in its) for its in taken.values()}
    waiting: dict[int, Wait] = {}
    moments = [(wait.entered, wait) for wait in waits] + [(wait.left, wait) for wait in waits]
    for moment, wait in sorted(moments, key=lambda moment: moment[0]):
        if moment == wait.entered:
            waiting[wait.entered] = wait
            continue
        del waiting[wait.entered]
        if wait.claim is not None and moment in last:
            since = wait.claim.began - LONG_WAIT
            if left := [other for other in waiting.values() if other.since < since]:
                yield wait.claim, taken[wait.claim.transaction], left
