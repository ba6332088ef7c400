"""The pages of README.md and docs/, and the blocks in them.

What a block's first line says is what the tests do with it:

    ```python              executed. Begins with `# name.py`: written to that file; `# name.py, at the end`: added to it
    ```sql                 executed as the database's owner; with `operator`, `producer` … as that role
    ```console             after `$ `: executed by bash, on a terminal; the rest is what it prints (… is anything)
    ```console background  … until the end of the page, then SIGINT; `fails`: … and its exit code is not 0
    ```toml, yaml, json    read. Begins with `# name`: written to that file
    ```text, mermaid       not executed: a sample, a picture
    ```… elsewhere=FILE    executed or held by that file of the tests

In a comment of the page, `<!-- prepare` is Python that the page needs and its reader does not, `<!-- check` asserts
what has come of the blocks before it, `<!-- empty database -->` asks for one without the schema. Everywhere
`postgresql://localhost/shop` stands for the page's own database.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = {"python", "sql", "console", "toml", "yaml", "json", "ini", "text", "mermaid"}
SAMPLES = {"text", "mermaid"}

_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$"
    r"|^<!-- (?P<hidden>prepare|check)\n(?P<code>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_FILE_NAME = re.compile(r"(?:#|--) (?P<name>[\w./-]+\.\w+)(?P<more>, at the end)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced or hidden block."""

    page: str
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"

    @property
    def file(self) -> tuple[str, bool] | None:
        """The name of the file that this is, and whether it is only a further part of it."""
        found = _FILE_NAME.fullmatch(self.text.partition("\n")[0].strip())
        return (found["name"], bool(found["more"])) if found else None

    @property
    def elsewhere(self) -> str | None:
        """The file of the tests that holds this block."""
        return next((word.removeprefix("elsewhere=") for word in self.words if "elsewhere=" in word), None)


def pages() -> list[str]:
    """README.md and every page of docs/, by their paths."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks_of(page: str) -> list[Block]:
    text = text_of(page)
    found = [_block(page, text, match) for match in _BLOCK.finditer(text)]
    fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
    fenced = [block for block in found if block.language not in ("prepare", "check")]
    assert fences == 2 * len(fenced), f"{page} has a fence that is not closed, or one inside another"
    return found


def _block(page: str, text: str, match: re.Match[str]) -> Block:
    hidden = match["hidden"]
    language, *words = [hidden] if hidden else match["info"].split() or [""]
    indent = match["indent"] or ""
    lines = (match["code"] if hidden else match["text"]).splitlines()
    return Block(
        page=page,
        line=text.count("\n", 0, match.start()) + 1,
        language=language,
        words=tuple(words),
        text="\n".join(line.removeprefix(indent) for line in lines) + "\n",
    )
