"""Ids that grow."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from uuid import RFC_4122, UUID

import pytest

from pulse_outbox.events import Uuid7Source, uuid7


def test_ids_are_version_7_and_grow():
    """Random ids cost the claim 10 to 15 %."""
    ids = [uuid7() for _ in range(5000)]

    assert ids == sorted(set(ids))
    assert {(one.version, one.variant) for one in ids} == {(7, RFC_4122)}


def test_ids_grow_while_the_clock_stands_still_or_goes_back():
    """NTP sets clocks back."""
    times = iter([5_000_000, 5_000_000, 3_000_000, 9_000_000])
    source = Uuid7Source(clock=lambda: next(times))

    ids = [source() for _ in range(4)]

    assert ids == sorted(set(ids))
    assert [one.int >> 80 for one in ids] == [5, 5, 5, 9]


@pytest.mark.parametrize(
    "clock", [lambda: 5_000_000, iter(range(9**9, 0, -1)).__next__], ids=["still", "back"]
)
def test_many_at_once_grow_like_single_ones(clock):
    source = Uuid7Source(clock=clock)

    ids = [source(), *source.many(2000), source(), *source.many(1), *source.many(0), source()]

    assert len(ids) == 2004
    assert ids == sorted(set(ids))
    assert {(one.version, one.variant) for one in ids} == {(7, RFC_4122)}


def test_many_at_once_are_uuids_like_any_other():
    """They are not made by UUID itself, which must not show."""
    for made in Uuid7Source().many(3):
        usual = UUID(int=made.int)

        assert (made, str(made), made.bytes, hash(made)) == (usual, str(usual), usual.bytes, hash(usual))
        assert made.is_safe is usual.is_safe
        assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == usual


def test_many_at_once_never_step_by_nothing():
    """Of random steps some are zero."""
    source = Uuid7Source(clock=lambda: 5_000_000, entropy=bytes)

    assert len(set(source.many(100))) == 100


@pytest.mark.parametrize("tail", [2**62 - 1, 2**62 - 2**33, 5 * 2**62 - 3])
def test_many_at_once_never_run_over_into_the_variant(tail):
    """Added to the whole number, their steps would change the bits that say what kind of UUID it is."""
    source = Uuid7Source(clock=lambda: 5_000_000)
    source()
    source._tail = tail

    ids = [*source.many(100), source()]

    assert ids == sorted(set(ids))
    assert {(one.version, one.variant) for one in ids} == {(7, RFC_4122)}


def test_many_at_once_borrow_the_next_millisecond_early():
    source = Uuid7Source(clock=lambda: 5_000_000)
    source()
    source._tail = 2**73

    ids = [*source.many(2), source()]

    assert [one.int >> 80 for one in ids] == [6, 6, 6]
    assert ids == sorted(set(ids))


def test_an_exhausted_millisecond_borrows_the_next():
    """The random part can't overflow into the version."""
    source = Uuid7Source(clock=lambda: 5_000_000, entropy=lambda size: b"\xff" * size)
    source()
    source._tail = 2**74 - 1

    following = source()

    assert following.int >> 80 == 6
    assert following.version == 7


def test_threads_share_one_source():
    """Two threads never get the same id."""
    source = Uuid7Source(clock=lambda: 5_000_000)
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: source(), range(4000)))

    assert len(set(ids)) == 4000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_makes_ids_of_its_own():
    """gunicorn forks its workers after the application is imported."""
    uuid7()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, uuid7().bytes)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        theirs = pipe.read()

    assert len(theirs) == 16
    assert theirs[6:] != uuid7().bytes[6:]
