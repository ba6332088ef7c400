"""The life of an event: the steps of its row in order, each with its verb, and the runs of its handler."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chaos.evidence import Evidence, Run, Step, Wish

TOLERANCE = 0.05
"""Seconds by which two processes may disagree about the order of things that they did at the same time."""
LOCKS_ROWS = ("lock-rows", "stall-backend")
"""Faults under which rows may be locked, so that everybody passes them over."""
INTRUDER_STARTS = 5.0
"""Seconds that somebody who is to lock rows may take until he does."""


class Violation(NamedTuple):
    """A rule that was broken, by which event, and what shows it."""

    rule: str
    event: str
    text: str


class Change(NamedTuple):
    """A step with the one before it and its verb ('' when the state machine knows no such step)."""

    verb: str
    before: Step
    step: Step


class Life(NamedTuple):
    """All that is known of one event."""

    event: str
    topic: str
    born: Step
    changes: list[Change]
    runs: dict[int, Run]
    wish: Wish | None

    @property
    def last(self) -> Step:
        return self.changes[-1].step if self.changes else self.born

    def cycles(self) -> Iterator[list[Change]]:
        """From birth or replay to the next replay."""
        cycle: list[Change] = []
        for change in self.changes:
            if change.verb == "replay":
                yield cycle
                cycle = []
            cycle.append(change)
        yield cycle


def lives_of(evidence: Evidence) -> tuple[dict[str, Life], list[Violation]]:
    steps: defaultdict[str, list[Step]] = defaultdict(list)
    for step in sorted(evidence.steps, key=lambda step: step.id):
        steps[step.event_id].append(step)
    wishes = {wish.mark: wish for wish in evidence.wishes}
    runs: defaultdict[str, dict[int, Run]] = defaultdict(dict)
    found = []
    for run in evidence.runs:
        if run.lease_seq in runs[run.event]:
            found.append(Violation("claim", run.event, f"lease {run.lease_seq} was run twice"))
        runs[run.event][run.lease_seq] = run
    found += [
        Violation("claim", event, "was run, and the outbox never had it")
        for event in runs.keys() - steps.keys()
    ]
    lives = {}
    for event, its in steps.items():
        if its[0].old_status is not None:
            found.append(Violation("state machine", event, "has no beginning"))
            continue
        changes = [Change(_verb(before, step), before, step) for before, step in pairwise(its)]
        lives[event] = Life(
            event, its[0].topic or "", its[0], changes, runs.get(event, {}), wishes.get(its[0].mark or "")
        )
    return lives, found


def _verb(before: Step, step: Step) -> str:
    """Which step of the state machine this was, by what it did to the row."""
    match (step.old_status, step.status):
        case (None, _):
            return ""
        case (_, None):
            return "delete"
        case ("PENDING" | "RETRYING", "RUNNING"):
            return "claim"
        case ("RUNNING", "RUNNING"):
            return "heartbeat"
        case ("RUNNING", "COMPLETED"):
            return "complete"
        case ("RUNNING", "RETRYING" | "DEAD_LETTERED") if step.lapses == before.lapses + 1:
            return "lapse" if step.token else "reap"
        case ("RUNNING", "RETRYING") if step.snoozes == before.snoozes + 1:
            return "snooze"
        case ("RUNNING", "PENDING" | "RETRYING") if step.attempts == before.attempts - 1:
            return "release"
        case ("RUNNING", "RETRYING" | "DEAD_LETTERED"):
            return "fail"
        case ("DEAD_LETTERED", "DEAD_LETTERED"):
            return "alert"
        case ("DEAD_LETTERED", "PENDING"):
            return "replay"
        case ("PENDING" | "RETRYING" | "DEAD_LETTERED", "DISCARDED"):
            return "discard"
        case _:
            return ""


def claims_of(life: Life) -> Iterator[tuple[Step, int]]:
    """Each claim, and the step that ended it."""
    claim: Step | None = None
    for verb, _, step in life.changes:
        if verb == "claim":
            claim = step
        elif claim is not None and step.status != "RUNNING":
            yield claim, step.id
            claim = None
    if claim is not None:
        yield claim, 1 << 62


def is_locked_at(evidence: Evidence) -> Callable[[float], bool]:
    """Whether somebody who takes no part may have had rows locked at a time."""
    locked = [
        (fault.at, fault.at + fault.values["seconds"] + INTRUDER_STARTS)
        for fault in evidence.faults
        if fault.kind == "fault" and fault.values["fault"] in LOCKS_ROWS
    ]
    return lambda at: any(begun < at < ended for begun, ended in locked)
