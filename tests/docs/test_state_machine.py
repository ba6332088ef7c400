"""The picture, the diagram and the table of the state machine show the same, and what the database knows."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from tests.docs.pages import ROOT, text_of

PAGE = text_of("docs/explanation/state-machine.md")
PICTURE = (ROOT / "docs/explanation/state-machine.svg").read_text()


def statuses(conn) -> set[str]:
    return set(conn.execute("select enum_range(null::pulse.status)::text[]").fetchone()[0])


def edges_of_diagram() -> set[tuple[str, str, str]]:
    return set(re.findall(r"^ +(\S+) --> (\S+): (\w+)$", PAGE, re.MULTILINE))


def test_picture_and_diagram_have_every_status(conn):
    shown = {element.text for element in ElementTree.fromstring(PICTURE).iter() if element.text}
    in_diagram = {state for edge in edges_of_diagram() for state in edge[:2]} - {"[*]"}

    assert statuses(conn) <= shown
    assert statuses(conn) == in_diagram


def test_diagram_and_table_agree():
    in_table = set()
    for line in re.findall(r"^\| `outbox_.*$", PAGE, re.MULTILINE):
        calls, before, after = (cell.strip() for cell in line.split("|")[1:4])
        verb = re.findall(r"`outbox_(\w+)`", calls)[0]
        for source in before.split(", ") if before else ["[*]"]:
            in_table |= {(source, target, verb) for target in after.split(", ")}

    assert in_table - {("RUNNING", "RUNNING", "heartbeat")} == edges_of_diagram()


def test_every_call_of_the_table_is_a_function(conn):
    names = set(re.findall(r"`(outbox_\w+)`", PAGE)) - {"outbox_due"}
    functions = {
        name
        for [name] in conn.execute("select proname from pg_proc where pronamespace = 'pulse'::regnamespace")
    }

    assert names
    assert names <= functions


def test_the_picture_stands_alone_in_light_and_dark():
    """Nothing is loaded from elsewhere, and the colours follow the reader's."""
    assert "prefers-color-scheme: dark" in PICTURE
    assert re.findall(r'(?:href|src)="(?!#)', PICTURE) == []
    assert "<script" not in PICTURE
