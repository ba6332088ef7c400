"""The fenced blocks of the runbooks, as an operator finds them.

A block's first line says what it is written in, who may run it and what the tests call it:

    ```sql id=look               psql, by a login that has pulse_operator
    ```sql owner id=vacuum       psql, by another login; the text before it says so too
    ```sh id=status              bash, with the operator's PULSE_OUTBOX_DSN
    ```text                      not to be run: what it may look like
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "runbooks"
LOGINS = {
    "operator": "the operator",
    "operator+producer": "producer",
    "dispatcher": "dispatcher",
    "owner": "owner",
    "superuser": "superuser",
    "host": "host",
}
"""Who may run a block, and the word by which the text before it says so."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    runbook: str
    line: int
    language: str
    login: str
    name: str
    text: str
    before: str
    """The paragraph that it follows."""

    def __str__(self) -> str:
        return f"{self.runbook}.md:{self.line} ({self.name or self.language or 'without a language'})"


def runbooks() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.md"))


def blocks_of(runbook: str) -> list[Block]:
    text = (FOLDER / f"{runbook}.md").read_text()
    found = [_block(runbook, text, match) for match in _FENCE.finditer(text)]
    fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{runbook}.md has a fence that is not closed, or one inside another"
    return found


def _block(runbook: str, text: str, match: re.Match[str]) -> Block:
    language, *words = match["info"].split() or [""]
    names = [word.removeprefix("id=") for word in words if word.startswith("id=")]
    logins = [word for word in words if not word.startswith("id=")]
    assert len(names) <= 1, match["info"]
    assert len(logins) <= 1, match["info"]
    lines = match["text"].splitlines()
    return Block(
        runbook=runbook,
        line=text.count("\n", 0, match.start()) + 1,
        language=language,
        login=logins[0] if logins else "operator",
        name=names[0] if names else "",
        text="\n".join(line.removeprefix(match["indent"]) for line in lines),
        before=text[: match.start()].rstrip().rpartition("\n\n")[2],
    )
