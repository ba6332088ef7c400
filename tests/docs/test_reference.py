"""The reference pages say what the code does: no more and no less."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from pulse_outbox.commands import run

ROOT = Path(__file__).parents[2]
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}


def log_calls() -> Iterator[tuple[ast.Call, str, str]]:
    """Every call of a `log` in the package: the call, its place, its level. The kit speaks in logs of tests only."""
    for path in sorted((ROOT / "pulse_outbox").rglob("*.py")):
        if ROOT / "pulse_outbox/testing" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=level)) if level in LEVELS:
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    yield node, place, "error" if level == "exception" else level


def constant_name(call: ast.Call, place: str) -> str:
    match call.args:
        case [ast.Constant(value=str(name))]:
            return name
    raise AssertionError(f"{place}: a log line has a constant name, and values as keywords")


def test_every_log_event_is_on_its_page_with_its_level():
    """And nothing else is: whoever is on call looks a line up there."""
    in_code = {(constant_name(call, place), level) for call, place, level in log_calls()}
    page = (ROOT / "docs/reference/logs.md").read_text()
    on_page = set(re.findall(r"^\| `([a-z_.]+)` \| (\w+) \|", page, re.MULTILINE))

    assert len(in_code) > 20
    assert sorted(in_code) == sorted(on_page)


def test_log_events_have_one_form():
    for call, place, _ in log_calls():
        assert re.fullmatch(r"outbox\.[a-z_]+", constant_name(call, place)), place


def test_every_option_of_run_is_on_its_page():
    parser = argparse.ArgumentParser(add_help=False)
    run.add_arguments(parser)
    page = (ROOT / "docs/reference/run.md").read_text()
    on_page = re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)

    options = [option for action in parser._actions for option in action.option_strings]
    assert sorted(options) == sorted(on_page)
