"""Nothing in a runbook is only written: every block is executed by a test, or is a sample of output."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import pulse_outbox
from tests.runbooks.blocks import FOLDER, LOGINS, blocks_of, runbooks
from tests.runbooks.following import executed

for file in sorted(Path(__file__).parent.glob("test_*.py")):
    if file != Path(__file__):
        importlib.import_module(f"tests.runbooks.{file.stem}")

REQUIRED = {
    "a-job-died", "many-jobs-died", "a-poison-job", "the-backlog-grows", "a-worker-is-stuck", "upgrade-the-schema",
    "roll-out-a-generation", "database-failover", "restore-from-backup", "retention-and-bloat", "README",
}  # fmt: skip


def test_all_runbooks_are_there():
    """Alerts and `doctor` name them."""
    assert set(runbooks()) >= REQUIRED


def test_what_the_code_names_is_there():
    """An alert, a finding of `doctor`, a message: none leads to a page that does not exist."""
    package = Path(pulse_outbox.__file__).parent
    pattern = re.compile(r'runbook="([\w-]+)\.md"|runbooks/([\w-]+)\.md')
    sources = [file.read_text() for file in package.rglob("*.py")]
    named = {"".join(found) for text in sources for found in pattern.findall(text)}

    assert named
    assert named <= set(runbooks())


@pytest.mark.parametrize("runbook", runbooks())
def test_every_block_is_executed(runbook):
    to_run = {block.name: block for block in blocks_of(runbook) if block.language != "text"}

    assert [str(block) for name, block in to_run.items() if name not in executed[runbook]] == []
    assert executed[runbook] - to_run.keys() == set(), "a test follows blocks that are not there"


@pytest.mark.parametrize("runbook", runbooks())
def test_every_block_says_what_it_is(runbook):
    """Who has to run it is also in the text before it: a rendered page does not show a fence's first line."""
    blocks = blocks_of(runbook)
    names = [block.name for block in blocks if block.language != "text"]

    assert {block.language for block in blocks} <= {"sql", "sh", "text"}
    assert len(names) == len(set(names)), "two blocks have the same id"
    for block in blocks:
        assert block.login in LOGINS, block
        assert block.login == "operator" or LOGINS[block.login] in block.before.lower(), block
        if block.language == "sql":
            last = [line for line in block.text.splitlines() if not line.startswith("--")][-1]
            assert last.startswith("\\") or re.search(r"(;|\\g\w*)\s*(--.*)?$", last), (
                f"{block} has an open end"
            )


@pytest.mark.parametrize("runbook", runbooks())
def test_every_runbook_answers_the_same_questions(runbook):
    """Whoever has read one finds his way in the others."""
    headings = re.findall(r"^## (.*)$", (FOLDER / f"{runbook}.md").read_text(), re.MULTILINE)

    if runbook != "README":
        assert headings[0] == "Symptoms"
        assert "Look" in headings
        assert "Decide" in headings
        assert headings[-2:] == ["See that it worked", "Undo"]


@pytest.mark.parametrize("runbook", runbooks())
def test_links_lead_somewhere(runbook):
    text = (FOLDER / f"{runbook}.md").read_text()
    links = re.findall(r"\]\(([^):#]+)(?:#([^)]*))?\)", text)

    for file, anchor in links:
        assert (FOLDER / file).exists(), f"{runbook}.md leads to {file}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (FOLDER / file).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings}, (
                anchor
            )


def test_the_index_names_every_runbook():
    text = (FOLDER / "README.md").read_text()

    assert [name for name in runbooks() if name != "README" and f"({name}.md" not in text] == []
