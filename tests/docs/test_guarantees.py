"""Every promise names tests, and the tests are there."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import ROOT, text_of

PAGE = text_of("docs/guarantees.md")


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)

    assert len(named) > 60
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(file)]
    assert missing == []


def test_every_promise_names_a_test():
    sections = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]
    promises = [section for section in sections if len(section.strip().splitlines()) > 1]

    assert [section.partition("\n")[0] for section in promises if "::test_" not in section] == []
