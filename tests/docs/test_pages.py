"""Every block of every page does what it says, in the order of the page, in an empty directory."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.docs.pages import LANGUAGES, ROOT, SAMPLES, blocks_of, pages, text_of
from tests.docs.reader import Reader, first_missing

RUNNABLE = [
    page
    for page in pages()
    if any(block.language not in SAMPLES and not block.elsewhere for block in blocks_of(page))
]


@pytest.mark.timeout(240)  # a page may start a dozen processes, one after the other
@pytest.mark.parametrize("page", RUNNABLE)
def test_page_works(page, tmp_path, testbed):
    """A reader who only copies gets there."""
    migrated = "<!-- empty database -->" not in text_of(page)
    with testbed.database(migrated=migrated) as dsn, Reader(tmp_path, dsn) as reader:
        for block in blocks_of(page):
            reader.follow(block)
        reader.finish()


@pytest.mark.parametrize("page", pages())
def test_blocks_say_what_they_are(page):
    for block in blocks_of(page):
        assert block.language in LANGUAGES | {"prepare", "check"}, block
        assert block.elsewhere is None or (ROOT / block.elsewhere).is_file(), block


@pytest.mark.parametrize("page", pages())
def test_what_is_to_be_installed_exists(page):
    """`pip install 'pulse-outbox[…]'` is not run here; that there are such extras is seen."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:pulse-outbox|checkout)\[([\w,]+)\]", text_of(page)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), page


def test_output_that_is_not_printed_is_missed():
    """The reader is no pushover: lines have to be there, in their order."""
    output = "one\n  two   three\nfour\n"

    assert first_missing(["one", "two three", "…"], output) is None
    assert first_missing(["o…e", "t… three"], output) is None
    assert first_missing(["two three", "one"], output) == "one"
    assert first_missing(["five"], output) == "five"


def test_a_page_that_does_not_work_is_noticed(tmp_path, dsn):
    with Reader(tmp_path, dsn) as reader:
        for language, text in (
            ("console", "$ echo a\nb\n"),
            ("console", "$ false\n"),
            ("python", "raise AssertionError('seen')\n"),
            ("check", "assert 1 == 2, 'seen'\n"),
        ):
            with pytest.raises(AssertionError):
                reader.follow(_block(language, text))
        with pytest.raises(Exception, match="no_such_table"):
            reader.follow(_block("sql", "select 1;\nselect * from no_such_table;\n"))


def _block(language: str, text: str):
    from tests.docs.pages import Block

    return Block(page="x.md", line=1, language=language, words=(), text=text)
