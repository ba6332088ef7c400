"""The careful replay of many dead letters: one of each kind first, the others at a bounded rate, and a halt
as soon as the error that killed them comes back.

It can be interrupted at any moment: every step is one committed call, and what it has not come to stays dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID, uuid4

from pulse_outbox.errors import EventNotFound, TransitionRefused
from pulse_outbox.operations import DeadLetter, Kind, Operations, Outcome, RowLocked

LOOK = 0.2
"""Seconds between two looks at what has become of the replayed."""
BATCH = 500
CANARY_CANDIDATES = 3
LOCKED_ROUNDS = 5
MOST_OTHER_DEATHS = 10
"""Deaths of one kind by another error than before, until it is stopped."""
LEAST_RETRYING = 3
MOST_RETRYING = 0.05
"""Events of one kind that retry after the same error as before, as a part of those replayed, until it is stopped."""

Fate = Literal["waiting", "replayed", "canary died", "canary undecided", "came back", "interrupted"]


@dataclass(slots=True, kw_only=True)
class KindReplay:
    """How far the replay of one kind has come."""

    kind: Kind
    letters: Sequence[DeadLetter]
    """Oldest first."""
    fate: Fate = "waiting"
    why: str = ""
    canary: UUID | None = None
    cleared: bool = False
    """Its canary has lived."""
    attempted: int = 0
    replayed: int = 0
    died_again: int = 0

    @property
    def left(self) -> int:
        """How many are as they were."""
        return len(self.letters) - self.replayed


@dataclass(slots=True, kw_only=True)
class Replay:
    """Replays these letters, kind by kind. *generation* None: each keeps its own."""

    operations: Operations
    letters: Sequence[DeadLetter]
    generation: int | None
    by: str
    rate: float = 100
    """Events per second, of all kinds together."""
    canary: bool = True
    patience: timedelta = timedelta(minutes=2)
    """How long a canary may take."""
    say: Callable[[str], None] = lambda line: None
    progress: Callable[[int, int], None] = lambda done, total: None
    sleep: Callable[[float], None] = time.sleep
    request: UUID = field(default_factory=uuid4)
    """Stands in the history of every event that this replays, and keeps it from replaying one twice."""
    kinds: list[KindReplay] = field(init=False)

    def __post_init__(self) -> None:
        by_kind: dict[Kind, list[DeadLetter]] = {}
        for letter in self.letters:
            by_kind.setdefault(letter.kind, []).append(letter)
        self.kinds = [KindReplay(kind=kind, letters=letters) for kind, letters in by_kind.items()]

    @property
    def replayed(self) -> int:
        return sum(kind.replayed for kind in self.kinds)

    def run(self) -> None:
        """Until every kind is replayed or stopped; `kinds` says what became of each, also after an exception."""
        started = self.operations.now()
        try:
            if self.canary:
                self._send_canaries()
            self._go_on(started)
            self._count_relapses(started)
        except BaseException:
            for kind in self.kinds:
                if kind.fate == "waiting":
                    kind.fate, kind.why = "interrupted", "not finished"
            raise

    # One of each kind

    def _send_canaries(self) -> None:
        for kind in self.kinds:
            for letter in kind.letters[:CANARY_CANDIDATES]:
                kind.attempted += 1
                if self._send(letter):
                    kind.replayed, kind.canary = 1, letter.event_id
                    self.say(f"canary of {named(kind.kind)}: {letter.event_id}")
                    break
            else:
                kind.fate, kind.why = (
                    "canary undecided",
                    "those that could be it are locked or no longer dead",
                )

        self.say(f"waiting for their outcome, up to {self.patience.total_seconds():.0f} s")

    def _look_at_canaries(self, *, late: bool) -> None:
        out = {
            kind.canary: kind
            for kind in self.kinds
            if kind.canary and kind.fate == "waiting" and not kind.cleared
        }
        if out:
            for event_id, outcome in self.operations.outcomes(list(out)).items():
                self._judge(out[event_id], outcome, late=late)

    def _send(self, letter: DeadLetter) -> bool:
        """One by itself, which waits a little where the others are passed over: alerting locks rows for a moment."""
        generation = letter.generation if self.generation is None else self.generation
        try:
            self.operations.replay(letter.event_id, generation=generation, by=self.by, request=self.request)
        except (TransitionRefused, EventNotFound, RowLocked):
            return False
        return True

    def _judge(self, kind: KindReplay, outcome: Outcome, *, late: bool) -> None:
        """What a canary's outcome means for its kind; *late*: it has had its time."""
        match outcome.status:
            case "COMPLETED" | None:
                kind.cleared = True
                self.say(f"canary of {named(kind.kind)} completed")
            case "DEAD_LETTERED":
                kind.fate, kind.died_again = "canary died", 1
                kind.why = f"it died again: {outcome.last_error or outcome.error_class}"
            case "DISCARDED":
                kind.fate, kind.why = "canary undecided", "somebody discarded it meanwhile"
            case _ if not late:
                return
            case "RETRYING":
                kind.fate = "canary undecided"
                budget = f" of {outcome.max_attempts}" if outcome.max_attempts else ""
                kind.why = (
                    f"still retrying after {outcome.attempts}{budget} attempts: "
                    f"{outcome.last_error or outcome.error_class or 'it asked for later'}"
                )
            case "RUNNING":
                kind.fate, kind.why = "canary undecided", "still running: wait longer with --wait"
            case _:
                kind.fate, kind.why = (
                    "canary undecided",
                    "nobody has started it: `pulse-outbox status` shows who serves what",
                )
        if kind.fate != "waiting":
            self.say(f"canary of {named(kind.kind)}: {kind.why}")

    # The others

    def _go_on(self, started: datetime) -> None:
        """Kinds go on as soon as their own canary has lived: a slow one holds up no other."""
        allowance = max(1.0, self.rate * LOOK)
        last = time.monotonic()
        give_up_at = last + self.patience.total_seconds()
        while True:
            self._look_at_canaries(late=last > give_up_at)
            going = [
                kind for kind in self.kinds if kind.fate == "waiting" and (kind.cleared or not self.canary)
            ]
            if going:
                allowance -= self._replay_some(going, allowance)
                members = [kind for kind in self.kinds if kind.cleared or not self.canary]
                self.progress(
                    sum(kind.replayed for kind in members), sum(len(kind.letters) for kind in members)
                )
                self._stop_what_came_back(going, started)
            if all(kind.fate != "waiting" for kind in self.kinds):
                return
            self.sleep(max(LOOK, (1 - allowance) / self.rate))
            now = time.monotonic()
            allowance = min(allowance + (now - last) * self.rate, max(1.0, self.rate))
            last = now

    def _replay_some(self, kinds: list[KindReplay], allowance: float) -> int:
        """The next of each kind, those first of which the fewest are done; how many that were."""
        used = 0
        share = max(1, min(BATCH, int(allowance / len(kinds))))
        for kind in sorted(kinds, key=lambda kind: kind.attempted):
            batch = kind.letters[kind.attempted : kind.attempted + min(share, int(allowance) - used)]
            kind.attempted += len(batch)
            kind.replayed += self._replay(batch)
            used += len(batch)
            if kind.attempted == len(kind.letters):
                self._finish(kind)
        return used

    def _finish(self, kind: KindReplay) -> None:
        """Again for those that somebody had locked, a few times: alerting locks rows for a moment."""
        ids = [letter.event_id for letter in kind.letters]
        for _ in range(LOCKED_ROUNDS):
            if not kind.left:
                break
            locked = set(self.operations.still_dead(ids, request=self.request))
            kind.replayed += self._replay([letter for letter in kind.letters if letter.event_id in locked])
            if kind.left:
                self.sleep(LOOK)
        kind.fate = "replayed"
        if kind.left:
            kind.why = f"{kind.left} were locked, or changed by somebody else meanwhile"

    def _stop_what_came_back(self, kinds: list[KindReplay], started: datetime) -> None:
        found = self.operations.relapses([kind.kind for kind in kinds], request=self.request, since=started)
        for kind in kinds:
            same = found.same_dead.get(kind.kind, 0)
            other = found.other_dead.get(kind.kind, 0)
            retrying = found.same_retrying.get(kind.kind, 0)
            kind.died_again = same + other
            if same:
                why = f"the same error killed {same} again"
            elif other > MOST_OTHER_DEATHS:
                why = f"another error killed {other}"
            elif retrying > max(LEAST_RETRYING, MOST_RETRYING * kind.replayed):
                why = f"{retrying} retry after the same error"
            else:
                continue
            kind.fate, kind.why = "came back", why
            self.say(f"{named(kind.kind)} is stopped: {why}")

    def _count_relapses(self, started: datetime) -> None:
        found = self.operations.relapses(
            [kind.kind for kind in self.kinds], request=self.request, since=started
        )
        for kind in self.kinds:
            kind.died_again = found.same_dead.get(kind.kind, 0) + found.other_dead.get(kind.kind, 0)

    def _replay(self, letters: Sequence[DeadLetter]) -> int:
        ids = [letter.event_id for letter in letters]
        return sum(
            self.operations.replay_many(
                ids[first : first + BATCH], generation=self.generation, by=self.by, request=self.request
            )
            for first in range(0, len(ids), BATCH)
        )


def named(kind: Kind) -> str:
    """A kind in words."""
    return f"{kind.topic} / {kind.error_class or 'no error class'}"
