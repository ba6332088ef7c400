"""Rules about operators: what they were told is what happened, and what happened is what they asked for."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from chaos.checker.lives import Change, Life, Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chaos.evidence import Act, Evidence


def check_acts(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """replay: what an operator was told is what happened, once, however often he asks, and is in the history."""
    done: defaultdict[str, list[str]] = defaultdict(list)
    for life in lives:
        changed = 0
        for verb, _, step in life.changes:
            if verb not in ("replay", "discard"):
                continue
            changed += 1
            if step.request is not None:
                done[step.request].append(life.event)
        if (last := life.last).status is not None and last.history != changed:
            yield Violation(
                "replay", life.event, f"{changed} replays and discards, {last.history} in its history"
            )
    for act in evidence.acts:
        events = done.get(act.request, [])
        if len(events) != len(set(events)):
            yield Violation("replay", events[0], f"one request changed it more than once ({act.verb})")
        if "topic" not in (act.asked or {}) and (others := set(events) - set(act.events)):
            yield Violation("replay", min(others), f"was changed by a {act.verb} of other events")
        if act.result == "done" and not events:
            yield Violation("replay", act.events[0], f"{act.verb} was acknowledged, and did not happen")
        if act.result in ("refused", "failed") and events:
            yield Violation("replay", events[0], f"{act.verb} {act.result}, and happened")
        if act.refused_again:
            yield Violation("replay", act.events[0], f"{act.verb} was done, and refused when it was repeated")
        if act.result is not None and act.result.endswith(" done"):
            told = int(act.result.split()[0])
            if told != len(events):
                yield Violation("replay", "", f"{act.verb} said {told}, and changed {len(events)}")
        if act.asked is not None and len(events) > act.asked.get("limit", len(events)) * act.calls:
            yield Violation(
                "asked", events[0], f"{act.verb} of no more than {act.asked['limit']}: {len(events)}"
            )


def check_asked(evidence: Evidence, lives: Iterable[Life]) -> Iterator[Violation]:
    """asked: what is replayed or discarded was asked for, is of the kind and gets the generation that was named."""
    acts = {act.request: act for act in evidence.acts}
    for life in lives:
        for change in life.changes:
            if change.verb not in ("replay", "discard"):
                continue
            act = acts.get(change.step.request or "")
            if act is None or not act.verb.startswith(change.verb):
                yield Violation(
                    "asked", life.event, f"{change.verb} by {change.step.who}: nobody asked for it"
                )
            elif wrong := _unlike(life, change, act):
                yield Violation("asked", life.event, f"{act.verb}: {wrong}, and was asked for {act.asked}")


def _unlike(life: Life, change: Change, act: Act) -> str:
    """In what the change differs from what was asked for."""
    asked = act.asked or {}
    _, before, step = change
    if asked.get("generation", step.generation) not in (None, step.generation):
        return f"it got generation {step.generation}"
    if asked.get("generation", 0) is None and step.generation != before.generation:
        return f"it got generation {step.generation}, and had {before.generation}"
    kind = life.topic, (before.failure or {}).get("error_class", "")
    if "topic" in asked and kind != (asked["topic"], asked["error_class"]):
        return f"it was of kind {kind}"
    return ""
