"""Links and their anchors lead somewhere, in every text of the repository; and every page can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages

TEXTS = sorted(
    str(path.relative_to(ROOT))
    for folder in (ROOT, *(ROOT / name for name in ("docs", "examples", "runbooks", "benchmarks", "chaos")))
    for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)
_LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"|srcset=\"([^\"]+)\"")


def without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)


def links_of(name: str) -> list[str]:
    return ["".join(found) for found in _LINK.findall(without_code((ROOT / name).read_text()))]


def anchors_of(path: Path) -> set[str]:
    """As GitHub makes them: a second heading of the same words gets a number."""
    text = re.sub(r"^( *)```.*?^\1```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    anchors = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", words).strip().lower().replace(" ", "-")
        anchors.add(f"{anchor}-{found[anchor]}" if anchor in found else anchor)
        found[anchor] = found.get(anchor, 0) + 1
    return anchors


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name):
    for link in links_of(name):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), f"{name}: {link}"
            continue
        file, _, anchor = link.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), f"{name} leads to {link}"
        assert ROOT in path.resolve().parents or path.resolve() == ROOT, f"{name}: {link} leads out"
        if anchor:
            assert anchor in anchors_of(path), f"{name} leads to {link}: {sorted(anchors_of(path))}"


def test_every_page_can_be_reached_from_the_index():
    """From docs/README.md, link by link."""
    seen: set[Path] = set()
    waiting = [ROOT / "docs/README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in links_of(str(page.relative_to(ROOT))):
            path = (page.parent / link.partition("#")[0]).resolve()
            if path.suffix == ".md" and ROOT / "docs" in path.parents and path.exists():
                waiting.append(path)

    assert [page for page in pages() if page != "README.md" and ROOT / page not in seen] == []
