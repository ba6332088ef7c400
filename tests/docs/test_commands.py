"""The pages of the commands have every command and every option of it, and no other; test_reference has `run`."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path

import pytest

from pulse_outbox.cli import COMMANDS

FOLDER = Path(__file__).parents[2] / "docs/reference"
PAGE = (FOLDER / "commands.md").read_text() + (FOLDER / "setup-commands.md").read_text()
ELSEWHERE = {"run"}
SPEAK_NO_JSON = {"demo"}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """By the words that call them: `status`, `dead list`."""
    found = {}
    for name in COMMANDS.keys() - ELSEWHERE:
        parser = argparse.ArgumentParser()
        import_module(f"pulse_outbox.commands.{name}").add_arguments(parser)
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not below:
            found[name] = parser
        for action in below:
            found |= {f"{name} {verb}": inner for verb, inner in action.choices.items()}
    return found


def sections() -> dict[str, str]:
    parts = re.split(r"^## `pulse-outbox ([a-z ]+?)(?: \[?[A-Z_]+…?\]?)?`$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_command_is_on_the_page():
    assert sorted(parsers()) == sorted(sections())


@pytest.mark.parametrize("name", sorted(parsers()))
def test_every_option_is_on_the_page(name):
    on_page = re.findall(r"^\| `(--[a-z-]+)", sections()[name].partition("\n## ")[0], re.MULTILINE)
    options = [option for action in parsers()[name]._actions for option in action.option_strings]

    assert sorted(on_page) == sorted(set(options) - {"-h", "--help"})


@pytest.mark.parametrize("name", sorted(parsers().keys() - SPEAK_NO_JSON))
def test_reading_commands_speak_json(name):
    assert "--json" in parsers()[name]._option_string_actions
