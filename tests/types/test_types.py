"""What the type checkers of an application find, and what they leave alone: mypy --strict and pyright's strict mode."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pulse_outbox.dispatcher.settings import DispatcherOptions, DispatcherSettings
from pulse_outbox.events import EventOptions, NewEvent

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = [HERE / name for name in ("application.py", "application_untyped.py", "misuse.py")]

Found = dict[tuple[str, int], set[str]]
"""The codes of what was reported, by file and line."""


def run(*command: str | Path) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def by_mypy(tmp_path: Path) -> Found:
    # With the repository's settings, and so with the cache of the checks that ran before the tests.
    found: Found = defaultdict(set)
    output = run(
        sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", *FILES
    )
    for line in output.splitlines():
        if report := re.match(r"(.+?):(\d+): error: .*\[([\w-]+)\]$", line):
            found[Path(report[1]).name, int(report[2])].add(report[3])
        else:
            assert ": note: " in line, output
    return found


def by_pyright(tmp_path: Path) -> Found:
    settings = {
        "include": [str(file) for file in FILES],
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    output = run(
        *(
            sys.executable,
            "-m",
            "basedpyright",
            "--outputjson",
            "-p",
            tmp_path,
            "--pythonpath",
            sys.executable,
        )
    )
    found: Found = defaultdict(set)
    report: dict[str, Any] = json.loads(output)
    assert report["summary"]["filesAnalyzed"] == len(FILES)
    for entry in report["generalDiagnostics"]:
        if entry["severity"] == "error":
            found[Path(entry["file"]).name, entry["range"]["start"]["line"] + 1].add(entry["rule"])
    return found


def expected(column: int) -> Found:
    """The marks of misuse.py, `# E: mypy's codes | pyright's rules`."""
    marks: Found = {}
    for number, line in enumerate((HERE / "misuse.py").read_text().splitlines(), 1):
        if mark := re.search(r"  # E: (.+?) \| (.+)$", line):
            marks["misuse.py", number] = set(mark[column].split(", "))
    assert len(marks) > 40
    return marks


@pytest.mark.parametrize(("checker", "column"), [(by_mypy, 1), (by_pyright, 2)], ids=["mypy", "pyright"])
@pytest.mark.timeout(180)  # without a cache, on a slow machine
def test_the_mistakes_are_found_and_nothing_else(tmp_path, checker, column):
    """Line by line: a mistake that is no longer found fails this, as does a report about correct use."""
    found, marked = checker(tmp_path), expected(column)

    # A checker may say more about the same line: pyright calls a decorator untyped that got wrong arguments.
    assert {place: codes & marked.get(place, codes) for place, codes in found.items()} == marked


def test_options_are_those_that_exist():
    """What checkers see of **options is written beside the classes that check them."""
    ours = set(NewEvent._fields) - {"topic", "payload"}
    assert set(EventOptions.__annotations__) == ours
    assert set(DispatcherOptions.__annotations__) == {field.name for field in fields(DispatcherSettings)}
