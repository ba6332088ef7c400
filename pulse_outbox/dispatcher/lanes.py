"""Which lanes to claim from, how many from each, and where in each to start. Knows no database.

A lane is claimed from where the last claim ended, so that rows which vacuum could not remove yet are not walked over
again. What appears behind that position (a late commit, a row whose lock was given back) is found when the lanes are
listed anew: at least once a second under load, and before every sleep. A listing does walk over such rows: where that
takes long, it is made rarely, and what is new is claimed without one, from the lanes that are known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from pulse_outbox.claims import Claim, Claimed
    from pulse_outbox.store import Listing


GUESSED_LANES = 3
"""Up to so many lanes it is quicker to ask them all than to have the claim list what there is …"""
KNOWN_LANES = 200
"""… unless listing takes long: then of those that had work lately, so many."""
LOOK_BACK = timedelta(seconds=1)
"""How far before the last claimed row a guess begins: most transactions are shorter."""
LONG_LOOK_BACK = timedelta(seconds=10)
"""How far to find what longer ones committed. That walks over all that has died since then: …"""
LONG_LOOK_INTERVAL = 1.0
"""… so only this often, in seconds."""
ASKED_TOPICS = 2
"""How many topics one claim asks, for each event that it may take: somebody else may be faster here and there."""


class LaneKey(NamedTuple):
    """What makes a lane."""

    topic: str
    generation: int
    lapses: int
    priority: int


_lane_of = attrgetter(*LaneKey._fields)  # a plain tuple: as a key it is the same
_ordering_key_of, _budget_of = attrgetter("ordering_key"), attrgetter("max_attempts")


@dataclass(slots=True)
class _Place:
    next_run_at: datetime
    seq: int
    due_at: float
    """On this process's monotonic clock."""
    short: bool = False
    """The last claim found less than it asked for: not worth asking again before the next listing."""


class Turn:
    """Whose turn it is to be first: with fewer places than topics everyone gets one in time.

    Kept by name, since those that have work are others every time.
    """

    def __init__(self) -> None:
        self._last = ""

    def order(self, topics: Iterable[str], behind: ClaimPlan | None = None) -> list[str]:
        """These topics, from the one on whose turn it is, or will be *behind* a claim that gets all it asks for."""
        names = sorted(topics)
        last = _served(behind.turns, behind.in_full()) if behind and behind.turns else self._last
        first = bisect_right(names, last)
        return names[first:] + names[:first]

    def took(self, quotas: Mapping[str, int], taken: Mapping[str, int]) -> None:
        """Goes on behind the last one that was served."""
        self._last = _served(quotas, taken)


