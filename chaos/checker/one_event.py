"""Rules about one event, whatever others do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.checker.failures import FAILED
from chaos.checker.lives import TOLERANCE, Change, Life, Violation
from chaos.topics import RETENTION, TOPICS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chaos.evidence import Step

RUN_ALONE_FROM = 2
"""Lapses after which a job has nothing beside it."""
ENDED = frozenset({"COMPLETED", "DEAD_LETTERED", "DISCARDED"})


def check_steps(life: Life) -> Iterator[Violation]:
    """state machine: every change is one that the specification has, and changes what it should and nothing else."""
    if (life.born.status, life.born.attempts, life.born.lease_seq, life.born.token) != (
        "PENDING",
        0,
        0,
        None,
    ):
        yield Violation("state machine", life.event, f"was born as {life.born}")
    claimed_from = None
    for verb, before, step in life.changes:
        if verb == "claim":
            claimed_from = before.status
        elif verb == "release" and step.status != claimed_from:
            yield Violation("state machine", life.event, f"{claimed_from} came back as {step.status}")
        if step.old_status != before.status:
            yield Violation("state machine", life.event, f"a step is missing between {before} and {step}")
        if not verb:
            yield Violation("state machine", life.event, f"{before.status} became {step.status}: {step}")
        elif verb == "delete":
            if step.old_status not in ("COMPLETED", "DISCARDED") and not _is_deleted(life, step):
                yield Violation("state machine", life.event, f"was deleted while {step.old_status}")
            elif step.old_status != "RUNNING" and (age := step.at - before.began) < RETENTION - TOLERANCE:
                yield Violation("state machine", life.event, f"was pruned after {age:.1f} s")
        elif verb == "complete" and TOPICS[life.topic].deleted and _has_own_key(life):
            yield Violation("state machine", life.event, "was kept, though rows of its topic are deleted")
        elif wrong := [
            f"{name}: {getattr(before, name)} became {getattr(step, name)}"
            for name, wanted in _wanted(verb, before, step).items()
            if getattr(step, name) != wanted
        ]:
            yield Violation("state machine", life.event, f"{verb} changed {', '.join(wrong)}")
        if verb == "claim" and (step.token is None or step.locked_by != step.who):
            yield Violation("state machine", life.event, f"claimed by {step.who}, for {step.locked_by}")


def _is_deleted(life: Life, step: Step) -> bool:
    return step.old_status == "RUNNING" and TOPICS[life.topic].deleted and _has_own_key(life)


def _has_own_key(life: Life) -> bool:
    """The producer gave none. One that it gave is kept with its row, so that it stays unique."""
    return life.born.idempotency_key in (None, life.event)


def _wanted(verb: str, before: Step, step: Step) -> dict[str, object]:
    """The values that a step must have left; what may be anything is not named."""
    same = {
        name: getattr(before, name)
        for name in ("token", "attempts", "max_attempts", "lapses", "snoozes", "lease_seq", "alone")
    } | {"history": before.history, "generation": before.generation}
    if verb not in FAILED:
        same |= {name: getattr(before, name) for name in ("error", "failure", "first_failed_at")}
    match verb:
        case "claim":
            same["attempts"] = before.attempts + 1
            same["lease_seq"] = before.lease_seq + 1
            for free in ("token", "max_attempts"):
                del same[free]
            if before.lapses >= RUN_ALONE_FROM:
                same["alone"] = True
            else:
                del same["alone"]
        case "release":
            same["attempts"] = before.attempts - 1
        case "snooze":
            same["attempts"] = before.attempts - 1
            same["snoozes"] = before.snoozes + 1
        case "lapse" | "reap":
            # What lapsed in company gets its attempt back, unless it was promised not to start twice.
            same["attempts"] = before.attempts - (not before.alone and before.max_attempts != 1)
            same["lapses"] = before.lapses + 1
            if verb == "reap":
                same["token"] = None
        case "replay":
            same |= {
                "token": None,
                "attempts": 0,
                "max_attempts": None,
                "lapses": 0,
                "snoozes": 0,
                "alone": False,
                "error": before.error and "",
                "failure": before.failure and {},
                "first_failed_at": None,
            }
            same["history"] = before.history + 1
            del same["generation"]
        case "discard":
            same["history"] = before.history + 1
    return same


def check_fence(life: Life) -> Iterator[Violation]:
    """fence: what happens to a claimed row is done by whoever claimed it, or after its lease has run out."""
    for verb, before, step in life.changes:
        if before.status != "RUNNING":
            continue
        if verb == "reap":
            if before.lease_until is not None and step.at < before.lease_until - TOLERANCE:
                yield Violation("fence", life.event, f"lease {before.lease_seq} was reaped before it ran out")
        elif step.who != before.locked_by:
            yield Violation(
                "fence",
                life.event,
                f"{verb} by {step.who}, while {before.locked_by} held lease {before.lease_seq}",
            )


def check_results(life: Life) -> Iterator[Violation]:
    """result: what is stored for a claim is what came of the handler's run under that very claim."""
    for verb, before, step in life.changes:
        if before.status != "RUNNING" or not (wrong := _wrong_result(life, verb, before, step)):
            continue
        run = life.runs.get(before.lease_seq)
        known = f"its run ended {run.outcome}" if run else "its handler never ran"
        yield Violation("result", life.event, f"lease {before.lease_seq}: {wrong}, but {known}")


