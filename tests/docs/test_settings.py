"""docs/reference/settings.md has every setting with its default, and every variable of the environment."""

from __future__ import annotations

import dataclasses
import inspect
import re
from datetime import timedelta

import pytest

from pulse_outbox import Outbox, RetryPolicy
from pulse_outbox.dispatcher.settings import DispatcherSettings
from pulse_outbox.storage_retry import StorageRetries, StorageRetry
from tests.docs.pages import ROOT, text_of

PAGE = text_of("docs/reference/settings.md")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
BY_CHANCE = {"worker"}


def rows(title: str) -> dict[str, list[str]]:
    """The cells of a section's table, by setting."""
    lines = re.findall(r"^\| `(\w+)` \| (.*) \|$", SECTIONS[title], re.MULTILINE)
    return {name: [cell.strip().strip("`") for cell in cells.split(" | ")] for name, cells in lines}


def shown(value: object) -> str:
    if isinstance(value, timedelta):
        for unit, one in (("days", 86400), ("min", 60), ("s", 1), ("ms", 0.001)):
            if value.total_seconds() >= one:
                return f"{value.total_seconds() / one:g} {unit}"
    return f"{type(value).__name__}()" if isinstance(value, StorageRetries) else repr(value)


def fields_of(kind: type, instance: object | None = None) -> dict[str, str]:
    found = {}
    for field in dataclasses.fields(kind):
        default: object = field.default
        if instance is not None:
            default = getattr(instance, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[field.name] = shown(default)
    return found


def arguments_of(function: object, *without: str) -> dict[str, str]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]  # it is callable
    return {
        parameter.name: shown(parameter.default) for parameter in parameters if parameter.name not in without
    }


@pytest.mark.parametrize(
    ("title", "in_code"),
    [
        ("Dispatcher", fields_of(DispatcherSettings)),
        ("RetryPolicy", fields_of(RetryPolicy)),
        ("Outbox", arguments_of(Outbox)),
        ("Handler", arguments_of(Outbox.handler, "self", "topic")),
        ("StorageRetry", fields_of(StorageRetry)),
    ],
)
def test_settings_and_defaults(title, in_code):
    on_page = {name: cells[0] for name, cells in rows(title).items()}

    assert on_page.keys() == in_code.keys()
    for name in on_page.keys() - BY_CHANCE:
        assert on_page[name] == in_code[name], name


def test_claims_have_waits_of_their_own():
    on_page = {name: cells[1] for name, cells in rows("StorageRetry").items()}

    assert on_page == fields_of(StorageRetry, StorageRetries().dequeue)


def test_every_variable_of_the_environment_is_on_the_page():
    pattern = re.compile(r"\b(PULSE_OUTBOX_[A-Z_]+|SENTRY_DSN|NO_COLOR|NOTIFY_SOCKET|WATCHDOG_USEC)\b")
    in_code = {
        name for path in (ROOT / "pulse_outbox").rglob("*.py") for name in pattern.findall(path.read_text())
    }
    own = {name for name in in_code if name.startswith("PULSE_OUTBOX_DEMO")}

    assert in_code - own == set(pattern.findall(SECTIONS["Environment"]))
