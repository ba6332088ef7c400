"""Rules about operators: what they asked for, under which request, and what they were told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chaos.evidence import Act, _acts
from tests.chaos.story import Story


def dead(**values: Any) -> Story:
    return Story().enqueue("e").die("e", **values).alert("e")


@pytest.mark.parametrize(("asked", "rules"), [(2, set()), (None, {"asked"}), (0, {"asked"})])
def test_a_replay_gives_the_generation_that_was_asked_for(asked: int | None, rules: set[str]):
    """None: each event keeps its own."""
    story = dead().replay("e", asked={"by": "ann", "generation": asked}, generation=2).work("e")

    assert story.rules() == rules


def test_nothing_is_replayed_that_nobody_asked_for():
    story = dead().replay("e").work("e")
    [act] = story.evidence.acts

    assert story.rules() == set()
    assert story.rules(acts=[]) == {"asked"}
    assert story.rules(acts=[act._replace(verb="discard")]) == {"asked"}


@pytest.mark.parametrize(
    ("topic", "error_class", "rules"),
    [("fast", "ValueError", set()), ("slow", "ValueError", {"asked"}), ("fast", "KeyError", {"asked"})],
)
def test_a_replay_by_kind_touches_no_other_kind(topic: str, error_class: str, rules: set[str]):
    story = dead(failure={"error_class": "ValueError"}).replay("e", failure={}).work("e")
    [act] = story.evidence.acts
    asked = {"by": "ann", "topic": topic, "error_class": error_class, "limit": 1}
    by_kind = act._replace(verb="replay_kind", events=(), result="1 done", asked=asked)

    assert story.rules(acts=[by_kind]) == rules


def test_no_more_than_the_limit():
    story = dead().enqueue("f").die("f").alert("f", "a2").replay("e").replay("f").work("e").work("f")
    [act, _] = story.evidence.acts
    of_both = act._replace(verb="replay_many", events=("e", "f"), result="2 done")

    assert story.rules(acts=[of_both._replace(asked={"by": "ann", "limit": 2})]) == set()
    assert story.rules(acts=[of_both._replace(asked={"by": "ann", "limit": 1})]) == {"asked"}
    assert story.rules(acts=[of_both._replace(asked={"by": "ann", "limit": 1}, calls=2)]) == set()


def test_a_repeated_request_changes_nothing_and_is_not_refused():
    story = dead().replay("e").work("e")
    [act] = story.evidence.acts
    assert story.rules(acts=[act._replace(calls=2)]) == set()
    assert story.rules(acts=[act._replace(calls=2, refused_again=True)]) == {"replay"}

    story = dead().replay("e").die("e").alert("e", "a2").replay("e").work("e")
    assert "replay" in story.rules(acts=[act._replace(calls=2)])


def acts(tmp_path: Path, verb: str, *lines: str | None) -> Act:
    """What is known of an act whose calls were answered so; None: nobody heard."""
    told: list[dict[str, Any]] = []
    for number, result in enumerate(lines):
        told.append({"what": "again" if number else "act", "verb": verb, "events": ["e"]})
        told += [{"what": "result", "result": result}] if result else []
    text = "".join(f"{json.dumps({'t': time, 'request': 'r', **line})}\n" for time, line in enumerate(told))
    (tmp_path / "operator-ann.jsonl").write_text(text)
    [act] = _acts(tmp_path)
    return act


@pytest.mark.parametrize(
    ("answers", "result", "told", "refused_again"),
    [
        (["done"], "done", 1, False),
        ([None], None, None, False),
        (["unknown", "done"], "done", 3, False),
        (["unknown", "refused"], "unknown", None, False),
        (["done", None], "done", 1, False),
        (["done", "refused"], "done", 1, True),
        (["refused", "done"], "done", 3, False),
        (["done", "failed"], "done", 1, False),
    ],
)
def test_answers_about_one_event(
    tmp_path: Path, answers: list[str | None], result: str | None, told: float | None, refused_again: bool
):
    act = acts(tmp_path, "replay", *answers)

    assert (act.result, act.told, act.refused_again, act.calls) == (result, told, refused_again, len(answers))


@pytest.mark.parametrize(
    ("answers", "result", "told"),
    [
        (["2 done"], "2 done", 1),
        (["2 done", "1 done"], "3 done", 3),
        (["2 done", None], "unknown", None),
        (["unknown", "1 done"], "unknown", None),
    ],
)
def test_answers_about_many_are_counted_together(
    tmp_path: Path, answers: list[str | None], result: str, told: float | None
):
    act = acts(tmp_path, "replay_many", *answers)

    assert (act.result, act.told) == (result, told)