def _wrong_result(life: Life, verb: str, before: Step, step: Step) -> str:
    run = life.runs.get(before.lease_seq)
    if run is not None and run.ended is not None and run.ended > step.at + TOLERANCE:
        run = run._replace(outcome=None)  # it had not ended by then
    outcome = run.outcome if run else None
    topic = TOPICS[life.topic]
    if verb == "complete" or (verb == "delete" and step.old_status == "RUNNING"):
        return "" if outcome == "ok" else "completed"
    if verb == "snooze":
        return "" if outcome == "later" else "snoozed"
    if verb == "release":
        # Started and given back: only when it was cancelled by a shutdown, and never under a budget of one.
        cancelled = outcome == "transient" and before.max_attempts != 1
        return "" if run is None or cancelled else "released"
    if verb == "fail" and outcome == "terminal" and step.status != "DEAD_LETTERED":
        return "goes on"
    if verb == "fail" and step.verdict == "terminal":
        bad = run is None and life.wish is not None and life.wish.bad
        return "" if outcome == "terminal" or bad else "failed as terminal"
    if verb == "fail":
        # A timeout fails a run that goes on or ends well; a transaction may fail after its handler has ended.
        excused = run is not None and (topic.timed or topic.transactional)
        return "" if outcome == "transient" or excused else "failed as transient"
    return ""


def check_timeout(life: Life) -> Iterator[Violation]:
    """timeout: a handler that would run on long past its timeout does not end well."""
    for lease_seq, run in life.runs.items():
        if TOPICS[life.topic].endless and run.outcome == "ok":
            yield Violation("timeout", life.event, f"lease {lease_seq} was allowed to run to its end")


def check_budget(life: Life) -> Iterator[Violation]:
    """budget: dead only when terminal or when all attempts were spent; a budget of one is never started twice."""
    allowed = life.born.budget or TOPICS[life.topic].max_attempts
    for cycle in life.cycles():
        starts = 0
        for verb, before, step in cycle:
            if verb == "claim":
                if step.max_attempts != allowed:
                    yield Violation(
                        "budget", life.event, f"claimed with a budget of {step.max_attempts}, not {allowed}"
                    )
                run = life.runs.get(step.lease_seq)
                starts += run is not None and run.outcome != "later"
            if step.status == "DEAD_LETTERED" and verb in ("fail", "lapse", "reap"):
                terminal = verb == "fail" and step.verdict == "terminal"
                if not terminal and step.attempts < allowed:
                    yield Violation(
                        "budget",
                        life.event,
                        f"dead after {step.attempts} of {allowed} attempts ({before.lease_seq})",
                    )
                if not terminal and (spent := _really_spent(life, cycle, step)) < allowed:
                    yield Violation(
                        "budget", life.event, f"dead, and only {spent} of {allowed} attempts were made"
                    )
            if step.status == "RETRYING" and verb == "fail" and step.attempts >= allowed:
                yield Violation("budget", life.event, f"goes on after {step.attempts} of {allowed} attempts")
        if allowed == 1 and starts > 1:
            yield Violation("budget", life.event, f"was started {starts} times with a budget of one")


def _really_spent(life: Life, cycle: list[Change], death: Step) -> int:
    """Attempts for which there is evidence outside the row: a run that failed, or a claim that died alone."""
    spent = 0
    for verb, before, step in cycle:
        if step.id > death.id:
            break
        failed = verb == "fail" and before.lease_seq in life.runs
        died = verb in ("lapse", "reap") and (before.alone or before.max_attempts == 1)
        spent += failed or died
    return spent


def check_end(life: Life) -> Iterator[Violation]:
    """lost: whatever was enqueued has ended."""
    last = life.last
    if last.status is not None and last.status not in ENDED:
        yield Violation("lost", life.event, f"is still {last.status} at the end: {last}")
