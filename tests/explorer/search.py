"""Breadth first, so that the first thing found to be wrong is reached by the shortest story."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from tests.explorer.database import Rules, Scenario, Transition
from tests.explorer.states import State, canonical
from tests.explorer.steps import Step, Steps, first_state, is_good_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found: nothing wrong, or the shortest story to what is."""

    scenario: Scenario
    states: int
    steps: int
    calls: set[Transition]  # that were made of the database
    seconds: float
    wrong: str = ""
    story: tuple[str, ...] = ()


def explore(scenario: Scenario, rules: Rules | None = None, *, most: int = 10_000_000) -> Found:
    """Every state that can be reached; and from each of them an end must be in reach."""
    started = time.monotonic()
    steps = Steps(scenario, rules or Rules())
    first = canonical(first_state(scenario))
    numbers = {first: 0}
    states = [first]
    came_from = [-1]
    before: list[list[int]] = [[]]  # from which states each can be reached
    good = deque([0] if is_good_end(first, scenario) else [])
    taken = 0
    calls: set[Transition] = set()

    def found(wrong: str = "", number: int = -1, last: Step | None = None) -> Found:
        story: tuple[str, ...] = ()
        if wrong:
            path = []
            while number >= 0:
                path.append(states[number])
                number = came_from[number]
            story = tell(steps, path[::-1], last)
        return Found(
            scenario=scenario,
            states=len(states),
            calls=calls,
            steps=taken,
            seconds=time.monotonic() - started,
            wrong=wrong,
            story=story,
        )

    number = 0
    while number < len(states):
        state = states[number]
        for step in steps.after(state):
            taken += 1
            if step.wrong:
                return found(step.wrong, number, step)
            calls.update(step.log)
            after = canonical(step.state)
            known = numbers.get(after)
            if known is None:
                known = numbers[after] = len(states)
                states.append(after)
                came_from.append(number)
                before.append([])
                if is_good_end(after, scenario):
                    good.append(known)
            before[known].append(number)
        number += 1
        if len(states) > most:
            raise RuntimeError(f"{scenario.name}: more than {most} states")

    hopeful = bytearray(len(states))
    for end in good:
        hopeful[end] = 1
    while good:
        for number in before[good.popleft()]:
            if not hopeful[number]:
                hopeful[number] = 1
                good.append(number)
    hopeless = hopeful.find(0)
    if hopeless >= 0:
        return found("from here on no good end can be reached", hopeless)
    return found()


def tell(steps: Steps, path: list[State], last: Step | None) -> tuple[str, ...]:
    """The story of a path, with workers that keep their names: walked once more, without making states canonical."""
    story = []
    state = path[0]
    for wanted in path[1:]:
        step = next(step for step in steps.after(state) if canonical(step.state) == wanted)
        story.append(sentence(step.words))
        state = step.state
    if last is not None:
        wanted = canonical(last.state)
        step = next(step for step in steps.after(state) if step.wrong and canonical(step.state) == wanted)
        story.append(sentence(step.words))
    return tuple(story)


def sentence(words: tuple[object, ...]) -> str:
    who, what, *how = words
    name = f"worker {'12'[who]}" if isinstance(who, int) else str(who)
    return f"{name} {what}" + "".join(f" ({word})" for word in how if word)
