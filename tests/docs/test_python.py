"""docs/reference/python.md has every public name, with its parameters and their defaults, and no other."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from datetime import timedelta
from typing import Any

import pytest

import pulse_outbox
from pulse_outbox import DeadLetter, Event, FailureCycle
from tests.docs.pages import text_of

PAGE = text_of("docs/reference/python.md")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
# Documented by their headings; others are described in a table or a sentence.
CLASSES = ("Outbox", "Dispatcher", "RetryPolicy")


def headings() -> list[tuple[str, str, str]]:
    """Module, dotted name, and parameters as written, None where there are no brackets."""
    found = []
    for title, section in SECTIONS.items():
        module = title if title.startswith("pulse_outbox.") else "pulse_outbox"
        for name, parameters in re.findall(r"^### `([\w.]+)(\(.*\))?`$", section, re.MULTILINE):
            found.append((module, name, parameters))
    return found


def lookup(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = inspect.getattr_static(found, part) if isinstance(found, type) else getattr(found, part)
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def parameters_of(found: Any) -> str:
    """As the page writes them: without types; a time in seconds; … for a function."""
    parts = []
    star = False
    for parameter in inspect.signature(found).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        text = parameter.name
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            text = f"**{text}"
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        if parameter.default is not inspect.Parameter.empty:
            text += f"={shown(parameter.default)}"
        parts.append(text)
    return f"({', '.join(parts)})"


def shown(default: object) -> str:
    if isinstance(default, timedelta):
        return f"{default.total_seconds():g}"
    return "…" if callable(default) else repr(default)


@pytest.mark.parametrize(("module", "name", "written"), headings())
def test_parameters_and_defaults(module, name, written):
    found = lookup(module, name)

    if written:
        assert written == parameters_of(found)
    else:
        assert isinstance(found, property | type), f"{name} takes parameters: name them"


def test_every_public_name_is_on_the_page():
    assert [name for name in pulse_outbox.__all__ if not re.search(rf"\b{name}\b", PAGE)] == []


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_member_is_on_the_page(name):
    kind = getattr(pulse_outbox, name)
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    members = {member for member in vars(kind) if not member.startswith("_")} - fields
    on_page = {
        heading.removeprefix(f"{name}.") for _, heading, _ in headings() if heading.startswith(f"{name}.")
    }

    assert members == on_page


def test_attributes_of_values_are_on_the_page():
    for title, names in (
        ("Event", [name for name in Event.__slots__ if not name.startswith("_")]),
        ("Values", DeadLetter.__slots__),
        ("Values", FailureCycle.model_fields),
    ):
        assert [name for name in names if f"`{name}`" not in SECTIONS[title]] == [], title


def test_every_error_is_on_the_page():
    in_code = {
        name
        for name in pulse_outbox.__all__
        if isinstance(getattr(pulse_outbox, name), type)
        and getattr(pulse_outbox, name).__module__ == "pulse_outbox.errors"
    }

    assert in_code - {"OutboxError"} == set(re.findall(r"^\| `(\w+)` \|", SECTIONS["Errors"], re.MULTILINE))
