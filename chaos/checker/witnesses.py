"""Rules that compare what the outbox did with what others remember: producers, Sentry, the tables."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from chaos.checker.lives import TOLERANCE, Life, Violation
from chaos.topics import TOPICS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chaos.evidence import Evidence, Wish


def check_wishes(evidence: Evidence, lives: dict[str, Life]) -> Iterator[Violation]:
    """lost, twice: an acknowledged enqueue is there, once; another one at most once; a rolled-back one never."""
    born: defaultdict[str, list[Life]] = defaultdict(list)
    for life in lives.values():
        born[life.born.mark or ""].append(life)
    for wish in evidence.wishes:
        its = sorted(born.get(wish.mark, []), key=lambda life: life.born.id)
        if wish.never and its:
            yield Violation("rolled back", its[0].event, "its transaction was rolled back, and it is there")
        for life in its:
            yield from _check_birth(wish, life)
        for event in wish.events:
            if event not in lives:
                yield Violation("lost", event, f"was acknowledged ({wish.topic}), and is not there")
        if wish.acked is not None and not its:
            yield Violation("lost", "", f"mark {wish.mark} was acknowledged, and no event has it")
        for first, second in pairwise(its):
            # A key is unique while its row exists: after it was pruned, the same key is a new event.
            if first.last.status is not None or first.last.id > second.born.id:
                yield Violation("twice", second.event, f"is the same as {first.event}")


def _check_birth(wish: Wish, life: Life) -> Iterator[Violation]:
    """enqueue: the row says what the producer said."""
    if wish.options is None:
        return
    born = life.born
    wanted = {
        "topic": wish.topic,
        "ordering_key": wish.key,
        "holds_key": wish.options.get("dead_key", "hold") == "hold",
        "budget": wish.options.get("max_attempts"),
        "generation": wish.options.get("generation", 0),
    }
    if born.priority is not None:  # or the rig was too old to write it down
        wanted["priority"] = wish.options.get("priority", 0)
    if wrong := [name for name, value in wanted.items() if getattr(born, name) != value]:
        yield Violation("enqueue", life.event, f"was written with another {', '.join(wrong)}")
    due = wish.intended + wish.options.get("delay", 0.0)
    for verb, _, step in life.changes:
        if verb == "claim" and step.at < due - TOLERANCE:
            yield Violation(
                "early", life.event, f"was claimed {due - step.at:.2f} s before its producer wanted"
            )


def check_rows(evidence: Evidence, lives: dict[str, Life]) -> Iterator[Violation]:
    """rows: the table at the end is what the steps lead to."""
    led_to = {event: life.last.status for event, life in lives.items() if life.last.status is not None}
    for event in sorted(led_to.keys() | evidence.rows.keys()):
        if led_to.get(event) != evidence.rows.get(event):
            yield Violation(
                "rows", event, f"steps lead to {led_to.get(event)}, the table has {evidence.rows.get(event)}"
            )


def check_effects(evidence: Evidence, lives: dict[str, Life]) -> Iterator[Violation]:
    """effect: once for each event that completed; never for one that did not. The application's data likewise."""
    counted: defaultdict[tuple[str, str], int] = defaultdict(int)
    for event, kind in evidence.effects:
        counted[kind, event] += 1
    for (kind, event), count in counted.items():
        if count > 1:
            yield Violation("effect", event, f"its effect ({kind}) happened {count} times")
        if event not in lives:
            yield Violation("effect", event, f"has an effect ({kind}), and the outbox never had it")
    for life in lives.values():
        if TOPICS[life.topic].transactional:
            completed = any(verb == "complete" for verb, _, _ in life.changes)
            if completed != (counted["transactional", life.event] > 0):
                yield Violation("effect", life.event, f"completed: {completed}, its effect says otherwise")
        elif life.topic == "effect":
            well = any(run.outcome == "ok" for run in life.runs.values())
            if well and not counted["first time", life.event]:
                yield Violation("effect", life.event, "ran to its end, and its effect is not there")
    for event in sorted(evidence.business - lives.keys()):
        yield Violation("business", event, "the application's data were committed without it")


def check_alerts(evidence: Evidence, lives: dict[str, Life]) -> Iterator[Violation]:
    """alert: each death is alerted, unless somebody dealt with it first, under one id that is known beforehand."""
    accepted = {alert.alert for alert in evidence.alerts if 200 <= alert.status < 300}
    stamped: dict[str, float] = {}
    stamped_on: defaultdict[str, set[str]] = defaultdict(set)
    for life in lives.values():
        owed = False
        alert_id: str | None = None
        for verb, _, step in life.changes:
            if step.status == "DEAD_LETTERED" and verb != "alert":
                owed, alert_id = True, None
                if step.alert_id is not None or step.alerted:
                    yield Violation("alert", life.event, "was born dead with an alert of an earlier death")
            elif verb == "alert":
                if alert_id is not None and step.alert_id != alert_id:
                    yield Violation("alert", life.event, f"its alert {alert_id} became {step.alert_id}")
                alert_id = step.alert_id
                if alert_id is not None:
                    stamped.setdefault(alert_id, step.at)
                    stamped_on[alert_id].add(life.event)
                if step.alerted and alert_id not in accepted:
                    yield Violation(
                        "alert", life.event, f"counts as alerted, and Sentry never had {alert_id}"
                    )
                owed = not step.alerted
            elif verb in ("replay", "discard", "delete"):
                owed = False
        if owed:
            yield Violation("alert", life.event, "is dead, and nobody was told")
    for alert in evidence.alerts:
        if alert.alert not in stamped:
            yield Violation("alert", alert.event, f"Sentry has the alert {alert.alert}, which no row has had")
        elif alert.event not in stamped_on[alert.alert]:
            yield Violation("alert", alert.event, f"is named by alert {alert.alert}, which others have")
        elif alert.at < stamped[alert.alert] - TOLERANCE:
            yield Violation("alert", alert.event, f"alert {alert.alert} was sent before it was on the row")