def _served(quotas: Mapping[str, int], taken: Mapping[str, int]) -> str:
    """The last topic that got all that it was to get: the claim was full before the next one had."""
    full = (topic for topic in reversed(list(quotas)) if taken.get(topic, 0) >= quotas[topic])
    return next(full, next(iter(quotas)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPlan:
    """One claim call: the lanes in order, and the quota of each topic, which its lanes share."""

    limit: int
    lanes: list[dict[str, Any]] | None
    """None: whatever there is."""
    keys: list[LaneKey]
    quotas: dict[str, int]
    known: frozenset[LaneKey] = frozenset()
    """Those of the keys that are asked from where they were last seen, not from where they stand."""
    turns: dict[str, int] = field(default_factory=dict)
    """The quotas of those whose turns it asks for, in their order."""
    looks_far_at: float | None = None
    """When it was made, if it asks for what long transactions have committed."""
    plain: bool = False
    """There is one lane, and what was claimed there last had neither ordering keys nor budgets of one."""

    def in_full(self) -> dict[str, int]:
        """What it takes of each topic where there is enough of all."""
        left, taken = self.limit, {}
        for topic, quota in self.quotas.items():
            taken[topic] = min(quota, left)
            left -= taken[topic]
        return taken


class Lanes:
    """The lanes that had work when they were last listed."""

    def __init__(self) -> None:
        self._places: dict[LaneKey, _Place] = {}
        self._recent: list[LaneKey] = []
        self._known: dict[LaneKey, datetime] = {}
        """Up to when a lane was looked at; the lane that was claimed from last is the last one."""
        self._peculiar: set[LaneKey] = set()
        """Those that had ordering keys or budgets of one when they were last claimed from."""
        self._looked_far_at = 0.0
        self._waiting_for_slot: set[LaneKey] = set()
        """Where the last claim left a budget of one behind."""
        self._turn = Turn()

    def refresh(self, listing: Listing, now: float) -> None:
        """Starts again from a fresh listing."""
        self._places = {
            LaneKey(lane.topic, lane.generation, lane.lapses, lane.priority): _Place(
                lane.next_run_at, lane.seq, now + lane.due_in
            )
            for lane in listing.lanes
        }
        self._known = {key: max(looked_at, listing.looked_at) for key, looked_at in self._known.items()}
        self._waiting_for_slot &= {key for key, place in self._places.items() if place.due_at <= now}

    def next_due(self) -> float | None:
        """When the first lane is due, on the monotonic clock; None when there is no work at all."""
        return min((place.due_at for place in self._places.values()), default=None)

    def due_after(self, now: float) -> list[float]:
        """When lanes become due that are not yet, on the monotonic clock."""
        return [place.due_at for place in self._places.values() if place.due_at > now]

    def suspects(self, now: float) -> list[LaneKey]:
        """Due lanes of events whose lease has lapsed."""
        return [key for key, place in self._places.items() if key.lapses and place.due_at <= now]

    def wait_for_slot(self, room: Callable[[str], int]) -> bool:
        """Whether a budget of one waits for nothing but a free slot. *room* as for a plan."""
        return any(room(key.topic) > 0 for key in self._waiting_for_slot)

    def plan(
        self,
        limit: int,
        room: Callable[[str], int],
        now: float,
        *,
        also_known: bool = False,
        behind: ClaimPlan | None = None,
    ) -> ClaimPlan | None:
        """A claim of up to *limit* events, the same share for every topic; None when no lane is worth asking.

        *room* says how many more of a topic its handler could run. Where one is worth asking, those that are *also
        known* are asked before it, whatever the last listing and the claims since then showed of them. *behind*: the
        claim that is sent before this one and not answered yet.
        """
        places = {
            key: place
            for key, place in self._places.items()
            if not key.lapses and not place.short and place.due_at <= now and room(key.topic) > 0
        }
        if not places or limit < 1:
            return None
        topics = self._turn.order({key.topic for key in places}, behind)
        share = -(-limit // len(topics))
        quotas = turns = {topic: min(share, room(topic)) for topic in topics[: limit * ASKED_TOPICS]}
        known: set[LaneKey] = set()
        looks_far_at = self._looks_far_at(now) if also_known else None
        if also_known:
            look_back = LOOK_BACK if looks_far_at is None else LONG_LOOK_BACK
            for key, looked_at in self._known.items():
                if key in places or room(key.topic) < 1:
                    continue
                place = self._places.get(key)
                if place is None or not place.short:  # not listed, or with something for later only
                    place = _Place(looked_at - look_back, 0, due_at=0.0)
                    known.add(key)
                places[key] = place
            # Mostly they have nothing, which must not cost the others a part of their share.
            listed = set(topics)
            new = [topic for topic in dict.fromkeys(key.topic for key in places) if topic not in listed]
            share = -(-limit // (len(topics) + len(new)))
            quotas = {topic: min(share, room(topic)) for topic in new} | quotas
        by_topic: dict[str, list[LaneKey]] = {topic: [] for topic in quotas}
        for key in places:
            if key.topic in by_topic:
                by_topic[key.topic].append(key)
        keys = [
            key
            for topic in quotas
            for key in sorted(by_topic[topic], key=lambda key: (-key.priority, places[key].next_run_at))
        ]
        lanes = [
            self._asked(key, quotas[key.topic], places[key].next_run_at, places[key].seq) for key in keys
        ]
        return ClaimPlan(
            limit=limit,
            lanes=lanes,
            keys=keys,
            quotas=quotas,
            known=frozenset(known),
            turns=turns,
            looks_far_at=looks_far_at,
            plain=self._are_plain(keys),
        )

    def guess(self, limit: int, now: float, *, anywhere: bool = True) -> ClaimPlan | None:
        """A claim without a listing: from the lanes of the last events or, where they were many, from all there are.

        Unless it may be *anywhere*, None where they were many.
        """
        if not 0 < len(self._recent) <= GUESSED_LANES:
            return ClaimPlan(limit=limit, lanes=None, keys=[], quotas={}) if anywhere else None
        return self._guess_from(self._recent, limit, {key.topic: limit for key in self._recent}, now)

    def knows(self, topic: str) -> bool:
        """Whether the topic had work lately."""
        return any(key.topic == topic for key in self._known)

    def latest_topics(self, number: int) -> list[str]:
        """So many topics that had work lately, the latest first."""
        return list(dict.fromkeys(key.topic for key in reversed(self._known)))[:number]

    def guess_at(self, topic: str, limit: int, now: float) -> ClaimPlan | None:
        """A claim without a listing from the lanes of one topic that had work lately; None where they are many."""
        keys = [key for key in self._known if key.topic == topic]
        return self._guess_from(keys, limit, {topic: limit}, now) if 0 < len(keys) <= GUESSED_LANES else None

    def guess_again(self, limit: int, room: Callable[[str], int], now: float) -> ClaimPlan | None:
        """A claim from all lanes that had work lately, the same share for every topic; None when there are none.

        *room* as for a plan.
        """
        # Least lately claimed from first, as the turn goes.
        topics = list(dict.fromkeys(key.topic for key in reversed(self._known)))[::-1]
        share = -(-limit // max(1, len(topics)))
        quotas = {topic: min(share, places) for topic in topics if (places := room(topic)) > 0}
        keys = [key for topic in quotas for key in self._known if key.topic == topic]
        return self._guess_from(keys, limit, quotas, now) if keys and limit > 0 else None

    def at_limit(self, room: Callable[[str], int]) -> bool:
        """Whether a lane is known that no guess asks at present."""
        return any(room(key.topic) < 1 for key in self._known)

    def _looks_far_at(self, now: float) -> float | None:
        return now if now >= self._looked_far_at + LONG_LOOK_INTERVAL else None

    def _guess_from(
        self, keys: Sequence[LaneKey], limit: int, quotas: dict[str, int], now: float
    ) -> ClaimPlan:
        looks_far_at = self._looks_far_at(now)
        look_back = LOOK_BACK if looks_far_at is None else LONG_LOOK_BACK
        order = {topic: number for number, topic in enumerate(quotas)}
        lanes = [
            self._asked(key, quotas[key.topic], self._known[key] - look_back, 0)
            for key in sorted(keys, key=lambda key: (order[key.topic], -key.priority, self._known[key]))
        ]
        return ClaimPlan(
            limit=limit,
            lanes=lanes,
            keys=[],
            quotas=quotas,
            looks_far_at=looks_far_at,
            plain=self._are_plain(keys),
        )

    def _are_plain(self, keys: Sequence[LaneKey]) -> bool:
        return len(keys) == 1 and keys[0] not in self._peculiar

    def note(self, plan: ClaimPlan, claims: Claimed) -> None:
        """Moves the lanes on after a claim (whose rows come in order)."""
        if plan.looks_far_at is not None:
            self._looked_far_at = max(self._looked_far_at, plan.looks_far_at)
        lanes: list[LaneKey]
        served: Mapping[str, int]
        if len(plan.keys) == 1:
            [only] = plan.keys  # of which all of them are
            lanes = [only] * len(claims)
            last_of = {only: claims[-1]} if claims else {}
            served = {only.topic: len(claims)} if claims else {}
        else:
            lanes = [_lane_of(claim) for claim in claims]  # type: ignore[misc]  # equal, and hashed alike
            last_of = dict(zip(lanes, claims, strict=True))
            served = Counter(claim.topic for claim in claims)
        # Where those that were asked before them took it all, it is still their turn.
        if plan.turns and (len(claims) < plan.limit or served.keys() & plan.turns.keys()):
            self._turn.took(plan.turns, served)
        if claims:
            self._recent = [LaneKey(*key) for key in last_of]
            if any(map(_ordering_key_of, claims)) or 1 in map(_budget_of, claims):
                self._peculiar.update(self._recent)
            else:
                self._peculiar.difference_update(self._recent)
            for lane in self._recent:
                self._known.pop(lane, None)
                self._known[lane] = last_of[lane].next_run_at
            while len(self._known) > KNOWN_LANES:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._peculiar.discard(oldest)
        if self._waiting_for_slot:
            # Where only others came, none of them waits any more; where some came, there may be more.
            once = {lane for lane, claim in zip(lanes, claims, strict=True) if claim.max_attempts == 1}
            self._waiting_for_slot -= last_of.keys() - once
        for key, last in last_of.items():
            if place := self._places.get(key):
                place.next_run_at, place.seq, place.short = last.next_run_at, last.seq + 1, False
        if not plan.keys:
            self._note_guess(plan, last_of, served)
        elif len(claims) < plan.limit:
            left = dict(plan.quotas)
            taken = Counter(lanes)
            for key in plan.keys:
                left[key.topic] -= taken[key]
                if left[key.topic] > 0 and key not in plan.known and (place := self._places.get(key)):
                    place.short = True
                    self._waiting_for_slot.discard(key)
        for behind in claims.left_behind:
            key = LaneKey(behind.topic, behind.generation, behind.lapses, behind.priority)
            self._places[key] = _Place(behind.next_run_at, behind.seq, due_at=0.0)
            self._waiting_for_slot.add(key)
            self._peculiar.add(key)

    def _note_guess(
        self, plan: ClaimPlan, last_of: Mapping[LaneKey, Claim], taken: Mapping[str, int]
    ) -> None:
        """Where a guess got all that it asked for, there is more, right after it."""
        full = sum(taken.values()) >= plan.limit
        for key, last in last_of.items():
            if full or taken[last.topic] >= plan.quotas.get(last.topic, plan.limit):
                self._places[LaneKey(*key)] = _Place(last.next_run_at, last.seq + 1, due_at=0.0)

    @staticmethod
    def _asked(key: LaneKey, quota: int, next_run_at: datetime, seq: int) -> dict[str, Any]:
        return {**key._asdict(), "quota": quota, "next_run_at": next_run_at.isoformat(), "seq": seq}
