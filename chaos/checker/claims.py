"""Rules about who may claim what, when, and beside whom it runs."""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import TYPE_CHECKING

from chaos.checker.lives import TOLERANCE, Life, Violation
from chaos.topics import BACKOFF, BACKOFF_MAX, CONCURRENCY, SNOOZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chaos.evidence import Evidence, Run

ENOUGH = 30
"""So many delays that are drawn by lot can't all be next to nothing."""
DEATH_ALONE_WAITS = 1.0
"""Seconds at least, after a job has killed its worker with nothing beside it."""


def check_due(lives: Iterable[Life]) -> Iterator[Violation]:
    """early: nothing is claimed before it is due."""
    for life in lives:
        for verb, before, step in life.changes:
            early = (before.next_run_at or step.at) - step.at
            if verb == "claim" and early > TOLERANCE:
                yield Violation("early", life.event, f"was claimed {early:.2f} s before it was due")


def check_held(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """lease: claimed or kept for one lease, and no longer."""
    for life in lives:
        for verb, _, step in life.changes:
            held = (step.lease_until or step.at) - step.at
            if verb not in ("claim", "heartbeat") or not evidence.lease or step.lease_until is None:
                continue
            if (
                held > evidence.lease + TOLERANCE
                or step.lease_until - step.began < evidence.lease - TOLERANCE
            ):
                yield Violation("lease", life.event, f"{verb} holds it for {held:.1f} s")


def check_backoff(lives: Iterable[Life]) -> Iterator[Violation]:
    """backoff: what is to be tried again waits as long as its policy, its handler or its deaths say."""
    drawn = []
    for life in lives:
        for verb, before, step in life.changes:
            if step.status not in ("PENDING", "RETRYING") or step.next_run_at is None:
                continue
            waits = step.next_run_at - step.at
            in_company = verb in ("lapse", "reap") and not before.alone
            if (verb in ("release", "replay") or in_company) and waits > TOLERANCE:
                yield Violation("backoff", life.event, f"waits {waits:.1f} s after a {verb}")
            if verb == "fail":
                drawn.append(waits)
                if waits > min(BACKOFF_MAX, BACKOFF * 2 ** (before.attempts - 1)) + TOLERANCE:
                    yield Violation(
                        "backoff", life.event, f"waits {waits:.1f} s after failure {before.attempts}"
                    )
            # From the beginning of its transaction: on a busy machine that is long before the row is written.
            at_most = step.next_run_at - step.began
            if verb == "snooze" and not waits - TOLERANCE < SNOOZE < at_most + TOLERANCE:
                yield Violation("backoff", life.event, f"waits {waits:.2f} s, and asked for {SNOOZE}")
            if verb in ("lapse", "reap") and before.alone and at_most < DEATH_ALONE_WAITS - TOLERANCE:
                yield Violation("backoff", life.event, f"waits {waits:.2f} s after a death alone")
    if len(drawn) >= ENOUGH and max(drawn) < TOLERANCE:
        yield Violation("backoff", "", f"{len(drawn)} failures, and none waited before the next attempt")


def check_generations(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """generation: nothing is claimed by code of another generation."""
    served = {
        fault.values["who"]: {0, *fault.values["generations"]}
        for fault in evidence.faults
        if fault.kind == "dispatcher" and fault.values.get("generations")
    }
    for life in lives:
        for verb, before, step in life.changes:
            if verb == "claim" and before.generation not in served.get(step.who, {before.generation}):
                yield Violation(
                    "generation", life.event, f"{step.who} claimed it, which is for {before.generation}"
                )


def check_topics(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """topic: a dispatcher claims only what its patterns ask for."""
    served = {
        fault.values["who"]: fault.values["topics"]
        for fault in evidence.faults
        if fault.kind == "dispatcher" and fault.values.get("topics")
    }
    for life in lives:
        for verb, _, step in life.changes:
            patterns = served.get(step.who, ("*",))
            if verb == "claim" and not any(fnmatchcase(life.topic, pattern) for pattern in patterns):
                yield Violation(
                    "topic", life.event, f"{step.who} claimed {life.topic}, and serves {patterns}"
                )


def check_company(lives: Iterable[Life]) -> Iterator[Violation]:
    """company: a suspect shares its process with suspects only, and what runs alone with nobody."""
    unsuspected: dict[tuple[str, int], str] = {}  # the kernel gives the same pid to others in time
    suspects: list[Run] = []
    alone: list[Run] = []
    for life in lives:
        for verb, before, step in life.changes:
            if verb != "claim" or (run := life.runs.get(step.lease_seq)) is None:
                continue
            if before.lapses == 0:
                unsuspected[run.worker, run.pid] = life.event
            else:
                suspects.append(run)
            if step.alone:
                alone.append(run)
    for run in suspects:
        if innocent := unsuspected.get((run.worker, run.pid)):
            yield Violation("company", run.event, f"lapsed, and ran in the process of {innocent}")
    for run in alone:
        for other in suspects:
            same = (other.worker, other.pid) == (run.worker, run.pid)
            if other is not run and same and _overlap(run, other):
                yield Violation("company", run.event, f"should run alone, and ran beside {other.event}")


def check_concurrency(evidence: Evidence) -> Iterator[Violation]:
    """concurrency: no process runs more at once than it was told to."""
    of_process: defaultdict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for run in evidence.runs:
        if run.ended is not None:
            of_process[run.worker, run.pid] += [(run.started, 1), (run.ended, -1)]
    for (worker, _), changes in of_process.items():
        if (most := max(accumulate(change for _, change in sorted(changes)))) > CONCURRENCY:
            yield Violation("concurrency", "", f"{worker} ran {most} at once")


def check_handed(lives: Iterable[Life]) -> Iterator[Violation]:
    """handed: a handler is given its own event's payload, and is told which attempt this is."""
    for life in lives:
        claims = {step.lease_seq: step for verb, _, step in life.changes if verb == "claim"}
        for lease_seq, run in life.runs.items():
            if (claim := claims.get(lease_seq)) is None:
                continue
            if run.attempt is not None and (run.attempt, run.max_attempts) != (
                claim.attempts,
                claim.max_attempts,
            ):
                told = f"{run.attempt} of {run.max_attempts}"
                yield Violation("handed", life.event, f"was told {told}, lease {lease_seq}")
            if run.mark is not None and run.mark != life.born.mark:
                yield Violation("handed", life.event, "was given the payload of another event")


def _overlap(one: Run, other: Run) -> bool:
    # When a process was killed, nobody knows how long its jobs still ran.
    return one.started < (other.ended or other.started) and other.started < (one.ended or one.started)
