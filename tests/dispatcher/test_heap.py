"""A dispatcher that has the process for itself spares the garbage collector what was loaded before, and haste."""

from __future__ import annotations

import gc
import subprocess
import sys

import psycopg
import pytest

from pulse_outbox.dispatcher.heap import quiet_collector

APPLICATION = """
import gc, sys
from pulse_outbox import Dispatcher, Event, Outbox

outbox = Outbox()

@outbox.handler("job")
async def job(event: Event) -> None:
    print("frozen:", gc.get_freeze_count() > 10_000)

Dispatcher(outbox, dsn=sys.argv[1], burst=True).run()
print("after:", gc.get_freeze_count())
"""


def test_only_what_was_there_is_frozen_and_until_the_end():
    class Node:
        other: Node

    with quiet_collector():
        frozen = gc.get_freeze_count()
        node = Node()
        node.other = node
        del node
        assert gc.collect() > 0, "what comes later is collected as ever"

    assert frozen > 1000
    assert gc.get_freeze_count() == 0


def test_what_an_application_has_frozen_stays_so():
    gc.freeze()
    try:
        with quiet_collector():
            pass
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("own", "meanwhile"), [(700, 5000), (20_000, 20_000), (0, 0)])
def test_the_collector_looks_at_new_objects_less_often_unless_it_was_told_to(own: int, meanwhile: int):
    """Zero: an application has switched it off."""
    before = gc.get_threshold()
    gc.set_threshold(own, 11, 12)
    try:
        with quiet_collector():
            assert gc.get_threshold() == (meanwhile, 11, 12)
        assert gc.get_threshold() == (own, 11, 12)
    finally:
        gc.set_threshold(*before)


def test_a_dispatcher_freezes_while_it_runs(dsn):
    with psycopg.connect(dsn) as conn:
        conn.execute("select pulse.outbox_enqueue('job', '{}')")

    run = subprocess.run(
        [sys.executable, "-c", APPLICATION, dsn], capture_output=True, text=True, timeout=60, check=True
    )

    assert [line for line in run.stdout.splitlines() if "outbox." not in line] == ["frozen: True", "after: 0"]
