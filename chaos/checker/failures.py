"""Rules about what is kept of a failure: the words on the row, and the history when its cycle has ended."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from chaos.checker.lives import TOLERANCE, Life, Violation
from chaos.topics import TOPICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chaos.evidence import Act, Evidence, Step

FAILED = ("fail", "lapse", "reap")


def check_failures(life: Life) -> Iterator[Violation]:
    """failure: a row tells what its handler raised, or how its worker was lost, and when that happened first."""
    for verb, before, step in life.changes:
        if verb not in FAILED or step.error is None:
            continue
        if wrong := _wrong_words(life, verb, before, step):
            told = f"{(step.failure or {}).get('error_class')}: {step.error[:200]}"
            yield Violation("failure", life.event, f"lease {before.lease_seq}: {wrong}, and it says {told}")
        if before.first_failed_at is None:
            in_time = _is_of(step, step.first_failed_at)
        else:
            in_time = step.first_failed_at == before.first_failed_at
        if not in_time or (step.status == "DEAD_LETTERED" and not _is_of(step, step.completed_at)):
            yield Violation("failure", life.event, f"lease {before.lease_seq}: {verb} wrote another time")


def _wrong_words(life: Life, verb: str, before: Step, step: Step) -> str:
    """What really happened, when the row says something else."""
    failure = step.failure or {}
    error = step.error or ""
    if not error or not failure.get("error_class"):
        return f"{verb} without a reason"
    handler = f"chaos.app.{re.sub('[ .]', '_', life.topic)}"
    if failure.get("handler", "" if verb == "fail" else handler) != handler:
        return f"{handler} had it"
    if verb == "reap":
        return "" if error == "worker lease expired" else "its lease ran out"
    if verb == "lapse":
        return "" if re.search(r"signal \d|exit code \d|process killed: .", error) else "its process died"
    run = life.runs.get(before.lease_seq)
    if run is None or run.raised is None or run.ended is None or run.ended > step.at + TOLERANCE:
        return ""
    # A timeout or a failed commit may come after whatever the handler has raised.
    if failure["error_class"] != run.raised:
        return "" if TOPICS[life.topic].timed else f"its handler raised {run.raised}"
    return "" if run.said in error else f"its handler said {run.said}"


def check_histories(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """history: an entry tells of the very cycle that it ended, by whom and when, and is never changed."""
    acts = {act.request: act for act in evidence.acts}
    for life in lives:
        entries = []
        for verb, before, step in life.changes:
            if verb not in ("replay", "discard") or step.cycle is None:
                continue
            entries.append(step.cycle)
            if wrong := _wrong_entry(verb, before, step, step.cycle, acts.get(step.request or "")):
                yield Violation("history", life.event, f"{verb}: another {', '.join(wrong)} in {step.cycle}")
        if entries and evidence.histories.get(life.event, entries) != entries:
            yield Violation("history", life.event, "an entry has changed since it was written")


def _wrong_entry(verb: str, before: Step, step: Step, entry: dict[str, Any], act: Act | None) -> list[str]:
    wanted = {
        "attempts": before.attempts,
        "last_error": before.error or None,
        "last_failure": before.failure or None,
        "first_failed_at": before.first_failed_at,
        "dead_lettered_at": before.completed_at if before.status == "DEAD_LETTERED" else None,
        "generation": before.generation,
    }
    if act is not None and act.asked is not None:
        wanted[f"{verb}ed_by"] = act.asked["by"]
        wanted["reason"] = act.asked.get("reason")
    wrong = [name for name, value in wanted.items() if entry.get(name) != value]
    return wrong if _is_of(step, entry.get(f"{verb}ed_at")) else [*wrong, f"{verb}ed_at"]


def _is_of(step: Step, moment: float | None) -> bool:
    """Between the beginning of its transaction and the writing of the row."""
    return moment is not None and step.began - TOLERANCE < moment < step.at + TOLERANCE
